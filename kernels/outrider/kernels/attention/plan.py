"""Which slots each sequence of a batch reads, and which of them each row sees: the same for all layers of a pass.

What the attention kernels of an accelerator read: tensors whose shapes, and with them the grids, depend on the sizes
of the batch alone, so that a captured graph serves every batch of its size."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.attention.tree_mask import tree_mask
from outrider.kernels.batch_invariant import TILE_ROWS
from outrider.kernels.types import ROOT, TREE_ROWS, TreeMask

DEFAULT_SPLIT_KEYS = 512
LEAST_SPLIT_KEYS = 256
MOST_SPLITS = 32  # partial results of a row: they cost memory, and 32 fill a device even for one sequence
SPLIT_ROWS = 16  # beside longer prompts, sequences of up to this many rows are split over their keys ...
SPLIT_ROWS_ALONE = 64  # ... and without longer ones, up to this many: windows and trees


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A sequence without rows is padding, and so are rows past the last start: they are neither read nor attended to,
    and get zeros."""

    block_tables: Tensor  # [sequences, most blocks] int32 or int64
    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32, with this step's rows
    max_query_len: int  # no sequence has more rows
    split_keys: int  # keys of one partial result, a power of two
    sliding_window: int | None
    tree: TreeMask | None
    batch_invariant: bool
    first_key: int = 0  # no row sees a position below it

    @property
    def split_rows(self) -> int:
        """Sequences of up to this many rows are split over their keys; longer ones fill the device by themselves."""
        return min(self.max_query_len, SPLIT_ROWS_ALONE if self.max_query_len <= SPLIT_ROWS_ALONE else SPLIT_ROWS)


def split_keys(max_model_len: int | None) -> int:
    """Fixed by the longest context that the model may get: a row's splits lie at the same positions in every batch."""
    if max_model_len is None:
        return DEFAULT_SPLIT_KEYS
    keys = LEAST_SPLIT_KEYS
    while keys * MOST_SPLITS < max_model_len:
        keys *= 2
    return keys


SHORT_QUERY = 16  # sequences of up to this many rows are padded and batched; longer chunks run alone
SPLIT_KEYS = 128  # keys of one partial result in batch-invariant mode


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences whose attention is one operation. Slots past a sequence's context are never read: its last slot stands
    in, masked."""

    num_sequences: int
    query_len: int  # rows of each sequence, padded to the longest
    num_keys: int  # keys of each sequence, padded to the longest
    rows: Tensor | slice  # [sequences * query_len]: batch rows
    kept: Tensor | None  # which of them are no padding; None: all
    slots: Tensor  # [sequences * num_keys]
    visible: Tensor | None  # [sequences, query_len, num_keys] bool; None: all


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """The groups that together hold every row of the batch once."""

    groups: tuple[AttentionGroup, ...]
    biases: tuple[Tensor | None, ...]  # per group [sequences, 1, query_len * heads per kv head, num_keys]: 0 or -inf
    batch_invariant: bool


AttentionPlan = GroupedPlan | DevicePlan


def plan_attention(
    block_tables: Tensor,  # [sequences, most blocks] int64
    query_starts: tuple[int, ...],  # [sequences + 1]
    context_lens: tuple[int, ...],  # [sequences]
    *,
    block_size: int,
    heads_per_kv_head: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
    batch_invariant: bool = False,
    parents: Tensor | None = None,  # [rows] int32, see tree_mask
    max_model_len: int | None = None,
    first_key: int = 0,
    tree: TreeMask | None = None,  # of blocks, see block_mask, instead of parents
) -> AttentionPlan:
    """Groups sequences of few rows and similar context; a row sees itself and what lies before it, from position
    `first_key` on, within the window. With `parents` a row of a tree sees its ancestors alone of its own window."""
    if dispatch.runs_triton(block_tables):
        starts, lens = (
            torch.tensor(part, dtype=torch.int32).to(block_tables.device) for part in (query_starts, context_lens)
        )
        longest = max(right - left for left, right in itertools.pairwise(query_starts))
        return plan_on_device(
            block_tables, starts, lens, max_query_len=longest, sliding_window=sliding_window,
            batch_invariant=batch_invariant, parents=parents, max_model_len=max_model_len, first_key=first_key,
            tree=tree,
        )  # fmt: skip
    spans = [
        _Span(index, query_starts[index], query_starts[index + 1], context, sliding_window, first_key)
        for index, context in enumerate(context_lens)
    ]
    if parents is not None:
        tree = _checked_tree(parents, query_starts)
    parts = [[tile] for span in spans for tile in span.tiles(tree)] if batch_invariant else _similar(spans)
    groups = tuple(
        _single(part[0], block_tables, block_size, sliding_window)
        if len(part) == 1 and not batch_invariant
        else _group(part, block_tables, block_size, sliding_window, batch_invariant)
        for part in parts
    )
    if tree is not None and not batch_invariant:
        groups = tuple(
            replace(group, visible=torch.stack([_tree_visible(span, group, tree) for span in part]))
            for group, part in zip(groups, parts, strict=True)
        )
    biases = tuple(_bias(group.visible, heads_per_kv_head, dtype) for group in groups)
    return GroupedPlan(groups, biases, batch_invariant)


def plan_on_device(
    block_tables: Tensor,  # [sequences, most blocks] int32 or int64
    query_starts: Tensor,  # [sequences + 1] int32
    context_lens: Tensor,  # [sequences] int32
    *,
    max_query_len: int,
    sliding_window: int | None = None,
    batch_invariant: bool = False,
    parents: Tensor | None = None,  # [rows] int32, see tree_mask
    max_model_len: int | None = None,
    first_key: int = 0,
    tree: TreeMask | None = None,  # of blocks, see block_mask, instead of parents
) -> DevicePlan:
    """For the kernels. Reads no length on the host: what is captured once serves every batch whose tensors have these
    shapes and whose sequences have at most `max_query_len` rows. `max_model_len` must be the same in all batches."""
    if parents is not None:
        tree = tree_mask(parents, query_starts)
    keys = split_keys(max_model_len)
    return DevicePlan(
        block_tables, query_starts, context_lens, max_query_len, keys, sliding_window, tree, batch_invariant, first_key
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows `start` to `end` of the batch: the last ones of `context` tokens of sequence `index`."""

    index: int
    start: int
    end: int
    context: int
    window: int | None
    least_key: int  # no row sees a position below it
    path: tuple[int, ...] = ()  # of a tree's only row: its ancestors and itself, counted from the window's first row

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def window_start(self) -> int:
        """Position of the first of the sequence's rows."""
        return self.context - self.length

    @property
    def first_key(self) -> int:
        """The first position that any row sees; any row of a tree may continue the token before the window."""
        return self.least_key if self.window is None else max(self.least_key, self.window_start - self.window + 1)

    def tiles(self, tree: TreeMask | None) -> list[_Span]:
        """Cuts into tiles of rows; the context of each ends at its last row. A row of a tree is a tile of its own, and
        meets the keys of its path in order of position: it has the bits of the same path as a chain."""
        if tree is not None and self.length and int(tree.bits[self.start]):
            bits = tree.bits[self.start : self.end].tolist()
            paths = [tuple(place for place in range(self.length) if seen >> place & 1) for seen in bits]
            return [
                replace(self, start=row, end=row + 1, context=self.window_start + len(path), path=path)
                for row, path in enumerate(paths, self.start)
            ]
        return [
            replace(self, start=start, end=end, context=self.context - (self.end - end))
            for start in range(self.start, self.end, TILE_ROWS)
            for end in (min(start + TILE_ROWS, self.end),)
        ]


def _similar(spans: list[_Span]) -> list[list[_Span]]:
    groups: dict[tuple[int, int], list[_Span]] = {}
    for span in spans:
        size = (span.context - span.first_key).bit_length()  # contexts within a factor of two
        key = (-1, size) if span.length <= SHORT_QUERY else (span.index, 0)
        groups.setdefault(key, []).append(span)
    return list(groups.values())


def _single(span: _Span, block_tables: Tensor, block_size: int, window: int | None) -> AttentionGroup:
    """One sequence: its slots in order, nothing padded."""
    first, device = span.first_key, block_tables.device
    blocks = block_tables[span.index, first // block_size : -(-span.context // block_size)]  # [blocks read]
    offsets = torch.arange(block_size, device=device)
    slots = torch.add(offsets, blocks[:, None], alpha=block_size).view(-1)  # [blocks read * block_size]
    skipped = first % block_size
    slots = slots[skipped : skipped + span.context - first]
    visible = None
    if span.length > 1:
        keys = torch.arange(first, span.context, device=device)
        visible = _visible(keys, keys[-span.length :, None], window)[None]
    num_keys = span.context - first
    return AttentionGroup(1, span.length, num_keys, slice(span.start, span.end), None, slots, visible)


def _group(
    spans: list[_Span], block_tables: Tensor, block_size: int, window: int | None, batch_invariant: bool
) -> AttentionGroup:
    """Several sequences, or one tile of rows, padded to a common number of rows and keys."""
    device = block_tables.device
    query_len = TILE_ROWS if batch_invariant else max(span.length for span in spans)
    unit = SPLIT_KEYS if batch_invariant else 1
    firsts = [span.first_key // unit * unit for span in spans]
    num_keys = max(span.context - first for span, first in zip(spans, firsts, strict=True))
    num_keys = -(-num_keys // unit) * unit
    facts = [(span.index, first, span.context - 1) for span, first in zip(spans, firsts, strict=True)]
    starts = [span.context - span.length for span in spans]

    index, first, last = torch.tensor(facts, device=device).t()[:, :, None]  # [sequences, 1] each
    keys = torch.arange(num_keys, device=device) + first  # [sequences, num_keys] positions
    read = torch.minimum(keys, last)
    if spans[0].path:  # a tile
        path, shared = torch.tensor(spans[0].path, device=device), spans[0].context - len(spans[0].path)
        read = torch.where(read < shared, read, shared + path[(read - shared).clamp(min=0)])
    slots = block_tables[index, read // block_size] * block_size + read % block_size  # [sequences, num_keys]
    start = torch.tensor(starts, device=device)[:, None]
    positions = torch.minimum(torch.arange(query_len, device=device) + start, last)  # [sequences, query_len]
    visible = _visible(keys[:, None, :], positions[:, :, None], window)
    if spans[0].least_key:  # the same for all
        visible &= keys[:, None, :] >= spans[0].least_key
    rows, kept = _rows(spans, query_len, device)
    return AttentionGroup(len(spans), query_len, num_keys, rows, kept, slots.flatten(), visible)


def _visible(keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Broadcasts key positions against row positions: what a row sees, bool."""
    visible = keys <= positions
    return visible if window is None else visible.logical_and_(keys > positions - window)


def _checked_tree(parents: Tensor, query_starts: tuple[int, ...]) -> TreeMask:
    for start, end in itertools.pairwise(query_starts):
        if end - start > TREE_ROWS and bool((parents[start:end] >= ROOT).any()):
            raise ValueError(f"a tree of {end - start} rows; the most is {TREE_ROWS}")
    return tree_mask(parents, torch.tensor(query_starts, dtype=torch.int32))


def _tree_visible(span: _Span, group: AttentionGroup, tree: TreeMask) -> Tensor:
    """[query_len, num_keys] of one sequence, padded as its group is."""
    keys = torch.arange(group.num_keys) + span.first_key  # [num_keys] places in the sequence's cache
    rows = torch.arange(group.query_len).clamp(max=span.length - 1) + span.start  # [query_len] batch rows
    begin = span.start
    index = keys - span.window_start  # [num_keys] place in the window, negative before it
    bits = tree.bits[rows][:, None]  # [query_len, 1]
    ancestor = (bits >> index.clamp(0, TREE_ROWS - 1) & 1).bool()
    before = index <= (rows - begin)[:, None]  # [query_len, num_keys], of a chain
    visible = (ancestor | (index < 0) | ((bits == 0) & before)) & (keys >= span.least_key)
    if span.window is None:
        return visible
    at = torch.where(index < 0, index, tree.depths[(begin + index).clamp(0, len(tree.depths) - 1)])
    return visible & (at > tree.depths[rows][:, None] - span.window)


def _rows(spans: list[_Span], query_len: int, device: torch.device) -> tuple[Tensor | slice, Tensor | None]:
    follow_on = all(left.end == right.start for left, right in itertools.pairwise(spans))
    if follow_on and all(span.length == query_len for span in spans):
        return slice(spans[0].start, spans[-1].end), None
    padded = [min(span.start + offset, span.end - 1) for span in spans for offset in range(query_len)]
    kept = [place * query_len + offset for place, span in enumerate(spans) for offset in range(span.length)]
    whole = len(kept) == len(padded)
    return torch.tensor(padded, device=device), None if whole else torch.tensor(kept, device=device)


def _bias(visible: Tensor | None, heads_per_kv_head: int, dtype: torch.dtype) -> Tensor | None:
    if visible is None:
        return None
    rows = visible.repeat_interleave(heads_per_kv_head, dim=1)[:, None]  # [sequences, 1, query_len * group, num_keys]
    return torch.zeros(rows.shape, dtype=dtype, device=visible.device).masked_fill_(~rows, float("-inf"))
