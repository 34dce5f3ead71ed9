"""From logits to the probabilities that are sampled, each row with its own parameters, in float32.

The order is fixed: allowed and banned ids (min_tokens bans some), logit bias, penalties, structured-output mask,
temperature, min_p, top_k, top_p. What no row asks for costs nothing. Ties at a cut keep the lowest ids, so that the
kept set is a function of the values alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.coupled import first_argmax


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


def logits_to_probs(
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
) -> tuple[Tensor, Tensor]:
    """Returns the probabilities, [rows, vocab] float32, and which rows are invalid, [rows] bool.

    A greedy row is one-hot at its arg max, ties to the lowest id. A row with a NaN, an infinity above, or no id left is
    invalid: its probabilities mean nothing.
    """
    if dispatch.runs_triton(logits):
        from outrider.kernels import logits_to_probs_triton

        return logits_to_probs_triton.logits_to_probs(logits, sampling)
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
        from outrider.kernels import logits_to_probs_triton

        return logits_to_probs_triton.greedy_choice(logits, sampling)
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


def adjust_logits(
    logits: Tensor,  # [rows, vocab]
    sampling: RowSampling,
) -> Tensor:  # [rows, vocab] float32; the argument itself where nothing applies
    """Everything that precedes temperature."""
    if dispatch.runs_triton(logits):
        from outrider.kernels import adjust_logits_triton

        return adjust_logits_triton.adjust_logits(logits, sampling).float()
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
        logits = logits.masked_fill(~unpack_mask(sampling.token_mask, logits.shape[1]), -torch.inf)
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


def unpack_mask(token_mask: Tensor, vocab_size: int) -> Tensor:
    """Bits to booleans, [rows, words] int32 -> [rows, vocab] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=token_mask.device)
    return ((token_mask[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()


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
