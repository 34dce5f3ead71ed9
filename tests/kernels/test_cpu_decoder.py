"""The C kernels: how weights are packed, and that the layout changes no bit."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.cpu import decoder as decoder_module
from outrider.kernels.cpu.decoder import (
    CpuDecoder,
    FeedWeights,
    Kind,
    LayerWeights,
    RaggedRows,
    Weights,
    can_run,
    is_bfloat16,
    kind_for,
    narrowest,
    pack,
    row_scales,
)
from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.cpu.low_rank import PROJECTIONS, CpuAdapter, CpuAdapters, Factors
from outrider.kernels.cpu.memory import HUGE_PAGE
from outrider.kernels.layers.reference import int8_scales, rotary_table, through_int8, to_int8

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 48, 72, 4, 2, 16, 70, 4
NUM_EMBEDDINGS = 50


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Random numbers, of which all are bfloat16 numbers."""
    return (torch.randn(*shape, generator=generator) * 0.2).bfloat16().float()


def decoder(
    nudge: float = 0.0,
    gemma: bool = False,
    half_embeddings: bool = False,
    int8: bool = False,
    rounded: bool = False,
    merged: Sequence[Mapping[str, Factors]] = ({}, {}),
) -> CpuDecoder:
    """Two layers; one number of each weight is changed by `nudge`. Weights may be kept as 8 bits, or be what these
    hold, or have an adapter's factors in them."""
    if cpu_library() is None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(3)

    def weight(outputs: int, inputs: int) -> Tensor:
        drawn = normal(generator, outputs, inputs)
        drawn[0, 0] += nudge
        return through_int8(drawn) if rounded else drawn

    rotary = rotary_table(1e4 ** -(torch.arange(0, DIM, 2) / DIM), 1.0, 64, torch.float32)
    norms: dict[str, Any] = {"output_norm": torch.ones(HIDDEN), "down_norm": torch.ones(HIDDEN)} if gemma else {}
    options: dict[str, Any] = {}
    if gemma:
        options = {"activation": "gelu_tanh", "attention_softcap": 2.0, "logit_softcap": 3.0, "embedding_scale": 5.0}
    layers = [
        LayerWeights(
            weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), weight(HIDDEN, HEADS * DIM),
            FeedWeights(weight(WIDTH, HIDDEN), weight(WIDTH, HIDDEN), weight(HIDDEN, WIDTH)),
            torch.ones(HIDDEN), torch.ones(HIDDEN), rotary,
            window=window, **norms,
        )
        for window in (None, 5)
    ]  # fmt: skip
    layers = [with_factors(layer, factors) for layer, factors in zip(layers, merged, strict=True)]
    head = weight(VOCAB, HIDDEN)
    tensors = [
        matrix
        for layer in layers
        for matrix in (layer.qkv, layer.output, *matrices_of(layer))
        if isinstance(matrix, Tensor)
    ]
    kind = kind_for(all(map(is_bfloat16, [head, *tensors])))
    kind = Kind.BYTES if int8 else kind
    embeddings = normal(generator, NUM_EMBEDDINGS, HIDDEN)
    return CpuDecoder(
        embeddings.to(torch.bfloat16 if half_embeddings else torch.float32), layers, torch.ones(HIDDEN), head,
        kind=kind, heads=HEADS, kv_heads=KV_HEADS, eps=1e-5, scale=DIM**-0.5, **options,
    )  # fmt: skip


OUTPUTS = dict(
    zip(PROJECTIONS, (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, HIDDEN, WIDTH, WIDTH, HIDDEN), strict=True)
)
INPUTS = dict(zip(PROJECTIONS, (HIDDEN, HIDDEN, HIDDEN, HEADS * DIM, HIDDEN, HIDDEN, WIDTH), strict=True))

SIZES = {name: (OUTPUTS[name], INPUTS[name]) for name in PROJECTIONS}


def factors_of(rank: int, names: Sequence[str] = PROJECTIONS) -> list[dict[str, Factors]]:
    """An adapter of both layers."""
    generator = torch.Generator().manual_seed(rank)

    def drawn(name: str) -> Factors:
        down = torch.randn(rank, INPUTS[name], generator=generator) * 0.2
        return down, torch.randn(OUTPUTS[name], rank, generator=generator) * 0.2 / rank**0.5, 0.75

    return [{name: drawn(name) for name in names} for _ in range(2)]


def matrices_of(layer: LayerWeights) -> tuple[Weights, Weights, Weights]:
    assert isinstance(layer.feed, FeedWeights)
    return layer.feed.gate, layer.feed.up, layer.feed.down


def with_factors(layer: LayerWeights, factors: Mapping[str, Factors]) -> LayerWeights:
    """The adapter's product added to the matrices."""

    def added(weight: Weights, *names: str) -> Tensor:
        assert isinstance(weight, Tensor)
        if not any(name in factors for name in names):
            return weight
        zeros = {name: torch.zeros(OUTPUTS[name], INPUTS[name]) for name in names}
        parts = [factors[n][2] * factors[n][1] @ factors[n][0] if n in factors else zeros[n] for n in names]
        return weight + torch.cat(parts)

    q, k, v, o, gate, up, down = PROJECTIONS
    gates, ups, downs = matrices_of(layer)
    feed = FeedWeights(added(gates, gate), added(ups, up), added(downs, down))
    return replace(layer, qkv=added(layer.qkv, q, k, v), output=added(layer.output, o), feed=feed)


def adapters_of(*adapters: Sequence[Mapping[str, Factors]]) -> CpuAdapters:
    """In slots."""
    bank = CpuAdapters(len(adapters), SIZES)
    for slot, layers in enumerate(adapters):
        bank.put(slot, CpuAdapter(layers, OUTPUTS))
    return bank


def run(
    model: CpuDecoder,
    num_rows: int,
    poison: bool = False,
    wanted: slice = slice(None),
    adapters: CpuAdapters | None = None,
    slot: int = 0,  # of all rows
) -> Tensor:
    """Logits of wanted rows of one sequence in blocks out of order, all others poisoned or zero."""
    shape = (40, BLOCK, KV_HEADS, DIM)
    caches = [torch.full(shape, torch.nan if poison else 0.0) for _ in range(4)]
    table = torch.arange(33, 33 - (num_rows // BLOCK + 1), -1)
    at = torch.arange(num_rows)
    rows = RaggedRows(at, table[at // BLOCK] * BLOCK + at % BLOCK, table[None], (0, num_rows), (num_rows,))
    slots = torch.full((num_rows,), slot, dtype=torch.int32)
    step = None if adapters is None else adapters.step(slots)
    return model.forward(at % NUM_EMBEDDINGS, rows, caches[:2], caches[2:], at[wanted], adapters=step)


@pytest.fixture(params=[False, True], ids=["llama", "gemma"])
def gemma(request: pytest.FixtureRequest) -> bool:
    """Whether the decoder has what only Gemma's has."""
    return bool(request.param)


@pytest.fixture(params=[Kind.HALVES, Kind.TILES, Kind.BYTES], ids=["halves", "tiles", "bytes"])
def few_bits(request: pytest.FixtureRequest, gemma: bool, monkeypatch: pytest.MonkeyPatch) -> CpuDecoder:
    """The decoder with 16 bits on the processor's vectors, and on its matrix unit, and with 8."""
    library: Any = cpu_library()
    if request.param is Kind.TILES and not (library and library.tiles_allowed()):
        pytest.skip("the processor has no matrix unit")
    if request.param is Kind.HALVES:
        monkeypatch.setattr(decoder_module, "cpu_library", lambda: _Changed(library, tiles_allowed=_NotAllowed()))
    model = decoder(gemma=gemma, int8=request.param is Kind.BYTES)
    assert model.kind is request.param
    return model


@pytest.mark.parametrize("num_rows", [1, 3, 5, 6, 10, 11, 12, 13, 30, 61])
def test_few_bits_are_the_same_numbers(few_bits: CpuDecoder, gemma: bool, num_rows: int) -> None:
    """One weight outside the bfloat16 grid, by next to nothing, and all are kept as 32 bits. Those that 8 bits hold are
    rounded, and outside the grid."""
    is_rounded = few_bits.kind is Kind.BYTES
    logits, wide = run(few_bits, num_rows), decoder(0.0 if is_rounded else 1e-7, gemma, rounded=is_rounded)
    assert wide.kind is Kind.FLOATS
    torch.testing.assert_close(run(wide, num_rows), logits, atol=1e-5, rtol=0)
    assert not logits.isnan().any() and torch.equal(run(few_bits, num_rows, poison=True), logits)


def test_rows_have_the_bits_that_they_have_among_fewer(few_bits: CpuDecoder) -> None:
    logits = run(few_bits, 61)
    for num_rows in (1, 2, 5, 6, 10, 11, 13, 17, 60):
        assert torch.equal(run(few_bits, num_rows), logits[:num_rows]), num_rows


@pytest.mark.parametrize(("rank", "names"), [(1, PROJECTIONS), (7, ("k_proj", "up_proj")), (64, PROJECTIONS)])
def test_an_adapter_is_as_if_it_were_merged(
    few_bits: CpuDecoder, gemma: bool, rank: int, names: tuple[str, ...]
) -> None:
    factors = factors_of(rank, names)
    bank, merged = (
        adapters_of(factors_of(3), factors),
        decoder(gemma=gemma, rounded=few_bits.kind is Kind.BYTES, merged=factors),
    )
    assert merged.kind is Kind.FLOATS
    for num_rows in (1, 13, 61):
        logits = run(few_bits, num_rows, adapters=bank, slot=1)
        torch.testing.assert_close(logits, run(merged, num_rows), atol=1e-4, rtol=0)
        assert not torch.allclose(run(few_bits, num_rows), logits, atol=1e-2)


def test_rows_with_adapters_have_the_bits_that_they_have_among_fewer(few_bits: CpuDecoder) -> None:
    """And by any number of threads; rows of no adapter have those of a pass without."""
    bank, before = adapters_of(factors_of(9)), torch.get_num_threads()
    logits, plain = run(few_bits, 61, adapters=bank), run(few_bits, 61)
    assert torch.equal(run(few_bits, 61, adapters=bank, slot=-1), plain)
    try:
        for num_rows, threads in ((1, 1), (1, 3), (2, 2), (11, 1), (13, 3), (60, 2)):
            torch.set_num_threads(threads)
            assert torch.equal(run(few_bits, num_rows, adapters=bank), logits[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)


def test_adapters_that_are_none() -> None:
    with pytest.raises(ValueError, match="rank: is 65; allowed: at most 64"):
        CpuAdapter(factors_of(65), OUTPUTS)
    bank = CpuAdapters(2, SIZES)
    with pytest.raises(IndexError, match="slot 1 has no adapter"):
        bank.step(torch.tensor([-1, 1], dtype=torch.int32))


def test_embeddings_of_sixteen_bits_are_the_same_numbers(gemma: bool) -> None:
    assert torch.equal(run(decoder(gemma=gemma, half_embeddings=True), 13), run(decoder(gemma=gemma), 13))


def test_embeddings_are_scaled() -> None:
    """The first norm undoes a scale, the residual stream keeps it."""
    first, second = decoder(gemma=True), decoder(gemma=True)
    second._decoder.embedding_scale = 1.0
    assert not torch.allclose(run(first, 5), run(second, 5), atol=1e-3)


@pytest.mark.parametrize("unknown", [-1, NUM_EMBEDDINGS])
def test_ids_without_an_embedding_are_refused(unknown: int) -> None:
    model, one = decoder(), torch.zeros(1, dtype=torch.int64)
    caches = [torch.zeros(1, BLOCK, KV_HEADS, DIM) for _ in range(4)]
    with pytest.raises(IndexError, match="none of the model's 50"):
        model.forward(one + unknown, RaggedRows(one, one, one[None], (0, 1), (1,)), caches[:2], caches[2:], one)


def test_rows_that_want_no_logits(few_bits: CpuDecoder) -> None:
    logits = run(few_bits, 30)
    assert torch.equal(run(few_bits, 30, wanted=slice(-3, None)), logits[-3:])
    assert run(few_bits, 30, wanted=slice(0)).shape == (0, VOCAB)


def test_sizes_that_they_do_not_take_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    if cpu_library() is None:
        pytest.skip("no C compiler")
    assert can_run(48, 16) and not caplog.records
    assert not can_run(50, 16) and "hidden_size 50" in caplog.text
    assert not can_run(512, 272) and "head_dim 272" in caplog.text


def test_pack() -> None:
    grid = normal(torch.Generator().manual_seed(1), 70, 5)
    assert is_bfloat16(grid) and not is_bfloat16(grid + 1e-6)
    halves, wide, tiles = (pack(grid, kind) for kind in (Kind.HALVES, Kind.FLOATS, Kind.TILES))
    assert halves.dtype == torch.int16 and wide.dtype == torch.float32 and halves.shape == wide.shape == (3, 5, 32)
    numbers = (halves.int() << 16).view(torch.float32)  # [panels, in, 32]
    assert torch.equal(numbers, wide)
    assert torch.equal(numbers.transpose(1, 2).reshape(96, 5)[:70], grid) and not numbers[2, :, 6:].any()
    assert tiles.dtype == torch.int16 and tiles.shape == (3, 1, 2, 16, 16, 2)
    ordered = (tiles.int() << 16).view(torch.float32).permute(0, 2, 4, 1, 3, 5).reshape(96, 32)
    assert torch.equal(ordered[:70, :5], grid) and not ordered[70:].any() and not ordered[:, 5:].any()


def test_float16_numbers_are_packed_as_they_are() -> None:
    """But for infinities, which not every processor's float16 has; what bfloat16 holds, too, is that."""
    numbers = torch.randn(70, 5, generator=torch.Generator().manual_seed(1)).half()
    packed = pack(numbers, Kind.FLOAT16)
    assert packed.shape == (3, 5, 32) and torch.equal(
        packed.view(torch.float16).transpose(1, 2).reshape(96, 5)[:70], numbers
    )
    assert narrowest(numbers) is Kind.FLOAT16 and narrowest(numbers.float()) is Kind.FLOATS
    numbers[3, 2] = math.inf
    assert narrowest(numbers) is Kind.FLOATS and narrowest(torch.ones(2, 2).half()) is Kind.HALVES


def test_pack_to_8_bits() -> None:
    grid = normal(torch.Generator().manual_seed(1), 70, 5)
    scales = row_scales(grid)  # [70]
    packed = pack(grid, Kind.BYTES, scales)
    assert packed.dtype == torch.int8 and packed.shape == (3, 5, 32) and not packed[2, :, 6:].any()
    numbers = packed.transpose(1, 2).reshape(96, 5)[:70] * scales[:, None]
    assert torch.equal(numbers, through_int8(grid))


def test_rounded_to_8_bits() -> None:
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 6)[:, None]
    weight[2] = 0
    scales = int8_scales(weight)
    assert bool(((through_int8(weight) - weight).abs() <= 0.5001 * scales[:, None]).all())
    most, codes = weight.abs().argmax(1, keepdim=True), to_int8(weight, scales)
    assert codes.gather(1, most).abs().flatten().tolist() == [127, 127, 0, 127, 127, 127]
    assert not through_int8(weight)[2].any() and torch.equal(through_int8(weight.bfloat16())[2], weight[2])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for huge pages")
def test_large_weights_begin_at_a_huge_page() -> None:
    grid = normal(torch.Generator().manual_seed(1), 1100, 1000)
    for kind, dtype in ((Kind.HALVES, torch.int16), (Kind.FLOATS, torch.float32)):
        packed = pack(grid, kind)
        assert packed.dtype == dtype and packed.data_ptr() % HUGE_PAGE == 0
        numbers = packed if kind is Kind.FLOATS else (packed.int() << 16).view(torch.float32)
        assert torch.equal(numbers.transpose(1, 2).reshape(-1, 1000)[:1100], grid)


@pytest.mark.parametrize("num_rows", [1, 12, 13, 61])
def test_scratch_memory_is_as_large_as_said(
    few_bits: CpuDecoder, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a pass nor its products alone, which are its floor, write past it."""
    model, guard, seen = few_bits, torch.full((64,), 7.0), []
    needed = model._library.decoder_scratch

    def guarded(*sizes: ctypes.c_int64) -> int:
        size: int = needed(*sizes)
        model._scratch = torch.cat([torch.ones(size), guard])
        seen.append(size)
        return size

    monkeypatch.setattr(model, "_library", _Changed(model._library, decoder_scratch=guarded))
    for run_once in (lambda: run(model, num_rows), lambda: model.products(num_rows)):
        run_once()
        assert torch.equal(model._scratch[-64:], guard) and bool((model._scratch[: seen[-1]] != 1).any())
    assert len(seen) == 2


class _Changed:
    """The library with some functions replaced."""

    def __init__(self, library: Any, **functions: Any) -> None:
        self._library = library
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class _NotAllowed:
    """Takes the place of a C function that says no."""

    def __call__(self) -> int:
        return 0
