"""What a step gives: of each window what is committed of it, of prompts their log probabilities, of the step its times.

Stops match one-token-at-a-time decoding: the first token that is a stop id, then EOS, then the length limit, cuts
what follows it. (Stop strings come before these; the gateway, which has the text, looks for them.)"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from outrider.engine.logprobs import RowLogprobs, reported_values, top_logprobs, with_listed
from outrider.engine.sampler import SamplingRows, assemble
from outrider.kernels.sampling.reference import logits_to_probs
from outrider.kernels.types import RowSampling
from outrider.rpc.messages import PromptLogprobs, StepTimings
from outrider.rpc.words.answer import PositionLogprobs, TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams, TokenOrigin
from outrider.target_service.scheduler import ScheduledSequence

RANKED_ON_DEVICE = 1 << 27  # logits of a prompt at once
RANKED_ON_HOST = 1 << 20  # what a cache holds is ranked faster


@dataclass(frozen=True, slots=True)
class VerifiedWindow:
    """What the target says of one sequence's window: what is committed of it."""

    scheduled: ScheduledSequence
    num_accepted: int  # drafted tokens that hold, past a stop, too
    ids: tuple[int, ...] = ()  # the accepted tokens and, if there is one, the target's own after them; up to a stop
    origins: tuple[TokenOrigin, ...] = ()
    finish_reason: FinishReason | None = None  # why the sequence ends with the last of them
    stop_token_id: int | None = None
    invalid: bool = False  # a row that mattered held NaN, +inf or no allowed token: an error, never a token
    logprobs: tuple[RowLogprobs, ...] = ()
    path: tuple[int, ...] = ()  # of a tree the nodes that hold


@dataclass(frozen=True, slots=True)
class LaunchedVerify:
    """Windows that are being judged. `read` waits for the device, and gives what is committed of every window whose
    masks are not late, in no fixed order."""

    read: Callable[[], list[VerifiedWindow]]
    next_ids: Tensor | None = None  # [n] int64 on the device, by window: the target's own tokens; None: not there


def verified_windows(
    logits: Tensor,  # [rows, vocab]: those that judge the windows, one window after the other
    windows: Sequence[ScheduledSequence],
    accepted: Tensor,  # [n] int64
    next_ids: Tensor,  # [n] int64: the target's own token after them; -1: none
    invalid: Tensor,  # [rows] bool, or 0 and 1
    held: Tensor | None = None,  # [drafted] bool: which drafted tokens hold, where there are trees
    token_mask: Tensor | None = None,  # [rows, vocab / 32] int32, where some row has a constraint
) -> list[VerifiedWindow]:
    """What was judged, by window."""
    verified: list[VerifiedWindow] = []
    reported: list[tuple[int, Sequence[int]]] = []  # which window, and the rows of its tokens
    first_row, flags = 0, invalid.tolist()
    first_draft, holds = 0, [] if held is None else held.tolist()
    for scheduled, num_accepted, next_id in zip(windows, accepted.tolist(), next_ids.tolist(), strict=True):
        num_rows = scheduled.num_verify_rows
        rows: Sequence[int] = range(first_row, first_row + min(num_accepted + 1, num_rows))
        path: tuple[int, ...] = ()
        if scheduled.window.parents:
            path = tuple(node for node in range(len(scheduled.window.ids)) if holds[first_draft + node])
            rows = [first_row, *(first_row + 1 + node for node in path)]
        if any(flags[row] for row in rows) or (next_id < 0 and num_accepted < num_rows):
            verified.append(VerifiedWindow(scheduled, num_accepted, invalid=True))
        else:
            window = _up_to_stop(scheduled, num_accepted, path, (next_id,) if next_id >= 0 else ())
            if window.ids and scheduled.target.open.sampling.logprobs is not None:
                reported.append((len(verified), rows[: len(window.ids)]))
            verified.append(window)
        first_row += num_rows
        first_draft += len(scheduled.window.ids)
    return _with_logprobs(verified, reported, logits, token_mask) if reported else verified


def _up_to_stop(
    scheduled: ScheduledSequence, num_accepted: int, path: tuple[int, ...], own: tuple[int, ...]
) -> VerifiedWindow:
    """The accepted tokens, then the target's own: plain without a draft, bonus after a full window or at a tree's leaf,
    else recovered."""
    target, drafted, parents = scheduled.target, scheduled.window.ids, scheduled.window.parents
    ids = (tuple(drafted[node] for node in path) if parents else drafted[:num_accepted]) + own
    is_whole = (path[-1] + 1 if path else 0) not in parents if parents else num_accepted == len(drafted)
    origin = TokenOrigin.BONUS if is_whole else TokenOrigin.RECOVERED
    origins = (TokenOrigin.ACCEPTED,) * num_accepted + (origin if drafted else TokenOrigin.PLAIN,) * len(own)
    num_output = scheduled.committed - target.prompt_len
    length, reason, stop_id = find_stop(
        ids, target.open.sampling, target.eos_ids, num_output, target.tokens_left_at(scheduled.committed)
    )
    return VerifiedWindow(scheduled, num_accepted, ids[:length], origins[:length], reason, stop_id, path=path)


def find_stop(
    ids: Sequence[int], sampling: SamplingParams, eos_ids: Collection[int], num_output: int, max_tokens_left: int
) -> tuple[int, FinishReason | None, int | None]:
    """How many of `ids` stay, up to the token that completes a stop; why the sequence ends there, and the stop id that
    ends it. `num_output` tokens were generated before them."""
    for index, token in enumerate(ids):
        after_minimum = num_output + index >= sampling.min_tokens
        if after_minimum and token in sampling.stop_token_ids:
            return index + 1, FinishReason.STOP, token
        # A constraint yields an end before the minimum, or one that is ignored, only where nothing else may follow.
        ends = sampling.structured_output is not None or (after_minimum and not sampling.ignore_eos)
        if ends and token in eos_ids:
            return index + 1, FinishReason.STOP, None
        if index + 1 >= max_tokens_left:
            return index + 1, FinishReason.LENGTH, None
    return len(ids), None, None


def _with_logprobs(
    windows: list[VerifiedWindow],
    reported: Sequence[tuple[int, Sequence[int]]],
    logits: Tensor,
    token_mask: Tensor | None,
) -> list[VerifiedWindow]:
    """Adds what is asked of the committed tokens, together for all that ask for values of the same kind."""
    by_mode: dict[str, list[tuple[int, Sequence[int]]]] = {}
    for index, rows in reported:
        mode = windows[index].scheduled.target.open.sampling.logprobs_mode.value
        by_mode.setdefault(mode, []).append((index, rows))
    for mode, members in by_mode.items():
        owners = [windows[index] for index, _ in members]
        targets = [owner.scheduled.target for owner in owners]
        chosen_rows = torch.tensor([row for _, rows in members for row in rows])
        own = logits[chosen_rows.to(logits.device)]
        sampling, probs = RowSampling(), own
        if mode.startswith("processed"):
            plans = [SamplingRows(t.sampler, owner.ids[:-1]) for t, owner in zip(targets, owners, strict=True)]
            sampling = assemble(plans, logits.device, None if token_mask is None else token_mask[chosen_rows])
            probs, _ = logits_to_probs(own, sampling)
        asked = [t.open.sampling for t, owner in zip(targets, owners, strict=True) for _ in owner.ids]
        counts = [0 if one.logprob_token_ids else one.logprobs or 0 for one in asked]
        chosen = [token for owner in owners for token in owner.ids]
        values = reported_values(mode, own, sampling, probs)
        found = zip(top_logprobs(values, chosen, counts), values, asked, strict=True)
        ranked = (
            with_listed(row, of, one.logprob_token_ids) if one.logprob_token_ids else row for row, of, one in found
        )
        for (index, _), owner in zip(members, owners, strict=True):
            windows[index] = replace(owner, logprobs=tuple(islice(ranked, len(owner.ids))))
    return windows


def position_logprobs(rows: Sequence[RowLogprobs]) -> tuple[PositionLogprobs, ...]:
    """Rows of the engine as wire values."""
    return tuple(tuple(map(TokenLogprob._make, zip(row.ids, row.values, row.ranks, strict=True))) for row in rows)


def report_prompt(scheduled: ScheduledSequence, logits: Tensor) -> None:
    """Keeps the log probabilities of a sequence's prompt rows, [rows that want logits, vocab], and sends them when
    they are whole. The row of position p speaks of the prompt token at p + 1; the first token of a prompt has none.
    Rows that are computed again after a preemption are skipped."""
    target = scheduled.target
    kept, sampling = target.prompt_logprobs, target.open.sampling
    if not kept:
        kept.append(())
    skip = len(kept) - 1 - scheduled.start
    end = min(scheduled.start + len(logits) + 1, target.prompt_len)
    next_ids = target.sequence.tokens[len(kept) : end]
    if next_ids:
        rows = logits[skip : skip + len(next_ids)]
        count, mode = sampling.prompt_logprobs or 0, sampling.logprobs_mode.value
        listed = _listed(sampling, len(kept) - 1, len(next_ids))
        kept.extend(position_logprobs(prompt_logprobs(rows, next_ids, count, mode, listed)))
    if len(kept) == target.prompt_len:
        target.sink(PromptLogprobs(target.open.sequence_id, 0, tuple(kept)))


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, next_ids: Sequence[int], count: int, mode: str, listed: Sequence[Sequence[int]]
) -> list[RowLogprobs]:
    """The log probabilities of the prompt tokens that follow each row, [rows, vocab], and of the ids listed for it;
    processors do not apply to a prompt."""
    raw = f"raw_{mode.rpartition('_')[2]}"
    at_once = RANKED_ON_HOST if logits.device.type == "cpu" else RANKED_ON_DEVICE
    num_rows = max(1, at_once // logits.shape[1])
    found: list[RowLogprobs] = []
    for start in range(0, len(next_ids), num_rows):
        ids, rows = next_ids[start : start + num_rows], logits[start : start + num_rows]
        values = reported_values(raw, rows, RowSampling(), rows)
        ranked = top_logprobs(values, ids, [count] * len(ids))
        more = zip(ranked, values, listed[start : start + num_rows], strict=True)
        found += [with_listed(row, of, extra, ranked=False) if extra else row for row, of, extra in more]
    return found


def _listed(sampling: SamplingParams, first: int, count: int) -> list[Sequence[int]]:
    """The ids that a request lists for so many rows of its prompt."""
    given, start = sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start
    if len(given) == 1:
        return [given[0] if place >= start else () for place in range(first, first + count)]
    return [given[row] if 0 <= row < len(given) else () for row in range(first - start, first - start + count)]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Sequences that shared a pass, and the windows that were verified in it."""

    scheduled: Sequence[ScheduledSequence]
    verified: Sequence[VerifiedWindow]  # in no fixed order
    started_ns: int  # wall clock
    started: float  # on the engine's clock
    ended: float
    timings: StepTimings  # what every commit of it says; the queue's time is each sequence's own

    @property
    def seconds(self) -> float:
        """The time from its start to what was verified."""
        return self.ended - self.started
