"""From logits to the probabilities that are sampled, each row with its own parameters, in float32.

The order is fixed: allowed and banned ids (min_tokens bans some), logit bias, penalties, structured-output mask,
temperature, min_p, top_k, top_p. What no row asks for costs nothing. Ties at a cut keep the lowest ids, so that the
kept set is a function of the values alone.

Drafted tokens are drawn from the very integers that cross the wire: truncate, round to integer weights, and only then
draw. A vector rounded after the draw would not be the law drawn from, and rejection acceptance would be biased by the
difference. What a draft's next pass needs (top ids, sequences moved on by a token) is computed on the device, too."""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.cpu.library import cpu_library
from outrider.kernels.types import Penalties, RowSampling, Truncation
from outrider.kernels.verify.reference import first_argmax


def logits_to_probs(
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
) -> tuple[Tensor, Tensor]:
    """Returns the probabilities, [rows, vocab] float32, and which rows are invalid, [rows] bool.

    A greedy row is one-hot at its arg max, ties to the lowest id. A row with a NaN, an infinity above, or no id left is
    invalid: its probabilities mean nothing.
    """
    if dispatch.runs_triton(logits):
        from outrider.kernels.sampling import triton as sampling_triton

        return sampling_triton.logits_to_probs(logits, sampling)
    raw, logits = logits, adjust_logits(logits, sampling)
    highest = logits.amax(dim=-1, keepdim=True)  # [rows, 1]; NaN if any is
    invalid = ~highest.isfinite().squeeze(1)
    if logits is not raw:  # a mask may hide what is wrong with a row
        invalid |= ~raw.amax(dim=-1).isfinite()
    if sampling.greedy_rows is not None and len(sampling.greedy_rows) == len(logits):
        return _one_hot(logits), invalid
    probs = torch.softmax(_scale(logits, highest, sampling.temperature), dim=-1)
    if sampling.min_p is not None:
        probs = _apply_min_p(probs, sampling.min_p)
    if sampling.truncation is not None:
        probs = _truncate(probs, sampling.truncation)
    if sampling.greedy_rows is not None:
        probs[sampling.greedy_rows] = _one_hot(logits[sampling.greedy_rows])
    return probs, invalid


def greedy_choice(
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
) -> tuple[Tensor, Tensor]:
    """The arg max of every row before temperature, [rows] int64, and which rows are invalid, [rows] bool."""
    if dispatch.runs_triton(logits):
        from outrider.kernels.sampling import triton as sampling_triton

        return sampling_triton.greedy_choice(logits, sampling)
    raw, logits = logits, adjust_logits(logits, sampling)
    ids = first_argmax(logits)  # a NaN is taken first
    invalid = torch.from_numpy(~np.isfinite(logits.numpy()[np.arange(len(ids)), ids.numpy()]))  # few operations
    if logits is not raw:  # a mask may hide what is wrong with a row
        invalid |= ~raw.amax(dim=-1).isfinite()
    return ids, invalid


def processed_logits(
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
    probs: Tensor,  # [rows, vocab] float32: logits_to_probs of the same
) -> Tensor:  # [rows, vocab] float32
    """Logits after every step, to report: minus infinity where an id was cut. Greedy rows end before temperature."""
    logits = adjust_logits(logits, sampling)
    if sampling.temperature is not None:
        logits = logits / sampling.temperature[:, None]
    cut = probs == 0
    if sampling.greedy_rows is not None:
        cut[sampling.greedy_rows] = False
    return logits.masked_fill(cut, -torch.inf)


# What is added for the eight ids of every byte of a mask, [256, 8]: 0 where its bit is set, else minus infinity.
_BYTE_MASKS = torch.zeros(256, 8).masked_fill_((torch.arange(256)[:, None] >> torch.arange(8) & 1) == 0, -torch.inf)


def adjust_logits(
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
) -> Tensor:  # [rows, vocab] float32; the argument itself where nothing applies
    """Everything that precedes temperature."""
    if dispatch.runs_triton(logits):
        from outrider.kernels.sampling import triton as sampling_triton

        return sampling_triton.adjust_logits(logits, sampling).float()
    logits = logits.float()
    if sampling.allowed is not None:
        masks = sampling.allowed.masks.index_select(0, sampling.allowed.mask_of)  # [restricted, vocab]
        logits = logits.index_add(0, sampling.allowed.rows, masks)
    if sampling.banned is not None:
        banned = torch.tensor(-torch.inf, device=logits.device)
        logits = logits.index_put((sampling.banned.rows, sampling.banned.ids), banned)
    if sampling.bias is not None and sampling.bias_values is not None:
        logits = logits.index_put((sampling.bias.rows, sampling.bias.ids), sampling.bias_values, accumulate=True)
    if sampling.penalties is not None:
        index = (sampling.penalties.rows, sampling.penalties.ids)
        logits = logits.index_put(index, _penalise(logits[index], sampling.penalties))
    if sampling.token_mask is not None:
        # Adding a table's floats by byte: on a CPU selecting by booleans takes ten times as long.
        added = F.embedding(sampling.token_mask.contiguous().view(torch.uint8).int(), _BYTE_MASKS.to(logits.device))
        logits = logits + added.flatten(1)[:, : logits.shape[1]]
    return logits


def most_probable(
    probs: Tensor,  # [rows, vocab] float32
    limits: Tensor,  # [rows] int64: at most so many ids
    masses: Tensor,  # [rows] float64: the smallest set with at least this share of the total; 1: all
    totals: Tensor | None = None,  # [rows] float64; by default the mass that the limit leaves
) -> Tensor:  # [rows, vocab] float32: probs where kept, 0 elsewhere
    """Keeps the most probable ids, at least one, ties at the cut by lowest id."""
    vocab_size = probs.shape[1]
    limits = limits.clamp(max=vocab_size)
    width = min(int(limits.max()) + 1, vocab_size)
    descending = _greatest(probs, width)  # [rows, width]
    cumulative = descending.cumsum(dim=-1, dtype=torch.float64)  # [rows, width]
    totals = cumulative.gather(1, limits[:, None] - 1) if totals is None else totals[:, None]  # [rows, 1]
    wanted = masses[:, None] * totals  # [rows, 1]
    by_mass = torch.searchsorted(cumulative, wanted).squeeze(1) + 1  # [rows]: the first sum that reaches it
    num_kept = torch.where(masses < 1, torch.minimum(by_mass, limits), limits)  # [rows]
    threshold = descending.gather(1, num_kept[:, None] - 1)  # [rows, 1]
    kept = _at_least(probs, threshold)
    following = descending.gather(1, num_kept[:, None].clamp(max=width - 1))  # [rows, 1]: the first one cut
    tied = (following == threshold) & (threshold > 0) & (num_kept[:, None] < width)  # [rows, 1]
    for row in tied.squeeze(1).nonzero().squeeze(1).tolist():
        at_threshold = (probs[row] == threshold[row]).nonzero().squeeze(1)  # [ties], ids ascending
        num_above = int((descending[row] > threshold[row]).sum())
        kept[row, at_threshold[int(num_kept[row]) - num_above :]] = 0
    return kept


def _scale(logits: Tensor, highest: Tensor, temperature: Tensor | None) -> Tensor:
    """Divides by temperature below the row's highest logit, so that no temperature above 0 overflows."""
    return logits if temperature is None else (logits - highest) / temperature[:, None]


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(1, first_argmax(logits)[:, None], 1.0)


def _apply_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Keeps ids with at least min_p times the highest probability. A row that has it off is left as it is, whatever the
    others have."""
    kept = _at_least(probs, min_p[:, None] * probs.amax(dim=-1, keepdim=True))
    return kept.div_(kept.sum(dim=-1, keepdim=True).masked_fill_(min_p[:, None] == 0, 1.0))


def _truncate(probs: Tensor, cut: Truncation) -> Tensor:
    """Applies top_k, then top_p to what it leaves, to the rows that ask for them."""
    every_row = len(cut.rows) == len(probs)
    top_k = torch.where(cut.top_k > 0, cut.top_k, probs.shape[1])
    kept = most_probable(probs if every_row else probs.index_select(0, cut.rows), top_k, cut.top_p)
    kept = kept.div_(kept.sum(dim=-1, keepdim=True))  # [truncated, vocab]
    return kept if every_row else probs.index_copy_(0, cut.rows, kept)


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    """Repetition divides positive logits and multiplies negative ones; the others subtract; [entries] float32."""
    logits = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = logits - penalties.frequency * penalties.output_counts
    return logits - penalties.presence * (penalties.output_counts > 0)


def _at_least(values: Tensor, threshold: Tensor) -> Tensor:
    """Values that reach their row's threshold, else 0, [rows, vocab]; boolean tensors would be slow on a CPU."""
    return torch.ge(values, threshold, out=torch.empty_like(values)).mul_(values)


def _greatest(values: Tensor, count: int) -> Tensor:
    """The greatest values of each row, descending, [rows, vocab] -> [rows, count]; on a CPU numpy sorts far faster."""
    if values.device.type != "cpu":
        return (
            values.topk(count, dim=-1).values
            if count < values.shape[1]
            else values.sort(dim=-1, descending=True).values
        )
    negated = -values.numpy()
    if count < values.shape[1]:
        negated = np.partition(negated, count - 1, axis=-1)[:, :count]
    return torch.from_numpy(np.sort(negated, axis=-1)).neg_()


MAX_WEIGHT = 32767
MAX_ENTRIES = 512  # 512 x 32767 is below 2^24
DEFAULT_MASS = 0.995


@dataclass(frozen=True, slots=True)
class DraftSamples:
    """Drawn tokens and the integer weights they were drawn from, packed; ids ascend within a vector."""

    token_ids: Tensor  # [rows] int64; -1 where a row has no weight
    entry_ids: Tensor  # [entries] int64
    entry_weights: Tensor  # [entries] int64, 1 to 32767
    entry_starts: Tensor  # [rows + 1] int64


def draft_sample(
    draft_probs: Tensor,  # [rows, vocab] float32
    words: Tensor,  # [rows, 4] int64, under Purpose.DRAFT
    mass: float = DEFAULT_MASS,
    max_entries: int = MAX_ENTRIES,
) -> DraftSamples:
    """Keeps the smallest set that holds `mass`, at most `max_entries` ids, and draws from its integer weights."""
    if not 1 <= max_entries <= MAX_ENTRIES:
        raise ValueError(f"max_entries must be 1 to {MAX_ENTRIES}, not {max_entries}")
    if dispatch.runs_triton(draft_probs):
        from outrider.kernels.sampling import triton as sampling_triton

        token_ids, ids, sent, starts = sampling_triton.draft_sample(draft_probs, words, mass, max_entries)
        num_entries = int(starts[-1])  # what crosses the wire is read on the host next
        return DraftSamples(token_ids, ids[:num_entries], sent[:num_entries], starts)
    weights = integer_weights(draft_probs, mass, max_entries)  # [rows, vocab]
    positive = _positive(weights)  # [entries], by row, then id
    entry_weights = weights.flatten()[positive].long()
    row_bounds = torch.arange(len(weights) + 1, device=weights.device) * weights.shape[1]  # [rows + 1]
    entry_starts = torch.searchsorted(positive, row_bounds)
    entry_ids = positive % weights.shape[1]
    token_ids = draw_integer(entry_ids, entry_weights, entry_starts, words)
    return DraftSamples(token_ids, entry_ids, entry_weights, entry_starts)


def integer_weights(draft_probs: Tensor, mass: float, max_entries: int) -> Tensor:
    """round(32767 x prob / max prob) of the kept ids, 0 elsewhere, [rows, vocab] float32."""
    num_rows, device = len(draft_probs), draft_probs.device
    limits = torch.full((num_rows,), max_entries, device=device)
    masses = torch.full((num_rows,), mass, dtype=torch.float64, device=device)
    kept = most_probable(draft_probs, limits, masses, draft_probs.sum(dim=-1, dtype=torch.float64))
    return (kept * (MAX_WEIGHT / kept.amax(dim=-1, keepdim=True))).round_()


def draw_integer(
    entry_ids: Tensor,  # [entries] int64
    entry_weights: Tensor,  # [entries] int64, above 0
    entry_starts: Tensor,  # [rows + 1] int64
    words: Tensor,  # [rows, 4] int64
) -> Tensor:  # [rows] int64; -1 where a row has no entries
    """Draws an id per row by floor(total x r / 2^64), r the 64 bits of the row's first two words; exact in int64."""
    cumulative = torch.cat((entry_weights.new_zeros(1), entry_weights.cumsum(0)))  # [entries + 1]
    bounds = cumulative[entry_starts]  # [rows + 1]
    totals = bounds.diff()  # [rows], below 2^24
    points = (totals * words[:, 0] + (totals * words[:, 1] >> 32)) >> 32  # [rows]
    entries = torch.searchsorted(cumulative[1:], bounds[:-1] + points, right=True)  # [rows]
    drawn = entry_ids[entries.clamp(max=max(len(entry_ids) - 1, 0))] if len(entry_ids) else entries
    return torch.where(totals > 0, drawn, -1)


def _positive(weights: Tensor) -> Tensor:
    """Flat indices of weights above 0, [entries] int64, ascending; numpy's are far faster on a CPU."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(weights.numpy() > 0))
    return (weights.flatten() > 0).nonzero().squeeze(1)


MOST = 64  # that the C kernel keeps


def best_ids(
    scores: Tensor,  # [rows, vocab] float32
    count: int,  # at least 1
) -> Tensor:  # [rows, count] int64
    """The greatest first; -1 where no finite score is left. Of equal scores the lowest id comes first on a CPU with the
    C kernels; elsewhere their order is PyTorch's."""
    library = cpu_library() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    if library is None or count > MOST:
        usable = scores.masked_fill(~scores.isfinite(), -torch.inf)
        best = usable.topk(min(count, scores.shape[1]), dim=-1)
        found = best.indices.masked_fill(best.values == -torch.inf, -1)
        return F.pad(found, (0, count - found.shape[1]), value=-1)
    scores = scores.contiguous()
    ids = torch.empty(scores.shape[0], count, dtype=torch.int64)
    library.best_ids(
        c_void_p(scores.data_ptr()), c_int64(scores.shape[0]), c_int64(scores.shape[1]), c_int64(count),
        c_void_p(ids.data_ptr()),
    )  # fmt: skip
    return ids


def advance(
    positions: Tensor,  # [sequences] int32: of the token that is computed next; changed in place, as the next two
    slots: Tensor,  # [sequences] int32: where its keys and values go; -1: nowhere
    context_lens: Tensor,  # [sequences] int32: tokens in the cache with it; 0: padding, which stays where it is
    block_tables: Tensor,  # [sequences, most blocks] int32
    ends: Tensor,  # [sequences] int32: the positions that a sequence has places for, 0 in padding
    block_size: int,
) -> None:
    """Moves every sequence on by a token, up to its end: what stands there stores nothing, and sees what is before."""
    if dispatch.runs_triton(positions):
        from outrider.kernels.sampling import triton as sampling_triton

        sampling_triton.advance(positions, slots, context_lens, block_tables, ends, block_size)
        return
    moves = (context_lens > 0).int()  # [sequences]
    positions.copy_(torch.minimum(positions + moves, ends))
    context_lens.copy_(torch.minimum(context_lens + moves, ends))
    last = (ends - 1).clamp(min=0)  # [sequences]
    blocks = block_tables.gather(1, (torch.minimum(positions, last) // block_size).long()[:, None]).squeeze(1)
    slots.copy_(blocks * block_size + positions % block_size).masked_fill_(positions >= ends, -1)
