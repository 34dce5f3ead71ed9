"""A worker that measures the floor: the bare matrix products of a step with the services' own kernels and shapes, and
the machine's speed. `python -m outrider.bench.floor FOLDER THREADS`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.bench.harness import Handler, serve_requests
from outrider.engine.checkpoint import read_tensors, weight_files
from outrider.engine.models.base import NotForDecoder
from outrider.engine.models.decoder_config import MODEL_TYPES, parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder, can_run

COPY_ELEMENTS = 64 << 20  # 256 MiB each way: no cache holds them
SQUARE = 1536


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
    return NativeDecoder(parsed, read_tensors(weight_files(folder))).kernel.products


def probe(passes: int) -> dict[str, float]:
    """Copy bandwidth (read and written bytes both count) and the speed of a float32 product."""
    source, copy = torch.ones(COPY_ELEMENTS), torch.empty(COPY_ELEMENTS)
    copies = timed(lambda: copy.copy_(source), passes)
    left, right = torch.randn(SQUARE, SQUARE), torch.randn(SQUARE, SQUARE)
    products = timed(lambda: left @ right, passes)
    return {
        "copy_gb_s": 2 * 4 * COPY_ELEMENTS / (min(copies) * 1e6),
        "product_gflop_s": 2 * SQUARE**3 / (min(products) * 1e6),
    }


def timed(work: Callable[[], object], passes: int) -> list[float]:
    """Milliseconds of each pass, after one that counts for nothing."""
    work()
    times = []
    for _ in range(passes):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return times


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
        return {"ms": timed(lambda: products(question["rows"]), question["passes"])}

    return handle


if __name__ == "__main__":
    sys.exit(serve_requests(make_handler))
