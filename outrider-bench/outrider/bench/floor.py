"""A worker that measures the floor: the bare matrix products of a step with the services' own kernels and shapes, and
the machine's speed. `python -m outrider.bench.floor FOLDER THREADS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outrider.bench.harness import Handler, serve_requests
from outrider.bench.kernels import Probe, timed
from outrider.bench.kernels_cases import CPU
from outrider.engine.checkpoint import read_weights, weight_files
from outrider.engine.models.base import NotForDecoder
from outrider.engine.models.decoder_config import MODEL_TYPES, parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder, can_run


def make_products(folder: Path) -> Callable[[int], None] | None:
    """Every product of a step of so many rows, by the C kernels on the checkpoint's own weights; None for models that
    are not theirs."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") not in MODEL_TYPES:
        return None
    try:
        parsed = parse_config(config)
    except NotForDecoder:
        return None
    if not can_run(parsed, torch.float32, torch.device("cpu")):
        return None
    return NativeDecoder(parsed, read_weights(folder, weight_files(folder))).kernel.products


def probe(passes: int) -> dict[str, float]:
    """What the machine reaches at this moment."""
    device = Probe(CPU)
    copies, reads, products = (passes_us(work, passes) for work in (device.copy, device.read, device.product))
    return asdict(device.rates(copies, min(reads), min(products)))


def passes_us(work: Callable[[], object], passes: int) -> list[float]:
    """Microseconds of each pass, after one that counts for nothing."""
    work()
    return [timed(CPU, work)() for _ in range(passes)]


def make_handler(arguments: Sequence[str]) -> Handler:
    """Answers {"passes", "rows"} with the products' times (none for models that the kernels do not run), and {"passes"}
    with the probe's."""
    folder, threads = arguments
    torch.set_num_threads(int(threads))
    products = make_products(Path(folder))

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "rows" not in question:
            return probe(question["passes"])
        if products is None:
            return {"ms": []}
        return {"ms": [us / 1e3 for us in passes_us(lambda: products(question["rows"]), question["passes"])]}

    return handle


if __name__ == "__main__":
    sys.exit(serve_requests(lambda: make_handler(sys.argv[1:])))
