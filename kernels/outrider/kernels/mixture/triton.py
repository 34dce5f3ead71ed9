"""Mixtures of experts on an accelerator: routing, one program a row; products of rows that are grouped by expert, each
group filled up to whole tiles, so that a step's launches hang on its sizes alone and it can be captured; and the sum of
what a row's experts give, in their order. A row's bits depend on the row alone: tiles have one shape, and products are
added up in one order."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.common_triton import add_products

TILE_ROWS = 16
TILE_OUT = 64
TILE_BYTES = 128  # along K, of one row of a tile


def route(
    scores: Tensor, num_chosen: int, *, normalised: bool, has_shared: bool = False
) -> tuple[Tensor, Tensor]:  # [rows, ways] int64, [rows, ways] float32
    """Launches the reference's `route`."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, num_experts = scores.shape[0], scores.shape[1] - has_shared
    ways = num_chosen + has_shared
    chosen = torch.empty(rows, ways, dtype=torch.int64, device=scores.device)
    weights = torch.empty(rows, ways, dtype=torch.float32, device=scores.device)
    _route_kernel[(rows,)](
        chosen, weights, scores, scores.stride(0), EXPERTS=num_experts, CHOSEN=num_chosen, NORMALISED=normalised,
        SHARED=has_shared, TILE=triton.next_power_of_2(num_experts),
    )  # fmt: skip
    return chosen, weights


@triton.jit
def _route_kernel(
    chosen: tl.tensor,  # [rows, ways] int64, written
    weights: tl.tensor,  # [rows, ways] float32, written
    scores: tl.tensor,  # [rows, experts]
    row_stride: int,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE)
    inside = expert < EXPERTS
    own = tl.load(scores + row * row_stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    before = (own[None, :] > own[:, None]) | ((own[None, :] == own[:, None]) & (expert[None, :] < expert[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    exponentials = tl.where(inside, tl.exp(own - tl.max(own)), 0.0)
    is_chosen = inside & (rank < CHOSEN)
    weight = exponentials / tl.sum(exponentials)
    if NORMALISED:
        weight = weight / tl.sum(tl.where(is_chosen, weight, 0.0))
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    kept = is_chosen & (place < CHOSEN)  # a score that is no number comes before all
    to = row * (CHOSEN + SHARED) + place
    tl.store(chosen + to, expert.to(tl.int64), mask=kept)
    tl.store(weights + to, weight, mask=kept)
    if SHARED:
        gate = tl.load(scores + row * row_stride + EXPERTS).to(tl.float32)
        last = row * (CHOSEN + SHARED) + CHOSEN
        tl.store(chosen + last, EXPERTS)
        tl.store(weights + last, 1.0 / (1.0 + tl.exp(-gate)))


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of a row and an expert of it, by expert, in tiles of one expert each."""

    order: Tensor  # [pairs] int64: the pairs, row by row, as they are grouped
    starts: Tensor  # [experts + 1] int64: where each expert's begin
    tile_experts: Tensor  # [tiles] int64; the number of experts: the tile is of none
    tile_starts: Tensor  # [tiles] int64: where in `order` a tile's begin

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, counts: Tensor | None = None) -> Groups:
        """Of [rows, ways] int64. Nothing is read on the host; `counts`, [experts] int64, are written."""
        flat, place = chosen.flatten(), chosen.device
        counts = torch.sum(flat[:, None] == torch.arange(num_experts, device=place), 0, out=counts)  # [experts]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
        ends = tiles.cumsum(0)
        number = torch.arange(min(len(flat), num_experts + len(flat) // TILE_ROWS), device=place)
        experts = torch.searchsorted(ends, number, right=True)
        known = experts.clamp_max(num_experts - 1)
        begins = starts[known] + (number - ends[known] + tiles[known]) * TILE_ROWS
        return cls(flat.argsort(stable=True), starts, experts, begins)


def mix(
    x: Tensor,  # [rows, hidden]
    chosen: Tensor,  # [rows, ways] int64
    weights: Tensor,  # [rows, ways] float32
    gate_up: Tensor,  # [experts, 2 * width, hidden], the data type of x
    down: Tensor,  # [experts, hidden, width]
    gate: Callable[[Tensor], Tensor],  # [pairs, 2 * width] -> [pairs, width]
    biases: tuple[Tensor, Tensor] | None = None,  # [experts, 2 * width], [experts, hidden]
    counts: Tensor | None = None,  # [experts] int64, written
) -> Tensor:  # [rows, hidden]
    """Launches what the reference's `mix` computes with gated experts of one width."""
    (rows, ways), groups = chosen.shape, Groups.of(chosen, len(gate_up), counts)
    of_gate, of_down = (None, None) if biases is None else biases
    wide = gate(_grouped(x, gate_up, of_gate, groups, ways, None))  # [pairs, width], as they are grouped
    given = _grouped(wide, down, of_down, groups, 0, weights.flatten())  # [pairs, hidden], row by row
    out = torch.empty_like(x)
    hidden = x.shape[1]
    tile = min(1024, triton.next_power_of_2(hidden))
    _join_ways_kernel[(rows, triton.cdiv(hidden, tile))](out, given, hidden, WAYS=ways, TILE=tile)
    return out


def _grouped(
    x: Tensor,  # [rows, in], or [pairs, in] as they are grouped
    weight: Tensor,  # [experts, out, in]
    bias: Tensor | None,  # [experts, out]
    groups: Groups,
    ways: int,  # of each row of x; 0: x is grouped, and the result is not
    scales: Tensor | None,  # [pairs] float32, of the results
) -> Tensor:  # [pairs, out], of the type of x, or float32 where there are scales
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_experts, num_out, width = weight.shape
    out_type = x.dtype if scales is None else torch.float32
    out = torch.empty(len(groups.order), num_out, dtype=out_type, device=x.device)
    widen = triton.knobs.runtime.interpret and x.dtype == torch.bfloat16
    _grouped_kernel[(triton.cdiv(num_out, TILE_OUT), len(groups.tile_experts))](
        x, weight, weight if bias is None else bias, out, groups.order, groups.starts, groups.tile_experts,
        groups.tile_starts, out if scales is None else scales, num_experts, num_out, width, x.stride(0),
        weight.stride(0), weight.stride(1), bias is not None, ways, scales is not None, widen,
        "ieee" if x.dtype == torch.float32 else "tf32", TILE_ROWS, TILE_OUT, TILE_BYTES // x.element_size(),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _grouped_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    tile_experts: tl.tensor,
    tile_starts: tl.tensor,
    scales: tl.tensor,
    num_experts: tl.tensor,
    num_out: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    weight_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WAYS: tl.constexpr,
    SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert < num_experts:
        places = tl.load(tile_starts + tile) + tl.arange(0, ROWS)
        is_row = places < tl.load(starts + expert + 1)
        pairs = tl.load(order + places, mask=is_row, other=0)
        columns = tl.program_id(0) * OUT + tl.arange(0, OUT)
        is_column = columns < num_out
        steps = tl.arange(0, STEP)
        rows = pairs // WAYS if WAYS > 0 else places
        x_tile = x + rows[:, None] * x_stride + steps[None, :]
        weight_tile = weight + expert * expert_stride + columns.to(tl.int64)[None, :] * weight_stride + steps[:, None]
        total = add_products(
            tl.zeros([ROWS, OUT], tl.float32), x_tile, weight_tile, is_row, is_column, width, 1, WIDEN, PRECISION,
            STEP,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + expert * num_out + columns, is_column, 0.0).to(tl.float32)[None, :]
        to = places if WAYS > 0 else pairs
        if SCALES:
            total *= tl.load(scales + pairs, mask=is_row, other=0.0)[:, None]
        stored = to[:, None] * num_out + columns[None, :]
        tl.store(out + stored, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def _join_ways_kernel(
    out: tl.tensor,  # [rows, hidden], written
    given: tl.tensor,  # [rows, ways, hidden] float32
    hidden: int,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < hidden
    total = tl.zeros([TILE], tl.float32)
    for way in tl.static_range(WAYS):
        total += tl.load(given + (row * WAYS + way) * hidden + column, mask=inside, other=0.0)
    tl.store(out + row * hidden + column, total.to(out.dtype.element_ty), mask=inside)
