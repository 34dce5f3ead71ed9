"""Acceptance for a ragged batch of windows, packed: no padding.

By rejection (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) a drafted token is accepted when
`u * draft_weight < target_prob * total_weight`; the first refused position draws its token from
`max(target_prob * total_weight - draft_weight, 0)`, and a fully accepted window one more from the next row of
`target_probs`. The weights are the integers that the draft drew from, so both products of the test are exact in
float64. A position without usable weights is one-hot: the same rule with the single weight 1 on the drafted id.

By blocks (Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444, algorithm 2) drafted
tokens are judged together. With r_i the ratio of target_prob and draft_prob of the i-th drafted token, the first i hold
with probability p_i = min(p_(i-1) r_i, 1), p_0 = 1, whatever is drafted after them; the longest run stays whose own
coin is below h_i = d_i / (d_i + 1 - p_i), at the block's end h_i = p_i, where

    d_i = sum over the vocabulary of max(p_i target_probs - draft_probs, 0), both of the token after the i-th

and the next token has weights max(p_i target_prob total_weight - draft_weight, 0). Where p_i = 1 the run holds, also
where d_i = 0. A block ends with its window, and at both sides of a one-hot token, which is a block of its own, as is
one that an invalid row judges; the next one counts only if all of this one holds. So where a block ends may depend on
what was drafted up to there, as in rejection, which is the rule with blocks of one token; and a row counts only if all
drafted tokens before it hold.

Coupled, target and draft take the token of least noise / probability for the same noise. The token at a position is
then a function of the seed and the target's probabilities alone, whatever was drafted; a draft only says early what it
will be. With exponential noise the least ratio is a draw from the probabilities (the exponential race, which is the
Gumbel-max trick). Greedy decoding uses the same acceptance with the arg max as choice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.random.reference import Purpose, exponential_noise
from outrider.kernels.types import MAX_TOTAL_WEIGHT, DraftWeights, PackedEntries, Windows


def accept_uniforms(words: Tensor) -> Tensor:
    """Accept uniforms in [0, 1) on a grid of 2^-24, [n, 4] words -> [n] float64."""
    return (words[:, 0] >> 8).double() * 2.0**-24


def accept(
    target_probs: Tensor,  # [rows, vocab] float32
    windows: Windows,
    draft_ids: Tensor,  # [drafted] int64
    draft_weights: DraftWeights | PackedEntries,
    uniforms: Tensor,  # [drafted] float64 in [0, 1)
    by_block: Tensor | None = None,  # [n] bool: which windows are judged by blocks; None: all token by token
    invalid: Tensor | None = None,  # [rows] bool: whose probabilities mean nothing; None: no row
) -> tuple[Tensor, Tensor]:
    """Returns how many drafted tokens are accepted, [n] int64, and the weights of the next draw, [n, vocab] float64;
    neither means anything for a window that stops at an invalid row or passes one.

    The weights need not sum to 1; they are all 0 where the window was fully accepted and no row follows. A drafted id
    outside the vocabulary is never accepted.
    """
    if dispatch.runs_triton(target_probs):
        from outrider.kernels.verify import triton as verify_triton

        return verify_triton.accept(target_probs, windows, draft_ids, draft_weights, uniforms, by_block, invalid)
    if isinstance(draft_weights, PackedEntries):
        draft_weights = draft_weights.unpacked()
    vocab_size = target_probs.shape[1]
    usable, drafted_weight, total_weight = check_weights(draft_weights, draft_ids, vocab_size)
    inside = (draft_ids >= 0) & (draft_ids < vocab_size)  # [drafted]
    token_probs = target_probs[windows.row_of_draft, draft_ids.clamp(0, vocab_size - 1)].double() * inside  # [drafted]
    masses, scale = token_probs * total_weight, total_weight  # [drafted] each
    if by_block is None:
        num_accepted = count_accepted(uniforms * drafted_weight < masses, windows)
    else:
        joins = usable if invalid is None else usable & ~invalid[windows.row_of_draft]  # [drafted]
        reached, ends = _reach_in_blocks(windows, by_block, joins, masses / drafted_weight)
        left = reached - _overlaps(target_probs, windows, draft_weights, total_weight, reached)  # [drafted]
        at_end = uniforms * drafted_weight < reached * masses  # [drafted]
        holds = torch.where(ends, at_end, _holds_within(uniforms, reached, left.clamp(min=0)))
        num_accepted = _longest_runs(windows, holds, ends)
        scale = total_weight * reached
    rows = windows.next_rows(num_accepted)  # [n]
    next_weights = target_probs.index_select(0, rows).double()  # [n, vocab]
    has_next = windows.has_next(num_accepted)  # [n]
    if not bool(has_next.all()):
        next_weights[~has_next] = 0
    refused = _refused_drafts(windows, num_accepted)  # [refused]
    if len(refused):
        owners = windows.window_of_draft[refused]  # [refused]
        _leave_residual(next_weights, owners, refused, draft_ids, draft_weights, usable & inside, scale)
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
        from outrider.kernels.verify import triton as verify_triton

        return verify_triton.draw(weights, words)
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


def _reach_in_blocks(windows: Windows, by_block: Tensor, joins: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
    """With which probability the drafted tokens of its block before each hold, [drafted] float64 (p of the paper), and
    where blocks end, [drafted] bool; by_block [n] bool, joins [drafted] bool: what may be in a block with others,
    ratios [drafted] float64."""
    reached, ends, factors = [1.0] * len(joins), [True] * len(joins), ratios.tolist()
    for has_blocks, (_, _, first, count) in zip(by_block.tolist(), windows.on_host(), strict=True):
        joining = joins[first : first + count].tolist() if has_blocks else []
        for index, (joined, next_joined) in enumerate(pairwise(joining), first):
            if joined and next_joined:
                ends[index] = False
                reached[index + 1] = min(reached[index] * factors[index], 1.0)
    return torch.tensor(reached, dtype=torch.float64), torch.tensor(ends, dtype=torch.bool)


def _overlaps(
    target_probs: Tensor,  # [rows, vocab] float32
    windows: Windows,
    draft_weights: DraftWeights,
    total_weight: Tensor,  # [drafted] float64
    reached: Tensor,  # [drafted] float64
) -> Tensor:  # [drafted] float64; of no meaning where the weights cannot be used
    """How much of the law that each token was drawn from lies below `reached` times the target's."""
    ids, draft_of = draft_weights.ids.clamp(0, target_probs.shape[1] - 1), draft_weights.draft_of
    probs = target_probs[windows.row_of_draft[draft_of], ids].double()  # [entries]
    shares = torch.minimum(probs * (reached * total_weight)[draft_of], draft_weights.weights.double())  # [entries]
    return torch.zeros_like(reached).index_add_(0, draft_of, shares) / total_weight


def _holds_within(uniforms: Tensor, reached: Tensor, left: Tensor) -> Tensor:
    """Whether a block's drafted tokens up to each hold by its own coin, [drafted] bool, but at a block's end. What the
    token after it has is asked, [drafted] float64 each: with which probability it is reached, and how much of that the
    draft leaves to the target."""
    after, surplus = reached.roll(-1), left.roll(-1)
    return (after >= 1) | (uniforms * (surplus + 1 - after) < surplus)


def _longest_runs(windows: Windows, holds: Tensor, ends: Tensor) -> Tensor:
    """How many tokens of each window stay, [n] int64: up to the last that holds before a block that does not hold
    whole; holds, ends: [drafted] bool."""
    num_accepted, held, last = [], holds.tolist(), ends.tolist()
    for _, _, first, count in windows.on_host():
        accepted = 0
        for index in range(count):
            if held[first + index]:
                accepted = index + 1
            elif last[first + index]:
                break
        num_accepted.append(accepted)
    return torch.tensor(num_accepted, dtype=torch.int64)


def _refused_drafts(windows: Windows, num_accepted: Tensor) -> Tensor:
    """Indices of the first refused drafted token of each window that has one, [refused] int64."""
    return (windows.draft_starts + num_accepted)[num_accepted < windows.num_drafted]


def check_weights(draft_weights: DraftWeights, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
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
    scale: Tensor,  # [drafted] float64
) -> None:
    """Takes the draft's weights, down to 0, from `scale` times the target's law; a one-hot draft's id is left no weight
    at all."""
    next_weights[owners] *= scale[refused, None]
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


def first_argmax(values: Tensor) -> Tensor:
    """Index of the greatest value of each row, [rows, vocab] -> [rows] int64; ties to the lowest id.

    Both libraries promise the first of equal values; numpy's is an order of magnitude faster on a CPU.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def coupled_choice(
    probs: Tensor,  # [rows, vocab] float32
    noise: Tensor,  # [rows, vocab] float32, exponential, under the same counters on both sides
) -> Tensor:  # [rows] int64; -1 where no token has a probability above 0
    """The token of least noise / probability; ids of probability 0 never win, ties go to the lowest id."""
    if dispatch.runs_triton(probs):
        from outrider.kernels.verify import triton as verify_triton

        return verify_triton.coupled_choice(probs, noise)
    ratios = (noise / probs).numpy()  # [rows, vocab]; infinite for probability 0
    ids = ratios.argmin(axis=-1)  # [rows]; a NaN is taken first
    ids[~np.isfinite(ratios[np.arange(len(ids)), ids])] = -1
    return torch.from_numpy(ids)


def coupled_draw(
    probs: Tensor,  # [rows, vocab] float32
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    completions: Tensor,  # [rows] int64
    purpose: Purpose = Purpose.BONUS,
) -> Tensor:  # [rows] int64; -1 where no token has a probability above 0
    """`coupled_choice` under the noise of these counters, which a device computes on the spot."""
    if dispatch.runs_triton(probs):
        from outrider.kernels.verify import triton as verify_triton

        return verify_triton.coupled_draw(probs, seeds, positions, completions, purpose)
    return coupled_choice(probs, exponential_noise(seeds, positions, completions, probs.shape[1], purpose))


def coupled_accept(
    choices: Tensor,  # [rows] int64: the target's own token at each row
    windows: Windows,
    draft_ids: Tensor,  # [drafted] int64
) -> tuple[Tensor, Tensor]:
    """Accepts drafted tokens while they equal the target's own.

    Returns the numbers accepted, [n] int64, and the target's token after them, [n] int64; -1 where the window was fully
    accepted and no row follows.
    """
    if dispatch.runs_triton(choices):
        from outrider.kernels.verify import triton as verify_triton

        return verify_triton.coupled_accept(choices, windows, draft_ids)[:2]
    own, drafted = choices.tolist(), draft_ids.tolist()
    num_accepted, next_ids = [], []
    for row, num_rows, first, count in windows.on_host():  # a few ids: lists are faster than tensor operations
        held = 0
        while held < count and drafted[first + held] == own[row + held]:
            held += 1
        num_accepted.append(held)
        next_ids.append(own[row + held] if held < num_rows else -1)
    return torch.tensor(num_accepted, dtype=torch.int64), torch.tensor(next_ids, dtype=torch.int64)


def coupled_accept_tree(
    choices: Tensor,  # [rows] int64: the target's own token at each row
    windows: Windows,  # row 0 of a window judges the children of its root, row i + 1 those of its drafted token i
    draft_ids: Tensor,  # [drafted] int64
    parents: Tensor,  # [drafted] int64: the row that judges each drafted token; parents come first
) -> tuple[Tensor, Tensor, Tensor]:
    """Walks down from the root, to the child that is the target's own token, while there is one; of equal children the
    first.

    Returns the numbers accepted and the target's token after them as `coupled_accept` does, and which drafted tokens
    are accepted, [drafted] bool. A chain is the tree of parents 0, 1, 2, ...
    """
    if dispatch.runs_triton(choices):
        from outrider.kernels.verify import triton as verify_triton

        return verify_triton.coupled_accept(choices, windows, draft_ids, parents)
    own, drafted, above = choices.tolist(), draft_ids.tolist(), parents.tolist()
    next_ids, accepted = [], torch.zeros(len(drafted), dtype=torch.bool)
    num_accepted = torch.zeros_like(windows.num_drafted)
    for window, (row, num_rows, first, count) in enumerate(windows.on_host()):
        node = 0  # the row reached
        for index in range(first, first + count):
            if node < num_rows and above[index] == node and drafted[index] == own[row + node]:
                node = index - first + 1
                accepted[index] = True
                num_accepted[window] += 1
        next_ids.append(own[row + node] if node < num_rows else -1)
    return num_accepted, torch.tensor(next_ids, dtype=torch.int64), accepted
