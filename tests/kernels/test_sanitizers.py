"""The C kernels under AddressSanitizer and UndefinedBehaviorSanitizer: every variant that this processor runs is
compiled with them, and a process of its own computes random shapes, in memory that ends where each tensor does."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from outrider.kernels.cpu import build
from outrider.kernels.cpu import library as library_module

SANITIZERS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
              "-U_FORTIFY_SOURCE")  # whose checks stand before those of the sanitizers  # fmt: skip
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
TIMEOUT_S = 280
# A write behind a row's end that is the longest one, a shift that C leaves undefined, and a step behind the last
# inputs, of packed weights and of the matrix unit: each has to be seen.
MUTANTS = {
    "best.c": ("AddressSanitizer", "at < count; at++) best[at] = none", "at <= count; at++) best[at] = none"),
    "mixture.h": ("AddressSanitizer", "return woken * placed_size(inputs, 1) + placed_size(inputs, pairs);",
                  "return placed_size(inputs, pairs) / 2;"),
    "noise.c": ("runtime error", "(uint32_t)purpose << 28", "(uint32_t)((int32_t)(purpose + 8) << 28)"),
    "packed_floats.h": ("AddressSanitizer", "k < inputs; k += STEP_IN, panel += code_bytes(kind)",
                        "k <= inputs; k += STEP_IN, panel += code_bytes(kind)"),
    "packed_integers.h": ("AddressSanitizer", "at_step < steps; at_step++", "at_step <= steps; at_step++"),
    "tiles.h": ("AddressSanitizer", "step < steps; step++, x += TILE", "step <= steps; step++, x += TILE"),
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD"),
]


@pytest.fixture(scope="module")
def preload() -> str:
    """The libraries of the sanitizers, which have to be loaded before all others."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    names = "libasan.so", "libubsan.so"
    said = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
        ).stdout.strip()
        for name in names
    ]
    if not all(os.path.isabs(path) and Path(path).exists() for path in said):
        pytest.skip("the compiler has no sanitizers")
    return ":".join(said)


def variants() -> list[str]:
    """Those that this processor runs, the fastest first."""
    return [variant.name for variant in library_module.wanted_variants("on", library_module.cpu_features())]


def compiled(name: str, folder: Path) -> Path:
    """A variant's library with the sanitizers in it."""
    variant = next(variant for variant in build.variants() if variant.name == name)
    compiler = build.find_compiler()
    assert compiler is not None
    return build.compile_library(replace(variant, flags=(*variant.flags, *SANITIZERS)), folder, compiler)


def computed(library: Path, preload: str, num_shapes: int) -> subprocess.CompletedProcess[str]:
    """What becomes of random shapes in a process of its own."""
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "2"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", f"from kernels.test_sanitizers import main; main({str(library)!r}, {num_shapes})"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def need_unit(name: str) -> None:
    """Skips where this needs a matrix unit that the system keeps from processes."""
    loaded = library_module.cpu_library_name() or ""
    if name == "c-amx" and not loaded.startswith(name):
        pytest.skip("no matrix unit that processes may use")


@pytest.mark.parametrize("name", variants())
def test_random_shapes(name: str, preload: str, tmp_path: Path) -> None:
    need_unit(name)
    done = computed(compiled(name, tmp_path), preload, 40)
    assert done.returncode == 0 and done.stdout.endswith("40 shapes\n"), done.stderr[-4000:]


@pytest.mark.parametrize("file", MUTANTS)
def test_a_fault_is_seen(file: str, preload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "c-amx" if file == "tiles.h" else variants()[-1]
    need_unit(name)
    sanitizer, right, wrong = MUTANTS[file]
    sources = Path(shutil.copytree(build.SOURCES, tmp_path / "cpu"))
    text = (sources / file).read_text(encoding="utf-8")
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(build, "SOURCES", sources)
    done = computed(compiled(name, tmp_path), preload, 12)
    assert done.returncode != 0 and sanitizer in done.stderr, done.stderr[-4000:]


def main(path: str, num_shapes: int) -> None:
    """In the process that the sanitizers watch. Prints how many shapes were computed."""
    import torch  # here alone: under the sanitizers it takes its time

    torch.set_num_threads(2)
    rng = random.Random(7)
    with kernels_of(path):
        for _ in range(num_shapes):
            multiply(rng, torch)
            choose(rng, torch)
            decode(rng, torch)
    print(f"{num_shapes} shapes")


@contextmanager
def kernels_of(path: str) -> Iterator[None]:
    """The library at a path is this process's."""
    library: Any = ctypes.CDLL(path)
    library.tiles_allowed.restype = ctypes.c_int64
    with patch.object(library_module, "_loaded", lambda: ("c-sanitized", library)):
        yield


def multiply(rng: random.Random, torch: Any) -> None:
    """One product: weights of every kind, few rows and many."""
    from outrider.kernels.cpu.linear import CpuLinear

    outputs, inputs, rows = rng.randint(1, 140), 16 * rng.randint(1, 20), rng.choice([1, 2, 3, 5, 12, 13, 25, 40])
    weight = torch.randn(outputs, inputs)
    if rng.random() < 0.5:
        weight = weight.bfloat16().float()
    kept = maybe_quantized(rng, outputs, inputs) if rng.random() < 0.6 else None
    weight = weight if kept is None else kept.decode()
    bias = torch.randn(outputs) if rng.random() < 0.5 else None
    product = CpuLinear(weight if kept is None else kept, bias, rounds=rng.random() < 0.5)
    x = torch.randn(rows, inputs)
    torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, bias), atol=1e-3, rtol=1e-3)


def maybe_quantized(rng: random.Random, outputs: int, inputs: int) -> Any:
    """A quantised matrix of any kind and seed; None where the inputs are whole blocks of none."""
    import torch
    from support.quantized import BLOCKS, by_groups, matrix_of, random_blocks

    if inputs % 32:
        return None
    seed = rng.randrange(1000)
    if rng.random() < 0.3:
        span = rng.choice([span for span in (32, 64, 128, inputs) if inputs % span == 0])
        dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32])
        bits = rng.choice([4, 5, 6, 8])
        return by_groups(bits, outputs, inputs, span, dtype, rng.random() < 0.5, seed)
    kind = rng.choice([kind for kind, (block, _) in BLOCKS.items() if inputs % block == 0])
    return matrix_of(kind, random_blocks(kind, outputs, inputs, seed))


def choose(rng: random.Random, torch: Any) -> None:
    """The best ids of rows, and random numbers, of any width."""
    from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise
    from outrider.kernels.sampling.reference import best_ids

    rows, columns = rng.randint(1, 5), rng.randint(1, 700)
    logits = torch.randn(rows, columns)
    logits[0, rng.randrange(columns)] = rng.choice([float("nan"), float("inf"), -float("inf")])
    best_ids(logits, min(columns, rng.randint(1, 64)))
    seeds, positions = (torch.tensor([as_int64(rng.getrandbits(64)) for _ in range(rows)]) for _ in range(2))
    completions = torch.tensor([rng.randrange(64) for _ in range(rows)])
    exponential_noise(seeds, positions, completions, columns, rng.choice(list(Purpose)))


def decode(rng: random.Random, torch: Any) -> None:
    """A pass of several sequences, of which some bring a tree, by a decoder of any shape."""
    from outrider.engine.batch import BatchEntry, build_batch
    from outrider.kernels.cpu.decoder import (
        CpuDecoder,
        FeedWeights,
        Kind,
        LayerWeights,
        MixtureWeights,
        RaggedRows,
        kind_for,
    )
    from outrider.kernels.layers.reference import rotary_table

    hidden, width, dim = 16 * rng.randint(1, 6), rng.randint(1, 150), 16 * rng.randint(1, 5)
    packs = rng.random() < 0.4
    if packs:
        hidden, width = rng.choice([32, 96, 256, 512]), rng.choice([32, 75, 256])
    kv_heads = rng.randint(1, 3)
    heads, vocab, block, longest = kv_heads * rng.randint(1, 3), rng.randint(1, 120), rng.choice([1, 3, 4, 16]), 80
    has_norms, is_gelu = rng.random() < 0.5, rng.random() < 0.5
    half = rng.random() < 0.5
    bits = rng.random()

    def numbers(*shape: int) -> Any:
        drawn = torch.randn(*shape) * 0.2
        return drawn.bfloat16().float() if half else drawn

    def matrix(*shape: int) -> Any:
        kept = maybe_quantized(rng, *shape) if packs and rng.random() < 0.6 else None
        if kept is None and packs and rng.random() < 0.5:
            return numbers(*shape).half()
        return numbers(*shape) if kept is None else kept

    def qkv() -> Any:
        parts = tuple(matrix(count * dim, hidden) for count in (heads, kv_heads, kv_heads))
        return parts if packs else torch.cat(parts)

    def feed(width: int) -> FeedWeights:
        return FeedWeights(matrix(width, hidden), matrix(width, hidden), matrix(hidden, width))

    def mixture() -> MixtureWeights:
        count, shares = rng.randint(1, 9), rng.random() < 0.5
        experts = [feed(rng.choice([32, 75, width])) for _ in range(count + shares)]
        router = numbers(count + shares, hidden)
        return MixtureWeights(router, experts, rng.randint(1, count), rng.random() < 0.5, shares)

    is_mixed = rng.random() < 0.4
    rotary = rotary_table(1e4 ** -(torch.arange(0, dim, 2) / dim), 1.0, longest, torch.float32)
    further: dict[str, Any] = {}
    if has_norms:
        further = {
            "output_norm": numbers(hidden),
            "down_norm": numbers(hidden),
            "qk_norm": numbers(heads + kv_heads, dim),
            "norms_all_heads": rng.random() < 0.5,
        }
    layers = [
        LayerWeights(
            qkv(), matrix(hidden, heads * dim), mixture() if is_mixed and window else feed(width),
            numbers(hidden), numbers(hidden), rotary,
            window=window, **further,
        )
        for window in (None, rng.randint(1, 20))
    ]  # fmt: skip
    kind = None if packs else Kind.BYTES if bits < 0.3 else kind_for(half)
    embeddings = matrix(vocab, hidden)
    head = embeddings if rng.random() < 0.5 else matrix(vocab, hidden)
    if half and isinstance(embeddings, torch.Tensor):
        embeddings = embeddings.bfloat16()
    model = CpuDecoder(
        embeddings, layers, numbers(hidden), head, kind=kind, rounds=rng.random() < 0.5,
        heads=heads, kv_heads=kv_heads, eps=1e-5, scale=dim**-0.5,
        activation="gelu_tanh" if is_gelu else "silu", attention_softcap=2.0 if is_gelu else None,
        logit_softcap=3.0 if is_gelu else None,
    )  # fmt: skip
    entries, next_block = [], 0
    for _ in range(rng.randint(1, 4)):
        context = rng.randint(1, longest)
        num_rows = rng.randint(1, min(context, 30))
        table = list(range(next_block, next_block + -(-context // block)))
        next_block += len(table)
        rng.shuffle(table)
        ids = [rng.randrange(vocab) for _ in range(num_rows)]
        tree = [rng.randint(0, node) for node in range(rng.randint(1, num_rows - 1))] if num_rows > 1 else []
        tree = tree if rng.random() < 0.4 else []
        entries.append(BatchEntry(ids, context - num_rows, table, rng.randint(0, num_rows), tree))
    batch = build_batch(entries, block)
    rows = RaggedRows(
        batch.positions, batch.slot_mapping, batch.block_tables, batch.query_starts, batch.context_lens, batch.parents
    )
    slots = torch.tensor([rng.randint(-1, 1) for _ in batch.token_ids], dtype=torch.int32)
    sizes = heads * dim, kv_heads * dim, hidden, width
    bank, adapters = adapters_of(rng, torch, sizes, slots) if rng.random() < 0.6 else (None, None)
    caches = [torch.zeros(next_block, block, kv_heads, dim) for _ in range(4)]
    taps = sorted(rng.sample(range(3), rng.randint(0, 3)))
    states = torch.zeros(len(batch.token_ids), max(len(taps), 1), hidden)
    tapped = (taps, states) if taps else None
    logits = model.forward(batch.token_ids, rows, caches[:2], caches[2:], batch.logit_rows, tapped, adapters)
    assert logits.isfinite().all()
    del bank
    model.products(len(batch.token_ids))


def adapters_of(rng: random.Random, torch: Any, sizes: tuple[int, int, int, int], slots: Any) -> Any:
    """Two adapters of two layers, of some projections each, of any rank; what a pass is told of them."""
    from outrider.kernels.cpu.low_rank import MOST_RANK, PROJECTIONS, CpuAdapter, CpuAdapters

    heads, kept, hidden, width = sizes
    outputs = dict(zip(PROJECTIONS, (heads, kept, kept, hidden, width, width, hidden), strict=True))
    inputs = dict(zip(PROJECTIONS, (hidden, hidden, hidden, heads, hidden, hidden, width), strict=True))

    def factors(name: str) -> tuple[Any, Any, float]:
        rank = rng.randint(1, MOST_RANK)
        return torch.randn(rank, inputs[name]) * 0.1, torch.randn(outputs[name], rank) * 0.1, 0.5

    bank = CpuAdapters(2, {name: (outputs[name], inputs[name]) for name in PROJECTIONS})
    for slot in range(2):
        names = [rng.sample(PROJECTIONS, rng.randint(0, len(PROJECTIONS))) for _ in range(2)]
        bank.put(slot, CpuAdapter([{name: factors(name) for name in layer} for layer in names], outputs))
    return bank, bank.step(slots)
