"""What the kernels and their references both take: sampling parameters by row, windows of drafted tokens and their
weights, masks of drafted trees, adapters' weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """Single ids of single rows, packed."""

    rows: Tensor  # [entries] int64
    ids: Tensor  # [entries] int64


@dataclass(frozen=True, slots=True)
class Allowed:
    """The only ids that single rows keep."""

    rows: Tensor  # [restricted] int64, each row once
    mask_of: Tensor  # [restricted] int64: the mask of each
    masks: (
        Tensor  # [masks, vocab] float32: 0 where allowed, else minus infinity; adding is fast on a CPU, selecting not
    )


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of single ids of single rows, each pair once: those in prompt or output before the token."""

    rows: Tensor  # [entries] int64
    ids: Tensor  # [entries] int64
    output_counts: Tensor  # [entries] float32: times in the output before the row's token
    repetition: Tensor  # [entries] float32; 1: off
    presence: Tensor  # [entries] float32
    frequency: Tensor  # [entries] float32


@dataclass(frozen=True, slots=True)
class Truncation:
    """top_k and top_p, for the rows that have either; on an accelerator a row may have neither."""

    rows: Tensor  # [truncated] int64, ascending
    top_k: Tensor  # [truncated] int64; 0: off
    top_p: Tensor  # [truncated] float64; 1: off


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters of a packed batch of rows; None is off for every row."""

    allowed: Allowed | None = None
    banned: Entries | None = None
    bias: Entries | None = None
    bias_values: Tensor | None = None  # [entries of bias] float32
    penalties: Penalties | None = None
    token_mask: Tensor | None = None  # [rows, ceil(vocab / 32)] int32: bit i of word w allows id 32 w + i
    temperature: Tensor | None = None  # [rows] float32, above 0; 1 in greedy rows
    greedy_rows: Tensor | None = None  # [greedy] int64
    min_p: Tensor | None = None  # [rows] float32; 0: off
    truncation: Truncation | None = None


MAX_TOTAL_WEIGHT = 1 << 24  # totals stay below, so that a coin times a weight is exact in float64


@dataclass(frozen=True, slots=True)
class Windows:
    """Which target rows judge which drafted tokens: row j of a window is the law of the token after j drafted ones."""

    row_starts: Tensor  # [n] int64: first target row of each window
    num_rows: Tensor  # [n] int64: its drafted tokens, plus one where the token after them may be drawn
    num_drafted: Tensor  # [n] int64
    row_of_draft: Tensor  # [drafted] int64: the target row that judges each drafted token
    window_of_draft: Tensor  # [drafted] int64
    offset_of_draft: Tensor  # [drafted] int64: index of each drafted token in its window
    draft_starts: Tensor  # [n] int64: index of each window's first drafted token

    @staticmethod
    def of(
        num_drafted: Sequence[int], num_rows: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Windows:
        """Lays windows out one after another; by default each has one row more than drafted tokens."""
        num_rows = [count + 1 for count in num_drafted] if num_rows is None else num_rows
        window_of_draft = [window for window, count in enumerate(num_drafted) for _ in range(count)]
        offset_of_draft = [offset for count in num_drafted for offset in range(count)]
        row_starts, draft_starts = _starts(num_rows), _starts(num_drafted)
        row_of_draft = [row_starts[w] + j for w, j in zip(window_of_draft, offset_of_draft, strict=True)]
        columns = (row_starts, num_rows, num_drafted, row_of_draft, window_of_draft, offset_of_draft, draft_starts)
        packed = torch.tensor([value for column in columns for value in column], dtype=torch.int64, device=device)
        return Windows(*torch.split(packed, [len(column) for column in columns]))  # one copy to the device

    def on_host(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each window: its first row, its rows, the index of its first drafted token, its drafted tokens."""
        columns = (self.row_starts, self.num_rows, self.draft_starts, self.num_drafted)
        return zip(*(column.tolist() for column in columns), strict=True)

    def has_next(self, num_accepted: Tensor) -> Tensor:
        """Whether a row follows the accepted tokens, [n] bool: not after a whole window without a row for the next."""
        return num_accepted < self.num_rows

    def next_rows(self, num_accepted: Tensor) -> Tensor:
        """Row of the token after the accepted ones, [n] int64; a window's last row where none follows."""
        return self.row_starts + torch.minimum(num_accepted, self.num_rows - 1)


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The integer weights that drafted tokens were drawn from, packed; a drafted token with no entries is one-hot."""

    ids: Tensor  # [entries] int64
    weights: Tensor  # [entries] int64
    draft_of: Tensor  # [entries] int64: the drafted token each belongs to

    @staticmethod
    def of(vectors: Sequence[tuple[bytes, bytes] | None], device: torch.device | str = "cpu") -> DraftWeights:
        """Joins the ids and weights of each drafted token, both packed little-endian uint32; None, or ids and weights
        of unequal number, is one-hot."""
        present = [(draft, *vector) for draft, vector in enumerate(vectors) if vector is not None]
        present = [(draft, ids, weights) for draft, ids, weights in present if len(ids) == len(weights)]
        present = [(draft, ids, weights) for draft, ids, weights in present if len(ids) % 4 == 0]
        columns = (
            np.frombuffer(b"".join(ids for _, ids, _ in present), dtype="<u4").astype(np.int64),
            np.frombuffer(b"".join(weights for _, _, weights in present), dtype="<u4").astype(np.int64),
            np.array([draft for draft, _, _ in present], np.int64).repeat([len(ids) // 4 for _, ids, _ in present]),
        )
        return DraftWeights(*(torch.from_numpy(column).to(device) for column in columns))

    def packed(self, num_drafted: int) -> PackedEntries:
        """By where each drafted token's begin; `draft_of` ascends, as `of` lays it out."""
        bounds = torch.arange(num_drafted + 1, device=self.ids.device)
        starts = torch.searchsorted(self.draft_of.contiguous(), bounds)
        return PackedEntries(self.ids.contiguous(), self.weights.contiguous(), starts)


@dataclass(frozen=True, slots=True)
class PackedEntries:
    """Draft weights by where each drafted token's begin. Nothing is read past the last start."""

    ids: Tensor  # [entries or more] int32 or int64
    weights: Tensor  # [entries or more], the same
    starts: Tensor  # [drafted + 1] int64

    def unpacked(self) -> DraftWeights:
        """By which drafted token each belongs to."""
        lengths = self.starts.diff()
        draft_of = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return DraftWeights(self.ids[: len(draft_of)].long(), self.weights[: len(draft_of)].long(), draft_of)


def _starts(counts: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts


ROOT = -1  # parent of a row that continues the token before the window
TREE_ROWS = 64  # most rows of a window that holds a tree: one bit each


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Of every row of a batch."""

    bits: Tensor  # [rows] int64: bit i stands for row i of the window; 0: all rows before it
    depths: Tensor  # [rows] int32: how many rows of the window it follows


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """What the adapters of all slots add to one product. The product may be several that are stacked (query, key,
    value): its slices, with factors of their own. Ranks past an adapter's, and slices that it leaves alone, are 0."""

    down: Tensor  # [slots, slices, rank, in]
    up: Tensor  # [slots, out, rank]
    scaling: Tensor  # [slots, slices] float32
    bounds: tuple[int, ...]  # [slices + 1]: slice i has the outputs from bounds[i] up to bounds[i + 1]
