"""A worker that measures the floor: the bare matrix products of a step with the services' own kernels and shapes, and
the machine's speed. `python -m outrider.bench.floor FOLDER THREADS`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.bench.harness import Handler, serve_requests
from outrider.engine.checkpoint import read_tensors, weight_files
from outrider.engine.models.base import NotForDecoder
from outrider.engine.models.decoder import KEEP_PLAIN_BYTES
from outrider.engine.models.decoder_config import MODEL_TYPES, DecoderConfig, parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder, can_run
from outrider.engine.models.weights import num_parameters
from outrider.kernels.layers.reference import Linear

COPY_ELEMENTS = 64 << 20  # 256 MiB each way: no cache holds them
SQUARE = 1536


class Products(Protocol):
    """Every product of one step, each weight with memory of its own."""

    def run(self, rows: int) -> None:
        """All of them once, for so many rows."""


class NativeProducts:
    """The checkpoint's own weights, as the C kernels read them."""

    def __init__(self, config: DecoderConfig, folder: Path) -> None:
        self._kernel = NativeDecoder(config, read_tensors(weight_files(folder))).kernel

    def run(self, rows: int) -> None:
        self._kernel.products(rows)


class PackedProducts:
    """Random weights, as PyTorch reads them."""

    def __init__(self, config: DecoderConfig) -> None:
        keep = num_parameters(config) * torch.float32.itemsize <= KEEP_PLAIN_BYTES
        self._linears: list[tuple[Linear, int]] = []
        for _ in range(config.num_layers):
            for outputs, inputs in layer_shapes(config):
                self._linears.append((_random_linear(outputs, inputs, keep), inputs))
        head = _random_linear(config.vocab_size, config.hidden_size, keep or config.tied_embeddings)
        self._linears.append((head, config.hidden_size))

    @torch.inference_mode()
    def run(self, rows: int) -> None:
        inputs = {width: torch.ones(rows, width) for _, width in self._linears}
        for linear, width in self._linears:
            linear(inputs[width])


def make_products(folder: Path) -> Products | None:
    """Of the kernels that the services use for this model; None for models that are not our decoder's."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") not in MODEL_TYPES:
        return None
    try:
        parsed = parse_config(config)
    except NotForDecoder:
        return None
    if can_run(parsed, torch.float32, torch.device("cpu")):
        return NativeProducts(parsed, folder)
    return PackedProducts(parsed)


def layer_shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """The products of a layer, fused as the decoder fuses them: [out, in]."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        (heads + 2 * kv_heads, config.hidden_size),
        (config.hidden_size, heads),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


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
    """Answers {"passes", "rows"} with the products' times (none for models that are not our decoder's), and {"passes"}
    with the probe's."""
    folder, threads = arguments
    torch.set_num_threads(int(threads))
    products = make_products(Path(folder))

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        if "rows" not in question:
            return probe(question["passes"])
        if products is None:
            return {"ms": []}
        return {"ms": timed(lambda: products.run(question["rows"]), question["passes"])}

    return handle


def _random_linear(outputs: int, inputs: int, keep_plain: bool) -> Linear:
    weight: Tensor = torch.empty(outputs, inputs).uniform_(-0.05, 0.05)
    return Linear(weight, keep_plain=keep_plain)


if __name__ == "__main__":
    sys.exit(serve_requests(make_handler))
