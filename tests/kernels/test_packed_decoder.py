"""A pass of a decoder whose matrices stay packed is that of the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch
from support.quantized import matrix_of, random_blocks
from torch import Tensor

from outrider.kernels.cpu.decoder import (
    CpuDecoder,
    FeedWeights,
    Kind,
    LayerWeights,
    Matrix,
    RaggedRows,
    Weight,
    Weights,
)
from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.cpu.low_rank import PROJECTIONS, CpuAdapter, CpuAdapters
from outrider.kernels.layers.reference import rotary_table

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C kernels")

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 256, 512, 4, 2, 64, 75, 4  # whole blocks of every kind
MIXES = {
    "one kind": ("Q8_0",),
    "as Q4_K_M mixes": ("Q4_K", "Q4_K", "Q6_K", "Q5_0", "Q8_0"),
    "with plain ones": ("Q4_0", "F32", "MXFP4", "Q5_K"),
    "others": ("Q5_1", "Q4_1"),
}


def decoder(mix: str, decoded: bool, tied: bool = True, rounds: bool = False) -> CpuDecoder:
    """Two layers whose matrices are of a mix's kinds in turn, packed or as the numbers that they stand for."""
    seeds, kinds = iter(range(100)), MIXES[mix]

    def weight(outputs: int, inputs: int) -> Weight:
        seed = next(seeds)
        kind = kinds[seed % len(kinds)]
        if kind == "F32":
            return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
        matrix = matrix_of(kind, random_blocks(kind, outputs, inputs, seed))
        return matrix.decode() if decoded else matrix

    def qkv() -> Weights:
        parts = [weight(heads * DIM, HIDDEN) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return torch.cat(tensors) if len(tensors) == len(parts) else tuple(parts)

    rotary = rotary_table(1e4 ** -(torch.arange(0, DIM, 2) / DIM), 1.0, 64, torch.float32)
    ones, bias = torch.ones(HIDDEN), torch.linspace(-1, 1, (HEADS + 2 * KV_HEADS) * DIM)
    layers = [
        LayerWeights(
            qkv(), weight(HIDDEN, HEADS * DIM),
            FeedWeights(weight(WIDTH, HIDDEN), weight(WIDTH, HIDDEN), weight(HIDDEN, WIDTH)),
            ones, ones, rotary, output_norm=ones, down_norm=ones, qkv_bias=bias,
        )
        for _ in range(2)
    ]  # fmt: skip
    embeddings = weight(VOCAB, HIDDEN)
    head = embeddings if tied else weight(VOCAB, HIDDEN)
    return CpuDecoder(
        embeddings,
        layers,
        ones,
        head,
        kind=None,
        rounds=rounds,
        heads=HEADS,
        kv_heads=KV_HEADS,
        eps=1e-5,
        scale=DIM**-0.5,
    )


def run(
    model: CpuDecoder, num_rows: int, adapters: CpuAdapters | None = None, tapped: int = 1
) -> tuple[Tensor, Tensor]:
    """The logits of one sequence, and what enters a layer."""
    caches = [torch.zeros(20, BLOCK, KV_HEADS, DIM) for _ in range(4)]
    table, at = torch.arange(19, -1, -1), torch.arange(num_rows)
    rows = RaggedRows(at, table[at // BLOCK] * BLOCK + at % BLOCK, table[None], (0, num_rows), (num_rows,))
    states = torch.zeros(num_rows, 1, HIDDEN)
    slots = torch.zeros(num_rows, dtype=torch.int32)
    step = None if adapters is None else adapters.step(slots)
    logits = model.forward(at % VOCAB, rows, caches[:2], caches[2:], at, ((tapped,), states), step)
    return logits, states


def adapter() -> CpuAdapters:
    """Of every projection of both layers."""
    sizes = (HEADS * DIM, HIDDEN), (KV_HEADS * DIM, HIDDEN), (KV_HEADS * DIM, HIDDEN), (HIDDEN, HEADS * DIM)
    shapes = dict(zip(PROJECTIONS, (*sizes, (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), strict=True))
    generator = torch.Generator().manual_seed(8)
    factors = {
        name: (
            torch.randn(4, inputs, generator=generator) * 0.1,
            torch.randn(outputs, 4, generator=generator) * 0.1,
            0.5,
        )
        for name, (outputs, inputs) in shapes.items()
    }
    bank = CpuAdapters(1, shapes)
    bank.put(0, CpuAdapter([factors, factors], {name: outputs for name, (outputs, _) in shapes.items()}))
    return bank


@pytest.mark.parametrize("rounds", [False, True], ids=["floats", "integers"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_pass_is_that_of_the_numbers(mix: str, tied: bool, rounds: bool) -> None:
    packed, plain = decoder(mix, decoded=False, tied=tied, rounds=rounds), decoder(mix, decoded=True, tied=tied)
    assert packed.rounds_some is rounds
    for num_rows in (1, 5, 13, 40):
        for found, expected in zip(run(packed, num_rows), run(plain, num_rows), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-3 if rounds else 1e-4, rtol=1e-4)
        assert bool(run(packed, num_rows)[1].abs().amax() > 0.1)


@pytest.mark.parametrize("rounds", [False, True], ids=["floats", "integers"])
@pytest.mark.parametrize("mix", MIXES)
def test_rows_have_the_bits_that_they_have_among_fewer(mix: str, rounds: bool) -> None:
    """And by any number of threads."""
    model, before = decoder(mix, decoded=False, rounds=rounds), torch.get_num_threads()
    whole = run(model, 40)
    try:
        for num_rows, threads in ((1, 1), (2, 3), (3, 2), (12, 1), (13, 3), (39, 2)):
            torch.set_num_threads(threads)
            for found, expected in zip(run(model, num_rows), whole, strict=True):
                assert torch.equal(found, expected[:num_rows]), (num_rows, threads)
    finally:
        torch.set_num_threads(before)


def test_adapters() -> None:
    bank, mix = adapter(), "as Q4_K_M mixes"
    packed, plain = decoder(mix, decoded=False), decoder(mix, decoded=True)
    found, _ = run(packed, 13, bank)
    torch.testing.assert_close(found, run(plain, 13, bank)[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, run(packed, 13)[0], atol=1e-2)


@pytest.mark.parametrize("mix", MIXES)
def test_embeddings_have_the_bits_of_their_numbers(mix: str) -> None:
    packed, plain = decoder(mix, decoded=False), decoder(mix, decoded=True)
    assert torch.equal(run(packed, 40, tapped=0)[1], run(plain, 40, tapped=0)[1])


def test_tied_embeddings_are_kept_once() -> None:
    for tied in (True, False):
        model = decoder("one kind", decoded=False, tied=tied)
        kept = model._decoder
        assert kept.embeddings_kind == Kind.PACKED == kept.head.kind
        assert (Matrix.from_address(kept.embeddings).panels == kept.head.panels) is tied
