"""Which of several methods drafts next: the first of the list that has something, until what each of them is worth was
measured; then the one with the most tokens for its time.

What a lookup finds is judged by its length, since a longer match is a safer one; what a model drafts, by the model. A
draft that the target waits for costs its own time and the rest of the round; one that is made during a verification
costs what is longer. Nothing here rests on drawn tokens: what was committed tells of acceptance, clocks of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.planner.estimates import Acceptance, RunningMean

LEAST_TESTED = 3.0  # verifications of late: with less a draft of this kind is tried rather than judged
FORGOTTEN = 1 / 256  # of what is known of a kind, each time that it is passed over: so it is tried again at last
LONGEST = 4  # kind of a lookup of nine tokens and more

Kind = tuple[str, int]  # method, and the order of the number of tokens that a lookup found


class Offer(NamedTuple):
    """What a method would draft next."""

    method: str
    num_tokens: int
    kind: Kind

    @classmethod
    def of_model(cls, method: str, num_tokens: int) -> Offer:
        """A model drafts as many as are wanted, whatever the text."""
        return cls(method, num_tokens, (method, 0))

    @classmethod
    def of_lookup(cls, method: str, num_tokens: int) -> Offer:
        """One token, 2, 3 and 4, 5 to 8, and more are kinds of their own."""
        return cls(method, num_tokens, (method, min((num_tokens - 1).bit_length(), LONGEST)))


@dataclass(slots=True)
class MethodRates:
    """What all sequences of a process learn of the methods together."""

    acceptance: dict[Kind, Acceptance] = field(default_factory=dict)
    token_us: dict[str, RunningMean] = field(default_factory=dict)  # that a drafted token takes
    rest_us: RunningMean = field(default_factory=RunningMean)  # of a round

    def of(self, kind: Kind) -> Acceptance:
        """How drafts of a kind are accepted."""
        return self.acceptance.setdefault(kind, Acceptance())

    def forget(self, method: str) -> None:
        """Another model drafts by it: what was measured of it holds no more."""
        self.acceptance = {kind: found for kind, found in self.acceptance.items() if kind[0] != method}
        self.token_us.pop(method, None)

    def add_draft(self, method: str, num_tokens: int, us: float) -> None:
        """So many tokens took so long."""
        if num_tokens:
            self.token_us.setdefault(method, RunningMean()).add(us / num_tokens)

    def draft_us(self, offer: Offer) -> float:
        """What an offer takes; 0 while nothing is known."""
        known = self.token_us.get(offer.method)
        return 0.0 if known is None else known.value * offer.num_tokens


@dataclass(slots=True)
class MethodChoice:
    """Of one sequence, with what is known of all as its prior."""

    rates: MethodRates
    _own: dict[Kind, Acceptance] = field(default_factory=dict)
    _rest_us: RunningMean = field(default_factory=RunningMean)  # of a round, from when the target has its window

    def choose(self, offers: Sequence[Offer], is_awaited: bool) -> Offer:
        """The best of the offers, which are in the order of the list. `is_awaited`: the target has nothing to verify
        until this is drafted."""
        untried = [offer for offer in offers if self.rates.of(offer.kind).num_tested < LEAST_TESTED]
        best = untried[0] if untried else max(offers, key=lambda offer: self._tokens_per_us(offer, is_awaited))
        for offer in offers:
            if offer is not best:
                self.rates.of(offer.kind).fade(1 - FORGOTTEN)
        return best

    def add_round(self, kind: Kind, num_drafted: int, num_accepted: int, rest_us: float | None) -> None:
        """A window whose first `num_drafted` tokens were of this kind was verified; `rest_us` after the target had it,
        where that is known."""
        self._acceptance(kind).add(num_drafted, num_accepted)
        self.rates.of(kind).add(num_drafted, num_accepted)
        if rest_us is not None:
            self._rest_us.add(rest_us)
            self.rates.rest_us.add(rest_us)

    def _acceptance(self, kind: Kind) -> Acceptance:
        return self._own.setdefault(kind, Acceptance(self.rates.of(kind)))

    def _tokens_per_us(self, offer: Offer, is_awaited: bool) -> float:
        tokens = self._acceptance(offer.kind).tokens(offer.num_tokens)
        draft_us, rest_us = self.rates.draft_us(offer), self._rest_us.or_else(self.rates.rest_us.value)
        if not rest_us:
            return tokens
        return tokens / (rest_us + draft_us if is_awaited else max(rest_us, draft_us))
