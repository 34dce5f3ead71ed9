"""Paged attention against attention written out per row.

Tree masks: the ancestor bits, and attention along each path as if the path were a sequence of its own.

The attention kernels against the CPU path, with NaN in every place that holds nothing; and their bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.attention.plan import MOST_SPLITS, plan_on_device, split_keys
from outrider.kernels.attention.reference import paged_attention, planned_attention
from outrider.kernels.attention.tree_mask import CHAIN, block_mask, tree_mask, tree_mask_reference
from outrider.kernels.kv_store.reference import store_kv

BLOCK = 4
HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 8, 8
RAGGED = ((1, 1), (1, 130), (5, 9), (3, 135), (37, 37), (20, 60))  # (rows, context) of each sequence
OPTIONS = [
    {},
    {"sliding_window": 7},
    {"softcap": 3.0},
    {"sinks": torch.linspace(-1, 1, HEADS)},
    {"softcap": 5.0, "sinks": torch.linspace(-1, 1, HEADS), "sliding_window": 3},
]


def make_case(shapes: tuple[tuple[int, int], ...], value_dim: int = VALUE_DIM) -> dict[str, Any]:
    """Random sequences in a cache whose every other slot holds NaN."""
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-context // BLOCK) for _, context in shapes]
    order = (torch.randperm(sum(blocks) + 3, generator=generator)).tolist()
    key_cache = torch.full((len(order), BLOCK, KV_HEADS, DIM), torch.nan)
    value_cache = torch.full((len(order), BLOCK, KV_HEADS, value_dim), torch.nan)
    tables = torch.full((len(shapes), max(blocks)), order.pop())
    for index, (_, context) in enumerate(shapes):
        table = torch.tensor([order.pop() for _ in range(blocks[index])])
        tables[index, : blocks[index]] = table
        positions = torch.arange(context)
        slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
        keys = torch.randn(context, KV_HEADS, DIM, generator=generator)
        values = torch.randn(context, KV_HEADS, value_dim, generator=generator)
        store_kv(keys, values, key_cache, value_cache, slots)
    starts = tuple(itertools.accumulate((rows for rows, _ in shapes), initial=0))
    return {
        "query": torch.randn(starts[-1], HEADS, DIM, generator=generator),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": tables,
        "query_starts": starts,
        "context_lens": tuple(context for _, context in shapes),
    }


def naive(
    case: dict[str, Any], scale: float, sliding_window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, first_key: int = 0, block: bool | None = None,
) -> Tensor:  # fmt: skip
    """One row and one head at a time, in float64; `block`: whether the rows of blocks see all of theirs."""
    rows = []
    for index, context in enumerate(case["context_lens"]):
        start, end = case["query_starts"][index : index + 2]
        table = case["block_tables"][index]
        keys = case["key_cache"][table].flatten(0, 1)[:context].double()
        values = case["value_cache"][table].flatten(0, 1)[:context].double()
        for row in range(start, end):
            position = context - (end - row)
            first = first_key if sliding_window is None else max(first_key, position - sliding_window + 1)
            if block is not None and sliding_window is not None:
                first = max(first_key, context - (end - start) - sliding_window + 1)  # back from the first row
            if block:
                position = context - 1
            seen = slice(first, position + 1)
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = keys[seen, group] @ case["query"][row, head].double() * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                heads.append(scores.softmax(0)[: position + 1 - first] @ values[seen, group])
            rows.append(torch.stack(heads))
    return torch.stack(rows).float()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_ragged_batch_equals_rows_written_out(options: dict[str, Any], batch_invariant: bool) -> None:
    case = make_case(RAGGED)
    out = paged_attention(**case, scale=0.4, batch_invariant=batch_invariant, **options)
    torch.testing.assert_close(out, naive(case, 0.4, **options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 7}], ids=lambda options: "-".join(options) or "plain")
def test_nothing_below_the_first_key_is_seen(options: dict[str, Any], batch_invariant: bool) -> None:
    case = make_case(((1, 2), (1, 130), (5, 9), (3, 135), (36, 37), (20, 60)))
    out = paged_attention(**case, scale=0.4, batch_invariant=batch_invariant, first_key=1, **options)
    torch.testing.assert_close(out, naive(case, 0.4, first_key=1, **options), atol=2e-6, rtol=1e-5)


BLOCKS = ((4, 60), (1, 2), (7, 8), (4, 137), (63, 64))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 7}], ids=lambda options: "-".join(options) or "plain")
def test_rows_of_blocks_see_one_another(options: dict[str, Any], whole: bool) -> None:
    case = make_case(BLOCKS)
    tree = block_mask(torch.tensor(case["query_starts"]), case["query_starts"][-1], whole)
    out = paged_attention(**case, scale=0.4, first_key=1, tree=tree, **options)
    torch.testing.assert_close(out, naive(case, 0.4, first_key=1, block=whole, **options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shapes", [((1, 50),), ((4, 50),), ((50, 50),), ((1, 40), (1, 41)), ((2, 9), (2, 9))])
def test_batches_of_one_kind(shapes: tuple[tuple[int, int], ...]) -> None:
    case = make_case(shapes)
    torch.testing.assert_close(paged_attention(**case, scale=0.3), naive(case, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_values_of_another_size(options: dict[str, Any]) -> None:
    case = make_case(((3, 20), (1, 5)), value_dim=12)
    out = paged_attention(**case, scale=0.3, **options)
    torch.testing.assert_close(out, naive(case, 0.3, **options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_batch_invariant_bits_depend_on_nothing_but_the_row(options: dict[str, Any]) -> None:
    case = make_case(((300, 300),))
    whole = paged_attention(**case, scale=0.4, batch_invariant=True, **options)
    for rows, context in ((1, 1), (1, 8), (1, 129), (5, 131), (17, 200), (2, 299), (8, 128)):
        part = {
            **case,
            "query": case["query"][context - rows : context],
            "query_starts": (0, rows),
            "context_lens": (context,),
        }
        alone = paged_attention(**part, scale=0.4, batch_invariant=True, **options)
        assert torch.equal(alone, whole[context - rows : context]), (rows, context)


def test_bfloat16_is_close_to_float32() -> None:
    case = make_case(RAGGED)
    for name in ("query", "key_cache", "value_cache"):
        case[name] = case[name].bfloat16()
    out = paged_attention(**case, scale=0.4)
    torch.testing.assert_close(out.float(), naive(case, 0.4), atol=2e-2, rtol=2e-2)


TREE = (-1, 0, 0, 1, 1, 2, 4, -1, 7)
TREE_BLOCK, TREE_HEADS, TREE_KV_HEADS, TREE_DIM = 4, 4, 2, 8


def path(parents: tuple[int, ...], row: int) -> list[int]:
    """From the root to the row."""
    return [] if row < 0 else [*path(parents, parents[row]), row]


def test_bits_and_depths(triton_device: torch.device) -> None:
    """A tree of 64 rows, a prompt, a window of one, a sequence without rows, and rows of padding with any parents."""
    generator = torch.Generator().manual_seed(5)
    wide = tuple(int(torch.randint(-1, row, (1,), generator=generator)) if row else -1 for row in range(64))
    deep = tuple(range(-1, 63))
    windows = [TREE, wide, (CHAIN,) * 80, (), deep, (-1,)]
    starts = torch.tensor([0, *itertools.accumulate(len(window) for window in windows)], dtype=torch.int32)
    parents = torch.tensor([*itertools.chain(*windows), 3, -1, 10**6], dtype=torch.int32)
    if triton_device.type == "cpu":
        from outrider.kernels.attention.tree_mask_triton import launch_tree_mask

        mask = launch_tree_mask(parents, starts)
    else:
        mask = tree_mask(parents.to(triton_device), starts.to(triton_device))
    reference = tree_mask_reference(parents, starts)
    assert torch.equal(mask.bits.cpu(), reference.bits) and torch.equal(mask.depths.cpu(), reference.depths)
    bits, depths = reference.bits.tolist(), reference.depths.tolist()
    row = 0
    for window in windows:
        for index, parent in enumerate(window):
            rows = path(window, index) if parent != CHAIN else []
            assert bits[row] % 2**64 == sum(1 << place for place in rows)
            assert depths[row] == (len(rows) - 1 if rows else index)
            row += 1
    assert bits[row:] == [0, 0, 0]


def test_the_climb_ends_whatever_the_parents_hold(triton_device: torch.device) -> None:
    from outrider.kernels.attention.tree_mask_triton import launch_tree_mask

    parents = torch.tensor([0, 2, 1, 70, -2], dtype=torch.int32)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    mask = launch_tree_mask(parents.to(triton_device), starts.to(triton_device))
    reference = tree_mask_reference(parents, starts)
    assert mask.bits.tolist() == reference.bits.tolist() == [1, 2, 6, 8, 0]
    assert mask.depths.tolist() == reference.depths.tolist() == [0, 0, 1, 0, 4]


def cache_of(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens: [context, kv_heads, dim] -> [blocks, BLOCK, kv_heads, dim], NaN where nothing is stored."""
    cache = torch.full((int(table.max()) + 1, TREE_BLOCK, TREE_KV_HEADS, TREE_DIM), torch.nan)
    positions = torch.arange(tokens.shape[0])
    cache.flatten(0, 1)[table[positions // TREE_BLOCK] * TREE_BLOCK + positions % TREE_BLOCK] = tokens
    return cache


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 150])
@pytest.mark.parametrize("context", [9, 12, 140])
def test_a_path_attends_as_a_sequence_of_its_own(context: int, window: int | None, batch_invariant: bool) -> None:
    """Beside a chain and a prompt, which keep their causal masks."""
    start = context - len(TREE)
    table = torch.randperm(-(-context // TREE_BLOCK))
    keys, values = torch.randn(context, TREE_KV_HEADS, TREE_DIM), torch.randn(context, TREE_KV_HEADS, TREE_DIM)
    query = torch.randn(len(TREE) + 3, TREE_HEADS, TREE_DIM)
    caches = cache_of(keys, table), cache_of(values, table)
    tables = torch.stack([table, table])
    parents = torch.tensor([*TREE, CHAIN, CHAIN, CHAIN], dtype=torch.int32)
    out = paged_attention(
        query, *caches, tables, (0, len(TREE), len(TREE) + 3), (context, 5), scale=0.3,
        sliding_window=window, batch_invariant=batch_invariant, parents=parents,
    )  # fmt: skip
    chain = paged_attention(query[-3:], *caches, tables[:1], (0, 3), (5,), scale=0.3, sliding_window=window)
    torch.testing.assert_close(out[-3:], chain, atol=2e-6, rtol=1e-5)
    for row in range(len(TREE)):
        seen = [*range(start), *(start + place for place in path(TREE, row))]
        blocks = torch.arange(-(-len(seen) // TREE_BLOCK))
        alone = paged_attention(
            query[row : row + 1], cache_of(keys[seen], blocks), cache_of(values[seen], blocks), blocks[None],
            (0, 1), (len(seen),), scale=0.3, sliding_window=window,
        )  # fmt: skip
        torch.testing.assert_close(out[row : row + 1], alone, atol=2e-6, rtol=1e-5)


def test_a_tree_too_large_for_its_bits_is_refused() -> None:
    caches = torch.randn(20, TREE_BLOCK, TREE_KV_HEADS, TREE_DIM), torch.randn(20, TREE_BLOCK, TREE_KV_HEADS, TREE_DIM)
    parents = torch.tensor([CHAIN] * 64 + [63], dtype=torch.int32)
    with pytest.raises(ValueError, match="65 rows"):
        paged_attention(
            torch.randn(65, TREE_HEADS, TREE_DIM),
            *caches,
            torch.arange(20)[None],
            (0, 65),
            (70,),
            scale=1.0,
            parents=parents,
        )


SPLIT = 64  # small, so that short contexts have several splits
FEWER_RAGGED = ((1, 1), (1, 130), (5, 9), (66, 70))  # (rows, context) of each sequence; the last is not split
WINDOWS = ((4, 140), (1, 63), (7, 7), (2, 64))
FP8 = torch.float8_e4m3fn
TRITON_OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 7},
    {"softcap": 3.0},
    {"sinks": torch.linspace(-1, 1, 6)},
    {"softcap": 5.0, "sinks": torch.linspace(-1, 1, 6), "sliding_window": 70},
]
NINE_ROWS = (-1, 0, 0, 1, 1, 2, 4, -1, 7)  # of nine rows; two roots


@dataclass
class Case:
    """A batch whose cache, tables and padding hold NaN, or what leads there, wherever nothing was stored."""

    query: Tensor  # [rows + padding, heads, dim]
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: tuple[int, ...]
    context_lens: tuple[int, ...]
    scales: tuple[Tensor, Tensor] | None = None

    def run(
        self,
        device: torch.device,
        split_keys: int = SPLIT,
        parents: Tensor | None = None,
        whole: bool | None = None,
        **options: Any,
    ) -> Tensor:
        """Of the kernels, [rows + padding, heads, value_dim]; with two sequences of padding."""
        starts = torch.tensor([*self.query_starts, self.query_starts[-1], self.query_starts[-1]], dtype=torch.int32)
        lens = torch.tensor([*self.context_lens, 0, 9], dtype=torch.int32)
        tables = torch.nn.functional.pad(self.block_tables, (0, 0, 0, 2))
        longest = max(right - left for left, right in itertools.pairwise(self.query_starts))
        tree = None if whole is None else block_mask(starts.to(device), len(self.query), whole)
        plan = plan_on_device(
            tables.to(device), starts.to(device), lens.to(device), max_query_len=longest,
            sliding_window=options.pop("sliding_window", None), batch_invariant=options.pop("batch_invariant", False),
            parents=None if parents is None else parents.to(device), first_key=options.pop("first_key", 0),
            tree=tree,
        )  # fmt: skip
        plan = replace(plan, split_keys=split_keys)
        caches = self.key_cache.to(device), self.value_cache.to(device)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        scales = None if self.scales is None else (self.scales[0].to(device), self.scales[1].to(device))
        return planned_attention(plan, self.query.to(device), *caches, scale=0.2, kv_scales=scales, **options).cpu()

    def expected(self, whole: bool | None = None, **options: Any) -> Tensor:
        """Of the CPU path in float32, [rows, heads, value_dim]; `whole`: of blocks."""
        if whole is not None:
            options["tree"] = block_mask(torch.tensor(self.query_starts), self.query_starts[-1], whole)
        keys, values = self.key_cache.float(), self.value_cache.float()
        query = self.query[: self.query_starts[-1]].float()
        return paged_attention(
            query, keys, values, self.block_tables, self.query_starts, self.context_lens,
            scale=0.2, kv_scales=self.scales, **options,
        )  # fmt: skip


def poisoned_case(
    shapes: tuple[tuple[int, int], ...],
    heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    block: int = BLOCK,
) -> Case:
    """Random sequences of `shapes`, (rows, context) each, and three rows of padding."""
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-context // block) for _, context in shapes]
    poison = 0  # a block that no sequence has; what is not looked up in a table reads this one
    order = torch.randperm(sum(blocks), generator=generator).add(1).tolist()
    caches = [
        torch.full((len(order) + 1, block, kv_heads, size), torch.nan).to(cache_dtype or dtype)
        for size in (dim, value_dim or dim)
    ]
    tables = torch.full((len(shapes), max(blocks) + 1), poison)
    for index, (_, context) in enumerate(shapes):
        table = torch.tensor([order.pop() for _ in range(blocks[index])])
        tables[index, : blocks[index]] = table
        positions = torch.arange(context)
        for cache in caches:
            new = torch.randn(context, kv_heads, cache.shape[3], generator=generator)
            cache.flatten(0, 1)[table[positions // block] * block + positions % block] = new.to(cache.dtype)
    starts = tuple(itertools.accumulate((rows for rows, _ in shapes), initial=0))
    query = torch.randn(starts[-1] + 3, heads, dim, generator=generator)
    query[starts[-1] :] = torch.nan
    return Case(query.to(dtype), caches[0], caches[1], tables, starts, tuple(context for _, context in shapes))


def check(case: Case, device: torch.device, split_keys: int = SPLIT, **options: Any) -> None:
    """Rounding of the weights and of the output is in units of the type's epsilon; padding rows are zeros."""
    out, rows = case.run(device, split_keys, **options), case.query_starts[-1]
    eps = torch.finfo(case.query.dtype).eps
    tolerance = 2 * eps if eps > 1e-5 else 64 * eps  # scores are up to about 10, in three passes of tf32
    torch.testing.assert_close(out[:rows].float(), case.expected(**options), atol=tolerance, rtol=tolerance)
    assert not out[rows:].any()


@pytest.mark.parametrize("options", TRITON_OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_windows(options: dict[str, Any], triton_device: torch.device) -> None:
    check(poisoned_case(WINDOWS), triton_device, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}], ids=lambda options: "-".join(options) or "plain")
def test_no_key_below_the_first(options: dict[str, Any], triton_device: torch.device) -> None:
    check(poisoned_case(((4, 140), (1, 63), (6, 7), (66, 70))), triton_device, first_key=1, **options)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}], ids=lambda options: "-".join(options) or "plain")
def test_blocks(options: dict[str, Any], whole: bool, triton_device: torch.device) -> None:
    check(poisoned_case(((8, 140), (1, 2), (7, 9), (20, 70))), triton_device, whole=whole, first_key=1, **options)


LONG_FORMS = [pytest.param(options, marks=pytest.mark.slow) for options in TRITON_OPTIONS[:-1]]


@pytest.mark.parametrize("options", [*LONG_FORMS, TRITON_OPTIONS[-1]], ids=lambda options: "-".join(options) or "plain")
def test_a_ragged_batch(options: dict[str, Any], triton_device: torch.device) -> None:
    check(poisoned_case(FEWER_RAGGED), triton_device, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [LONG_FORMS[0], TRITON_OPTIONS[4]], ids=["plain", "all options"])
def test_half_precision(dtype: torch.dtype, options: dict[str, Any], triton_device: torch.device) -> None:
    check(poisoned_case(WINDOWS, dtype=dtype), triton_device, **options)
    check(poisoned_case(((66, 66),), dtype=dtype), triton_device, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(4, 4, 80, 80), (5, 1, 96, 96), (24, 1, 64, 64), (2, 2, 256, 256), (3, 1, 128, 72), (14, 2, 72, 128)],
)
def test_head_sizes_and_groups(
    heads: int, kv_heads: int, dim: int, value_dim: int, triton_device: torch.device
) -> None:
    case = poisoned_case(((3, 70), (1, 5), (18, 20)), heads, kv_heads, dim, value_dim, block=16)
    check(case, triton_device, sliding_window=50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_fp8_cache(dtype: torch.dtype, triton_device: torch.device) -> None:
    case = poisoned_case(((1, 1), (3, 70), (66, 66)), dtype=dtype, cache_dtype=FP8)
    case.scales = torch.tensor([0.5]), torch.tensor([1.5])
    check(case, triton_device, **TRITON_OPTIONS[4])


def tree_batch() -> tuple[Case, Tensor]:
    """Trees beside a chain of one row, a chain given as a tree, and a prompt too long to be one."""
    case = poisoned_case(((9, 80), (1, 3), (4, 67), (66, 68), (9, 9)))
    chain = (-1, 0, 1, 2)
    return case, torch.tensor([*NINE_ROWS, CHAIN, *chain, *[CHAIN] * 66, *NINE_ROWS, 5, -7, 9], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 3, 70])
def test_trees(window: int | None, triton_device: torch.device) -> None:
    case, parents = tree_batch()
    check(case, triton_device, parents=parents, sliding_window=window)


def test_a_chain_given_as_a_tree_has_the_bits_of_a_chain(triton_device: torch.device) -> None:
    case = poisoned_case(((5, 135),))
    parents = torch.tensor([-1, 0, 1, 2, 3, -1, -1, -1], dtype=torch.int32)
    assert torch.equal(case.run(triton_device, parents=parents), case.run(triton_device))


def part_of(case: Case, sequence: int, rows: int, context: int) -> Case:
    """The last `rows` of the first `context` tokens of one sequence, alone, and what they have in `case`."""
    last = case.query_starts[sequence + 1] - (case.context_lens[sequence] - context)
    return replace(
        case,
        query=torch.cat([case.query[last - rows : last], case.query[case.query_starts[-1] :]]),
        block_tables=case.block_tables[sequence : sequence + 1],
        query_starts=(0, rows),
        context_lens=(context,),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, TRITON_OPTIONS[4]], ids=["plain", "all options"])
def test_bits_depend_on_nothing_but_the_row(
    options: dict[str, Any], dtype: torch.dtype, triton_device: torch.device, prove: bool
) -> None:
    """Rows of a long prompt, which is not split, have the same bits in a window and alone, split over the keys."""
    case = poisoned_case(((70, 140), (2, 40)), kv_heads=1, dtype=dtype)
    whole = case.run(triton_device, batch_invariant=True, **options)
    parts = [(1, 129), (5, 131), (17, 139)]
    if prove:
        parts += [(1, 71), (1, 128), (1, 140), (2, 90), (3, 130), (4, 129), (6, 100), (8, 128), (16, 140), (66, 138)]
    for rows, context in parts:
        alone = part_of(case, 0, rows, context).run(triton_device, batch_invariant=True, **options)
        assert torch.equal(alone[:rows], whole[70 + context - rows - 140 : 70 + context - 140]), (rows, context)
    other = part_of(case, 1, 2, 40).run(triton_device, batch_invariant=True, **options)
    assert torch.equal(other[:2], whole[70:72])


def test_one_split_needs_no_merge(triton_device: torch.device) -> None:
    check(poisoned_case(((3, 30), (1, 7))), triton_device, split_keys=256)


def test_splits_follow_from_the_longest_context() -> None:
    for longest in (1, 256, 8192, 8193, 131072):
        keys = split_keys(longest)
        assert keys >= 256 and keys.bit_count() == 1 and keys * MOST_SPLITS >= longest
    assert split_keys(8192) == 256 and split_keys(8193) == 512


def test_a_captured_graph_serves_other_lengths(triton_device: torch.device) -> None:
    if triton_device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    case = poisoned_case(((4, 200), (2, 64), (6, 65)))
    caches = case.key_cache.cuda(), case.value_cache.cuda()
    starts, lens = (torch.tensor(part, dtype=torch.int32).cuda() for part in (case.query_starts, case.context_lens))
    tables, query = case.block_tables.cuda(), case.query.cuda()
    plan = plan_on_device(tables, starts, lens, max_query_len=6)
    planned_attention(plan, query, *caches, scale=0.2)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = planned_attention(plan, query, *caches, scale=0.2)
    for rows, contexts in (((4, 2, 6), (200, 64, 65)), ((1, 5, 0), (9, 60, 0)), ((6, 0, 6), (130, 0, 6))):
        others = tuple(itertools.accumulate(rows, initial=0))
        starts.copy_(torch.tensor(others))
        lens.copy_(torch.tensor(contexts))
        graph.replay()
        expected = planned_attention(plan, query, *caches, scale=0.2)
        assert torch.equal(out, expected)
        now = replace(case, query_starts=others, context_lens=contexts)
        kept = [index for index, count in enumerate(rows) if count]
        now.query_starts = tuple(itertools.accumulate((rows[index] for index in kept), initial=0))
        now.context_lens, now.block_tables = tuple(contexts[index] for index in kept), case.block_tables[kept]
        torch.testing.assert_close(out[: others[-1]].cpu(), now.expected(), atol=2e-6, rtol=2e-6)
