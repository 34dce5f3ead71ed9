"""A target's whole step, replayed and launched kernel by kernel, against the bytes that it must read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from kernels_case import BLOCK_SIZE, ROWS, SMALL, TINY, K, Model, Place
from kernels_measure import Probe, timed

from outrider.commands.bench_result import Json, spread
from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.buckets import StepLimits
from outrider.engine.graphs import GraphDevice
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.weights import expected_shapes
from outrider.engine.runner import ModelRunner

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of random weights, with one matrix for embedding and head."""

    model: Model
    num_layers: int
    vocab_size: int
    context: int
    batches: tuple[int, ...]


REAL = Shape(SMALL, 16, 128256, 1024, (1, 8, 32))
QUICK = Shape(TINY, 1, 211, 40, (1, 2))


def build(shape: Shape, place: Place) -> Decoder:
    """The decoder."""
    model = shape.model
    config = parse_config({
        "model_type": "llama", "vocab_size": shape.vocab_size, "hidden_size": model.hidden,
        "intermediate_size": model.intermediate, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    })  # fmt: skip
    state = {
        name: torch.empty(size, dtype=place.dtype, device=place.device).normal_(0, 0.02)
        for name, size in expected_shapes(config).items()
    }
    return Decoder(config, state, dtype=place.dtype, device=torch.device(place.device))


def captured_runner(shape: Shape, place: Place, capture: GraphDevice) -> tuple[ModelRunner, Json]:
    """A runner whose steps are captured, and what that took."""
    model = build(shape, place)
    blocks = -(-(shape.context + ROWS) // BLOCK_SIZE)
    runner = ModelRunner(model, blocks * max(shape.batches), BLOCK_SIZE)
    before, started = capture.reserved_bytes(), time.perf_counter()
    runner.capture(StepLimits(256, max(shape.batches), ROWS), capture)
    seconds = round(time.perf_counter() - started, 2)
    return runner, {"seconds": seconds, "bytes": capture.reserved_bytes() - before}


def measure_steps(shape: Shape, place: Place, runner: ModelRunner, repeats: int) -> Json:
    """A row for every batch."""
    probe = Probe(place, quick=shape is QUICK)
    return {"rows": [_row(shape, place, runner, probe, batch, repeats) for batch in shape.batches]}


def render(result: Json) -> Iterator[str]:
    """The table."""
    yield f"Steps of {ROWS} rows a sequence (k = {K}) on {result['device']['name']}; medians, milliseconds."
    yield ""
    yield "| batch | replayed | launched | on the device | floor | share of floor |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for row in result["rows"]:
        times = (f"{row[name]['median'] / 1e3:.3f}" for name in ("replayed_us", "launched_us", "device_us", "floor_us"))
        yield f"| {row['batch']} | {' | '.join(times)} | {row['share_of_floor']['median']:.2f} |"


@torch.inference_mode()
def _row(shape: Shape, place: Place, runner: ModelRunner, probe: Probe, batch: int, repeats: int) -> Json:
    entries = _entries(shape, batch)
    ways: dict[str, Callable[[], object]] = {
        "replayed_us": lambda: runner.forward(entries),
        "launched_us": lambda: runner.model.forward(build_batch(entries, BLOCK_SIZE, place.device), runner.cache),
    }
    num_bytes = _bytes(runner, shape, batch)
    found: dict[str, list[float]] = defaultdict(list)
    for repeat in range(WARM_UP + repeats):
        times = {name: _wall_us(place, way) for name, way in ways.items()}
        _wall_us(place, ways["replayed_us"])
        times["device_us"] = runner.last_forward_us
        fastest = min(timed(place, probe.copy)() / 2, timed(place, probe.read)())  # the copy reads and writes
        times["floor_us"] = num_bytes / (probe.num_bytes / fastest)
        times["share_of_floor"] = times["floor_us"] / times["replayed_us"]
        if repeat >= WARM_UP:
            for name, value in times.items():
                found[name].append(value)
    return {"batch": batch, "bytes": num_bytes} | {name: spread(values) for name, values in found.items()}


def _entries(shape: Shape, batch: int) -> Sequence[BatchEntry]:
    blocks = -(-(shape.context + ROWS) // BLOCK_SIZE)
    ids = [7919 * index % shape.vocab_size for index in range(ROWS)]
    tables = [list(range(blocks * index, blocks * (index + 1))) for index in range(batch)]
    return [BatchEntry(ids, shape.context, table, ROWS) for table in tables]


def _bytes(runner: ModelRunner, shape: Shape, batch: int) -> int:
    """Every weight once, the keys and values of the contexts, and the logits that are written."""
    model, size = shape.model, runner.model.dtype.itemsize
    attention = model.hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    layer = attention + 3 * model.hidden * model.intermediate
    weights = (shape.num_layers * layer + shape.vocab_size * model.hidden) * size
    cached = shape.context * bytes_per_block(runner.model.layers, runner.model.dtype, 1)
    return weights + batch * (cached + ROWS * shape.vocab_size * torch.float32.itemsize)


def _wall_us(place: Place, call: Callable[[], object]) -> float:
    """Until the device is done, as a service waits for the logits."""
    started = time.perf_counter()
    call()
    if place.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6
