"""Rejection acceptance for a ragged batch of windows.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. A drafted token is accepted when
`u * draft_weight < target_prob * total_weight`; the first refused position draws its token from
`max(target_prob * total_weight - draft_weight, 0)`, and a fully accepted window one more from the next row of
`target_probs`. The weights are the integers that the draft drew from, so both products of the test are exact in
float64. A position without usable weights is one-hot: the same rule with the single weight 1 on the drafted id. Rows,
windows and drafted tokens are packed: no padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels import dispatch

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


def cut_at_vocabulary(draft_ids: Sequence[int], vocab_size: int) -> int:
    """How many leading drafted ids the target knows: a chain ends at the first one outside its vocabulary."""
    for index, token_id in enumerate(draft_ids):
        if not 0 <= token_id < vocab_size:
            return index
    return len(draft_ids)


def accept_uniforms(words: Tensor) -> Tensor:
    """Accept coins in [0, 1) on a grid of 2^-24, [n, 4] words -> [n] float64."""
    return (words[:, 0] >> 8).double() * 2.0**-24


def accept(
    target_probs: Tensor,  # [rows, vocab] float32
    windows: Windows,
    draft_ids: Tensor,  # [drafted] int64
    draft_weights: DraftWeights,
    uniforms: Tensor,  # [drafted] float64 in [0, 1)
) -> tuple[Tensor, Tensor]:
    """Returns how many drafted tokens are accepted, [n] int64, and the weights of the next draw, [n, vocab] float64.

    The weights need not sum to 1; they are all 0 where the window was fully accepted and no row follows. A drafted id
    outside the vocabulary is never accepted.
    """
    if dispatch.runs_triton(target_probs):
        from outrider.kernels import rejection_triton

        return rejection_triton.accept(target_probs, windows, draft_ids, draft_weights, uniforms)
    vocab_size = target_probs.shape[1]
    usable, drafted_weight, total_weight = _judge_weights(draft_weights, draft_ids, vocab_size)
    inside = (draft_ids >= 0) & (draft_ids < vocab_size)  # [drafted]
    judged = target_probs[windows.row_of_draft, draft_ids.clamp(0, vocab_size - 1)].double() * inside  # [drafted]
    accepted = uniforms * drafted_weight < judged * total_weight  # [drafted]
    num_accepted = count_accepted(accepted, windows)
    rows = windows.next_rows(num_accepted)  # [n]
    next_weights = target_probs.index_select(0, rows).double()  # [n, vocab]
    has_next = windows.has_next(num_accepted)  # [n]
    if not bool(has_next.all()):
        next_weights[~has_next] = 0
    refused = _refused_drafts(windows, num_accepted)  # [refused]
    if len(refused):
        owners = windows.window_of_draft[refused]  # [refused]
        _leave_residual(next_weights, owners, refused, draft_ids, draft_weights, usable & inside, total_weight)
        empty = owners[next_weights.index_select(0, owners).sum(dim=-1) == 0]  # nothing is left:
        if len(empty):
            next_weights[empty] = target_probs.index_select(0, rows[empty]).double()  # the target's own law holds
    return num_accepted, next_weights


def draw(
    weights: Tensor,  # [n, vocab] float64, at least 0
    words: Tensor,  # [n, 4] int64
) -> Tensor:  # [n] int64; -1 where no weight is above 0
    """Draws one id per row in proportion to the weights, by 53 bits of two words; a weight of zero never wins."""
    if dispatch.runs_triton(weights):
        from outrider.kernels import rejection_triton

        return rejection_triton.draw(weights, words)
    cumulative = weights.cumsum(dim=-1)  # [n, vocab]
    totals = cumulative[:, -1:]  # [n, 1]
    fractions = ((words[:, :1] << 21) | (words[:, 1:2] >> 11)).double() * 2.0**-53  # [n, 1], at most 1 - 2^-53
    ids = torch.searchsorted(
        cumulative, fractions * totals, right=True
    )  # [n, 1]: the first whose sum is above the point
    return torch.where(totals > 0, ids, -1).squeeze(1)


def count_accepted(accepted: Tensor, windows: Windows) -> Tensor:
    """Length of the leading run of accepted tokens in each window, [drafted] bool -> [n] int64."""
    if accepted.numel() == 0:
        return windows.num_drafted
    refused_at = torch.where(accepted, len(accepted), windows.offset_of_draft)  # [drafted]
    return windows.num_drafted.scatter_reduce(0, windows.window_of_draft, refused_at, "amin")


def _refused_drafts(windows: Windows, num_accepted: Tensor) -> Tensor:
    """Indices of the first refused drafted token of each window that has one, [refused] int64."""
    return (windows.draft_starts + num_accepted)[num_accepted < windows.num_drafted]


def _judge_weights(draft_weights: DraftWeights, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which drafted tokens have usable weights, [drafted] bool; the drafted id's weight and the total, float64 each.

    Both are 1 where the weights cannot be used: that is the one-hot law.
    """
    num_drafted = len(draft_ids)
    sums = torch.zeros(3, num_drafted, dtype=torch.int64, device=draft_ids.device)
    ids, weights, draft_of = draft_weights.ids, draft_weights.weights, draft_weights.draft_of
    if len(ids):
        drafted = torch.where(ids == draft_ids[draft_of], weights, 0)  # [entries]
        bounded = weights.clamp(0, MAX_TOTAL_WEIGHT)  # so that no sum overflows
        bad = _bad_entries(draft_weights, vocab_size)
        sums.index_add_(1, draft_of, torch.stack((drafted, bounded, bad.long())))
    drafted_weight, total_weight, num_bad = sums
    usable = (num_bad == 0) & (drafted_weight > 0) & (total_weight < MAX_TOTAL_WEIGHT)
    return usable, torch.where(usable, drafted_weight, 1).double(), torch.where(usable, total_weight, 1).double()


def _bad_entries(draft_weights: DraftWeights, vocab_size: int) -> Tensor:
    """Which entries spoil their vector, [entries] bool: an id outside the vocabulary or twice in it, or no weight."""
    ids = draft_weights.ids
    bad = (ids < 0) | (ids >= vocab_size) | (draft_weights.weights <= 0)
    keys = draft_weights.draft_of * (1 << 32) + ids.clamp(-1, vocab_size)
    if not bool((keys[1:] > keys[:-1]).all()):  # our own drafts send their ids in order
        keys, order = torch.sort(keys)
        bad[order[1:]] |= keys[1:] == keys[:-1]
    return bad


def _leave_residual(
    next_weights: Tensor,  # [n, vocab] float64: the target's law where each window ends; changed in place
    owners: Tensor,  # [refused] int64: windows with a refused token
    refused: Tensor,  # [refused] int64: that token's index
    draft_ids: Tensor,  # [drafted] int64
    draft_weights: DraftWeights,
    usable: Tensor,  # [drafted] bool
    total_weight: Tensor,  # [drafted] float64
) -> None:
    """Takes the draft's weights, down to 0, from `total_weight` times the target's law; a one-hot draft's id is left no
    weight at all."""
    next_weights[owners] *= total_weight[refused, None]
    row_of_draft = torch.full((len(usable),), -1, device=owners.device)  # [drafted]
    row_of_draft[refused] = owners
    weighted = torch.where(usable, row_of_draft, -1)[draft_weights.draft_of]  # [entries]
    concerned = (weighted >= 0).nonzero().squeeze(1)  # [concerned]
    index = (weighted[concerned], draft_weights.ids[concerned])
    next_weights[index] = (next_weights[index] - draft_weights.weights[concerned]).clamp_(min=0)
    one_hot = ~usable[refused]  # [refused]
    if bool(one_hot.any()):
        ids = draft_ids[refused]
        inside = one_hot & (ids >= 0) & (ids < next_weights.shape[1])
        next_weights[owners[inside], ids[inside]] = 0


def _starts(counts: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += count
    return starts
