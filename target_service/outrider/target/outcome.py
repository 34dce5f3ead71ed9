"""What a verified window commits: the ids up to the token that ends the sequence, their origins, and why it ended.

Stops match one-token-at-a-time decoding: the first token that is a stop id, then EOS, then the length limit, cuts
what follows it. (Stop strings come before these; the gateway, which has the text, looks for them.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.wire.sampling import FinishReason, SamplingParams, TokenOrigin


@dataclass(frozen=True, slots=True)
class Outcome:
    """The committed part of a verdict."""

    ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    finish_reason: FinishReason | None
    stop_token_id: int | None


def origins_of(num_drafted: int, num_accepted: int, has_next: bool) -> tuple[TokenOrigin, ...]:
    """Accepted tokens, then the target's own: plain without a draft, bonus after a full window, else recovered."""
    accepted = (TokenOrigin.ACCEPTED,) * num_accepted
    if not has_next:
        return accepted
    if num_drafted == 0:
        return (TokenOrigin.PLAIN,)
    return (*accepted, TokenOrigin.BONUS if num_accepted == num_drafted else TokenOrigin.RECOVERED)


def outcome_of(
    ids: Sequence[int],
    origins: Sequence[TokenOrigin],
    sampling: SamplingParams,
    eos_ids: Collection[int],
    num_output: int,
    max_tokens_left: int,
) -> Outcome:
    """Cuts `ids` at the token that completes a stop. `num_output` tokens were generated before them."""
    for index, token in enumerate(ids):
        after_minimum = num_output + index >= sampling.min_tokens
        if after_minimum and token in sampling.stop_token_ids:
            return Outcome(tuple(ids[: index + 1]), tuple(origins[: index + 1]), FinishReason.STOP, token)
        if after_minimum and token in eos_ids and not sampling.ignore_eos:
            return Outcome(tuple(ids[: index + 1]), tuple(origins[: index + 1]), FinishReason.STOP, None)
        if index + 1 >= max_tokens_left:
            return Outcome(tuple(ids[: index + 1]), tuple(origins[: index + 1]), FinishReason.LENGTH, None)
    return Outcome(tuple(ids), tuple(origins), None, None)
