"""Time per token in closed form, for each way to speculate. Pure arithmetic; all times of a call are in one unit.

Drafted tokens are accepted independently with chance a, k of them are drafted a round, and T is the mean number of
tokens of a round: (1 - a^(k+1)) / (1 - a) under that assumption (Leviathan et al., arXiv 2211.17192, section 3.3), or
as measured. A gateway's forecast puts in what it expects of a plan; the bench what it measured, to see how far the
services are from a perfect implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass


def in_turn(late: float, verify: float, tokens: float) -> float:
    """Drafting and its way (`late`), then the verification."""
    return (late + verify) / tokens


def ahead_waiting(late: float, verify: float, missed: float, hits: float, tokens: float) -> float:
    """The next window is drafted during the verification and at hand after it in a share `hits` of the rounds; at the
    others the target waits for it (`missed`)."""
    return (hits * max(verify, late) + (1 - hits) * (verify + missed)) / tokens


def ahead_plain(verify: float, tokens: float, plain: float, num_plain: float) -> float:
    """The target never waits: between two windows it decodes `num_plain` tokens, in `plain` each."""
    return (verify + num_plain * plain) / (tokens + num_plain)


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured of one way to speculate."""

    num_draft_tokens: int  # k
    acceptance: float  # a: of a drafted token, if those before it were accepted
    tokens_per_round: float  # T
    verify_ms: float  # a verification of k tokens, its sampling included
    pass_ms: float  # one drafted token

    @property
    def drafting_ms(self) -> float:
        """A window's passes."""
        return self.num_draft_tokens * self.pass_ms

    @property
    def enumerate_ms(self) -> float:
        """From a commit to the end of what is drafted ahead: the token after the window, then a window for each
        outcome, all outcomes in the same passes."""
        return (self.num_draft_tokens + 1) * self.pass_ms


def sequential(costs: Costs, round_trip_ms: float) -> float:
    """Draft, round trip and verification in turn; without a round trip also both models in one process."""
    return in_turn(round_trip_ms + costs.drafting_ms, costs.verify_ms, costs.tokens_per_round)


def chains(costs: Costs, round_trip_ms: float) -> float:
    """One chain that runs ahead: all is lost at a rejection, and the target's own token is not taken where the chain
    goes on."""
    first = round_trip_ms + costs.drafting_ms + costs.verify_ms
    further = max(costs.drafting_ms, costs.verify_ms)
    whole = costs.acceptance**costs.num_draft_tokens  # chance that a window is accepted to its end
    if costs.acceptance >= 1:
        return further / costs.num_draft_tokens
    return (1 - costs.acceptance) * (first + whole / (1 - whole) * further)


def branches(costs: Costs, round_trip_ms: float, hits: float, plain_ms: float) -> float:
    """The likeliest outcomes are drafted during the verification and lie at the target when it ends: a share `hits` of
    the rounds. At the others it decodes plain tokens until the draft has caught up."""
    away = round_trip_ms + costs.enumerate_ms
    num_plain = (1 - hits) * max(1, math.ceil(away / costs.verify_ms))
    return ahead_plain(max(costs.verify_ms, away), costs.tokens_per_round, plain_ms, num_plain)


def floor(costs: Costs) -> float:
    """No chain does better, with any draft on any network: every token that the draft gets wrong takes a
    verification."""
    return (1 - costs.acceptance) * costs.verify_ms
