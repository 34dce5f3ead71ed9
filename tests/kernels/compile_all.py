"""Compiles every kernel, in the variants that launches ask for, and prints what came of each launch, a line of JSON.
Arguments: the GPU's capability, and 1 for all variants."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from support.kernels import compile_only
from support.quantized import by_groups, matrix_of, random_blocks, small_floats

from outrider.kernels.attention.plan import DevicePlan
from outrider.kernels.attention.tree_mask_triton import launch_tree_mask
from outrider.kernels.attention.triton import attention
from outrider.kernels.kv_store import triton as kv_store_triton
from outrider.kernels.layers import triton as layers_triton
from outrider.kernels.lora import triton as lora_triton
from outrider.kernels.mixture import triton as mixture_triton
from outrider.kernels.quantized import triton as quantized_triton
from outrider.kernels.quantized.blocks import QUANTIZED_KINDS
from outrider.kernels.quantized.form import QuantizedMatrix
from outrider.kernels.quantized.packed import pack
from outrider.kernels.random import triton as philox_triton
from outrider.kernels.sampling import triton as sampling_triton
from outrider.kernels.types import (
    Allowed,
    DraftWeights,
    Entries,
    LowRankWeights,
    PackedEntries,
    Penalties,
    RowSampling,
    Truncation,
    Windows,
)
from outrider.kernels.verify import triton as verify_triton

ROWS, VOCAB_SIZE = 3, 4097


def launch_sampling(prove: bool) -> None:
    """Every kernel of random numbers, sampling, acceptance and batch-invariant products."""
    rows, probs = torch.arange(ROWS), torch.rand(ROWS, VOCAB_SIZE)
    words, windows, ids = torch.zeros(ROWS, 4, dtype=torch.int64), Windows.of([2, 0]), torch.tensor([1, 2])
    for purposes in (1, rows) if prove else (rows,):
        philox_triton.words(rows, rows, purposes, rows, rows)
        philox_triton.vocabulary_words(rows, rows, purposes, rows, VOCAB_SIZE, 0)
        philox_triton.exponential_noise(rows, rows, purposes, rows, VOCAB_SIZE)
    verify_triton.coupled_choice(probs, probs)
    verify_triton.coupled_draw(probs, rows, rows, rows, 3)
    verify_triton.coupled_accept(torch.zeros(4, dtype=torch.int64), windows, ids)
    verify_triton.coupled_accept(torch.zeros(4, dtype=torch.int64), windows, ids, ids)
    verify_triton.accept(torch.rand(4, VOCAB_SIZE), windows, ids, DraftWeights.of([None, None]), ids.double())
    entries = PackedEntries(rows.int(), rows.int(), rows)
    for by_block in (None, torch.ones(2, dtype=torch.bool)):
        verify_triton.accept(torch.rand(4, VOCAB_SIZE), windows, ids, entries, ids.double(), by_block)
    verify_triton.draw(probs.double(), words)
    numbers = rows.int()
    sampling_triton.advance(numbers, numbers, numbers, torch.zeros(ROWS, 8, dtype=torch.int32), numbers, 16)
    sampling_triton.draft_sample(probs, words, 0.995, 512)
    everything = RowSampling(
        Allowed(rows, rows, torch.zeros(1, VOCAB_SIZE)),
        Entries(rows, rows),
        Entries(rows, rows),
        bias_values=rows.float(),
        penalties=Penalties(rows, rows, *[rows.float()] * 4),
        token_mask=torch.zeros(ROWS, -(-VOCAB_SIZE // 32), dtype=torch.int32),
        temperature=rows.float(),
        greedy_rows=rows[:1],
        min_p=rows.float(),
        truncation=Truncation(rows, rows, rows.double()),
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16) if prove else (torch.bfloat16,):
        x = torch.zeros(ROWS, 512, dtype=dtype)
        layers_triton.linear(x, x)
        layers_triton.linear(x, x, x[:, 0].contiguous())
        launch_low_rank(x, 3, 16)
        launch_low_rank(x, 1, 64)
        sampling_triton.logits_to_probs(probs.to(dtype), RowSampling())
    sampling_triton.logits_to_probs(probs, everything)
    sampling_triton.logits_to_probs(probs, everything, tile=256)  # as many tiles as a row of 128,256 ids has
    columns: Any = {"temperature": rows.float(), "min_p": rows.float(), "truncation": everything.truncation}
    sampling_triton.logits_to_probs(probs, RowSampling(**columns))
    sampling_triton.greedy_choice(probs, everything)
    sampling_triton.greedy_choice(probs.bfloat16(), RowSampling())


def launch_low_rank(x: torch.Tensor, num_slices: int, rank: int) -> None:
    width = x.shape[1]
    weights = LowRankWeights(
        torch.zeros(2, num_slices, rank, width, dtype=x.dtype),
        torch.zeros(2, num_slices * 96, rank, dtype=x.dtype),
        torch.ones(2, num_slices),
        tuple(range(0, num_slices * 96 + 1, 96)),
    )
    y = torch.zeros(len(x), num_slices * 96, dtype=x.dtype)
    lora_triton.add_low_rank(y, x, weights, torch.zeros(len(x), dtype=torch.int32))


def launch_quantized(prove: bool) -> None:
    """Products with packed weights of few and of many rows, split and not, and rows of these."""
    kinds = QUANTIZED_KINDS if prove else ("Q4_K",)
    half = torch.bfloat16
    some: list[QuantizedMatrix] = [matrix_of(kind, random_blocks(kind, 64, 2048)) for kind in kinds]
    some += [by_groups(4, 64, 512, 128, half), small_floats(64, 512, 512)]
    if prove:
        some += [by_groups(4, 64, 512, 16, half, True), by_groups(8, 64, 512, 512, torch.float16, True)]
    for dtype in (half, torch.float16, torch.float32) if prove else (half,):
        for matrix in some:
            packed, x = pack(matrix, torch.device("cpu")), torch.zeros(40, matrix.shape[1], dtype=dtype)
            for num_rows in (3, 40):
                quantized_triton.linear(x[:num_rows], packed)
            quantized_triton.linear(x, packed, x[0, :64].contiguous(), batch_invariant=True)
            quantized_triton.rows(packed, torch.arange(3), dtype)


def launch_layers(prove: bool) -> None:
    """Attention, norms, gates and the cache; in the long form over more dtypes, head sizes and options."""
    half, eight = torch.bfloat16, torch.float8_e4m3fn
    launch_attention(heads=32, kv_heads=8, dim=128, dtype=half, most_rows=6)
    launch_attention(heads=8, kv_heads=4, dim=256, dtype=half, most_rows=300, window=100, softcap=50.0, tree=True)
    launch_attention(heads=8, kv_heads=2, dim=256, dtype=torch.float32, most_rows=80)
    if prove:
        launch_attention(heads=32, kv_heads=8, dim=128, dtype=half, most_rows=300, invariant=True)
        launch_attention(heads=32, kv_heads=8, dim=128, dtype=half, cache=eight, most_rows=1)
        launch_attention(heads=71, kv_heads=1, dim=64, dtype=torch.float16, most_rows=64, sinks=True)
        for dim in (64, 128):
            launch_attention(heads=8, kv_heads=2, dim=dim, dtype=torch.float32, most_rows=80)
    x, weight = torch.zeros(4, 4096, dtype=half), torch.zeros(4096, dtype=half)
    layers_triton.rms_norm(x, weight, 1e-6)
    layers_triton.add_rms_norm(x, x, weight, 1e-6)
    for activation in ("silu", "gelu", "gelu_tanh"):
        layers_triton.gated(x, activation)
    chosen, shares = mixture_triton.route(torch.zeros(4, 65, dtype=half), 8, normalised=True, has_shared=True)
    wide, narrow = torch.zeros(64, 256, 512, dtype=half), torch.zeros(64, 512, 128, dtype=half)
    biases = wide[:, :, 0].contiguous(), narrow[:, :, 0].contiguous()
    gate = partial(layers_triton.gated, activation="silu")
    for some in (None, biases):
        mixture_triton.mix(x[:, :512], torch.zeros_like(chosen), shares, wide, narrow, gate, some)
    cache, slots, scales = torch.zeros(2, 16, 8, 128), torch.arange(4), (torch.ones(1), torch.ones(1))
    qkv, turn = torch.zeros(4, 48, 128, dtype=half), torch.zeros(4, 1, 128, dtype=half)
    for dtype, scaling in ((half, None), (eight, scales)):
        caches = cache.to(dtype), cache.to(dtype)
        kv_store_triton.store_kv(qkv[:, :8], qkv[:, 8:16], *caches, slots, kv_scales=scaling)
        kv_store_triton.store_kv_rotary(
            qkv, (turn, turn), *caches, slots, qk_norm=torch.zeros(40, 128, dtype=half), kv_scales=scaling
        )


def launch_attention(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: Any,
    most_rows: int,
    cache: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    tree: bool = False,
    invariant: bool = False,
) -> None:
    starts, tables = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 256, dtype=torch.int64)
    mask = launch_tree_mask(torch.zeros(24, dtype=torch.int32), starts) if tree else None
    plan = DevicePlan(tables, starts, starts[1:], most_rows, 512, window, mask, invariant)
    slots = torch.zeros(4, 16, kv_heads, dim).to(cache or dtype)
    attention(
        plan, torch.zeros(24, heads, dim, dtype=dtype), slots, slots, scale=0.1, softcap=softcap,
        sinks=torch.zeros(heads) if sinks else None, kv_scales=(torch.ones(1), torch.ones(1)) if cache else None,
    )  # fmt: skip


if __name__ == "__main__":
    capability, prove = int(sys.argv[1]), bool(int(sys.argv[2]))
    compiled = compile_only(capability)
    launch_sampling(prove)
    if capability >= 80:  # older ones have no bfloat16
        launch_quantized(prove)
    if capability >= 89:
        launch_layers(prove)
    for launch in compiled:
        print(json.dumps(launch._asdict()))
