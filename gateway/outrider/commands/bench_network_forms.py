"""Time per token in closed form, for each way of speculating: what a perfect implementation would take.

Drafted tokens are accepted independently with chance a, k of them are drafted a round, and T is the mean number of
tokens of a round: (1 - a^(k+1)) / (1 - a) under that assumption, here as measured. All times are milliseconds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """What the forms are made of."""

    num_draft_tokens: int  # k
    acceptance: float  # a: of a drafted token, if those before it were accepted
    tokens_per_round: float  # T
    verify_ms: float  # a verification of k tokens, its sampling included
    pass_ms: float  # one drafted token

    @property
    def enumerate_ms(self) -> float:
        """From a commit to the end of what is drafted ahead: the token after the window, then a window for each
        outcome, all outcomes in the same passes."""
        return (self.num_draft_tokens + 1) * self.pass_ms


def colocated(costs: Costs) -> float:
    """Draft and verification in turn, on one machine."""
    return sequential(costs, 0.0)


def sequential(costs: Costs, round_trip_ms: float) -> float:
    """Draft, round trip and verification in turn."""
    drafting = costs.num_draft_tokens * costs.pass_ms
    return (round_trip_ms + drafting + costs.verify_ms) / costs.tokens_per_round


def chains(costs: Costs, round_trip_ms: float) -> float:
    """One chain that runs ahead: all is lost at a rejection, and the target's own token is not taken where the chain
    goes on."""
    drafting = costs.num_draft_tokens * costs.pass_ms
    first = round_trip_ms + drafting + costs.verify_ms
    further = max(drafting, costs.verify_ms)
    whole = costs.acceptance**costs.num_draft_tokens  # chance that a window is accepted to its end
    if costs.acceptance >= 1:
        return further / costs.num_draft_tokens
    return (1 - costs.acceptance) * (first + whole / (1 - whole) * further)


def branches(costs: Costs, round_trip_ms: float, hits: float, plain_ms: float) -> float:
    """The likeliest outcomes are drafted during the verification and lie at the target when it ends: a share `hits` of
    the rounds. At the others it decodes plain tokens until the draft has caught up."""
    away = round_trip_ms + costs.enumerate_ms
    plain = (1 - hits) * max(1, math.ceil(away / costs.verify_ms))
    return (max(costs.verify_ms, away) + plain * plain_ms) / (costs.tokens_per_round + plain)


def floor(costs: Costs) -> float:
    """No chain does better, with any draft on any network: every token that the draft gets wrong takes a
    verification."""
    return (1 - costs.acceptance) * costs.verify_ms
