"""Paged attention against attention written out per row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from outrider.kernels.attention.reference import paged_attention
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


def make_case(shapes: tuple[tuple[int, int], ...], value_dim: int = VALUE_DIM) -> dict[str, Tensor | tuple[int, ...]]:
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


def naive(case, scale, sliding_window=None, softcap=None, sinks=None):  # type: ignore[no-untyped-def]
    """One row and one head at a time, in float64."""
    rows = []
    for index, context in enumerate(case["context_lens"]):
        start, end = case["query_starts"][index : index + 2]
        table = case["block_tables"][index]
        keys = case["key_cache"][table].flatten(0, 1)[:context].double()
        values = case["value_cache"][table].flatten(0, 1)[:context].double()
        for row in range(start, end):
            position = context - (end - row)
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
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
def test_ragged_batch_equals_rows_written_out(options, batch_invariant):  # type: ignore[no-untyped-def]
    case = make_case(RAGGED)
    out = paged_attention(**case, scale=0.4, batch_invariant=batch_invariant, **options)
    torch.testing.assert_close(out, naive(case, 0.4, **options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("shapes", [((1, 50),), ((4, 50),), ((50, 50),), ((1, 40), (1, 41)), ((2, 9), (2, 9))])
def test_batches_of_one_kind(shapes):  # type: ignore[no-untyped-def]
    case = make_case(shapes)
    torch.testing.assert_close(paged_attention(**case, scale=0.3), naive(case, 0.3), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
def test_values_of_another_size(options):  # type: ignore[no-untyped-def]
    case = make_case(((3, 20), (1, 5)), value_dim=12)
    out = paged_attention(**case, scale=0.3, **options)
    torch.testing.assert_close(out, naive(case, 0.3, **options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_batch_invariant_bits_depend_on_nothing_but_the_row(options):  # type: ignore[no-untyped-def]
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
        case[name] = case[name].bfloat16()  # type: ignore[union-attr]
    out = paged_attention(**case, scale=0.4)  # type: ignore[arg-type]
    torch.testing.assert_close(out.float(), naive(case, 0.4), atol=2e-2, rtol=2e-2)
