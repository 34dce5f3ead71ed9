"""Predicted outputs: the caller's guess at the whole answer is drafted, and found again where the answer differs.

The state follows the answer through the guess as an edit distance does, by the few cheapest alignments: a token that
is not the guess's next one may replace it, stand before it (the guess lacks it), or stand some tokens further on (the
guess has too much); which of them it was, the tokens after it decide. Parts that were moved or are far away are found
by their last tokens. While answer and guess agree there is one alignment, and a token costs one comparison. After
several tokens that lead nowhere nothing is drafted until the answer meets the guess again.

What is drafted follows from tokens alone, and is one-hot: exact under every acceptance rule."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from outrider.proposers.base import SequenceContext

LIKELY, UNLIKELY = 0.9, 1.1  # cost of a token that differs, by whether its neighbours say so
SKIP, SKIPS = 0.8, 0.9  # cost of going on a token further in the guess, and several
CHANCE = 4.0  # cost of each time that the token would be so near by chance: a common one always is
MOST_SKIP = 1.8
MAX_SKIPPED = 32
JUMP = 2.5  # cost of going on anywhere else
LEAST_ANCHOR = 4  # tokens in a row that must agree there
MAX_COMPARED = 64  # places that are compared for it
MARGIN = 3.0  # an alignment that costs so much more than the best is given up
MAX_ALIGNMENTS = 8
SOLID = 3  # tokens in a row that agree: the place is certain
LOST = 8  # tokens since it was, after which nothing is drafted


class PredictionProposer:
    """Drafts from the guess that came with the request."""

    name = "prediction"

    def open(self, tokens: Iterable[int], context: SequenceContext) -> PredictionState:
        """Starts a sequence; tokens past the prompt are a part of the answer."""
        ids = list(tokens)
        state = PredictionState(context.prediction, context.prompt_len)
        state.append(ids[context.prompt_len :])
        return state


class _Alignment(NamedTuple):
    """One way that the answer may lie beside the guess."""

    next: int  # the guess's token that is expected
    cost: float  # of what differs
    agreeing: int  # tokens in a row, the last ones, that were the guess's


class _Place(NamedTuple):
    """Where the answer is after one of its tokens."""

    alignments: tuple[_Alignment, ...]  # the cheapest first
    doubtful: int  # tokens since the best one was certain


class PredictionState:
    """An answer beside its guess. A token taken back costs nothing: its place is forgotten."""

    def __init__(self, guess: Sequence[int], prompt_len: int = 0) -> None:
        self._guess, self._prompt_len = guess, prompt_len
        self._answer: list[int] = []
        self._places = [_Place((_Alignment(0, 0.0, SOLID),), 0)]  # after each token of the answer

    @cached_property
    def _found(self) -> dict[int, list[int]]:
        """By token, where it stands in the guess."""
        found: dict[int, list[int]] = {}
        for index, token_id in enumerate(self._guess):
            found.setdefault(token_id, []).append(index)
        return found

    @cached_property
    def _pairs(self) -> Counter[tuple[int, ...]]:
        """How often tokens stand side by side in the guess."""
        return Counter(pairwise(self._guess))

    @property
    def num_tokens(self) -> int:
        """Tokens held, the prompt's included."""
        return self._prompt_len + len(self._answer)

    @property
    def num_met(self) -> int:
        """How many of the guess's tokens the answer has, each counted once."""
        met = set[int]()
        for before, (end, _, agreeing) in pairwise(place.alignments[0] for place in self._places):
            num_new = min(agreeing, 1 if end == before.next + 1 else end)  # what was found has some behind it
            met.update(range(end - num_new, end))
        return len(met)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens at the end of the answer."""
        for token_id in ids:
            self._answer.append(token_id)
            self._places.append(self._follow(self._places[-1], token_id))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, as if the others had never been there."""
        kept = length - self._prompt_len
        if not 0 <= kept <= len(self._answer):
            raise ValueError(f"cannot truncate {self.num_tokens} tokens to {length}")
        del self._answer[kept:]
        del self._places[kept + 1 :]

    def propose(self, max_tokens: int) -> list[int]:
        """What the guess has next; empty at its end, and where the answer has left it."""
        place = self._places[-1]
        if place.doubtful > LOST:
            return []
        expected = place.alignments[0].next
        return list(self._guess[expected : expected + max_tokens])

    def _follow(self, place: _Place, token_id: int) -> _Place:
        """The place after one more token."""
        found: dict[int, _Alignment] = {}

        def add(alignment: _Alignment) -> None:
            known = found.get(alignment.next)
            if known is None or alignment.cost < known.cost:
                found[alignment.next] = alignment

        for expected, cost, agreeing in place.alignments:
            if expected < len(self._guess) and self._guess[expected] == token_id:
                add(_Alignment(expected + 1, cost, agreeing + 1))
                continue
            replaces = self._replaces(token_id, expected)
            add(_Alignment(expected, cost + (UNLIKELY if replaces else LIKELY), 0))
            if expected < len(self._guess):
                add(_Alignment(expected + 1, cost + (LIKELY if replaces else UNLIKELY), 0))
            skipped = self._skipped(token_id, expected)
            if skipped:
                by_chance = skipped * len(self._found[token_id]) / len(self._guess)
                skip = SKIP if skipped == 1 else min(MOST_SKIP, SKIPS + CHANCE * by_chance)
                add(_Alignment(expected + skipped + 1, cost + skip, 1))
        best = place.alignments[0]
        if place.doubtful + 1 >= LEAST_ANCHOR and min(one.cost for one in found.values()) > best.cost:
            for following, agreeing in self._anchors(token_id, best.next):
                add(_Alignment(following, self._places[-agreeing].alignments[0].cost + JUMP, agreeing))
        kept = sorted(found.values(), key=lambda one: (one.cost, -one.agreeing))[:MAX_ALIGNMENTS]
        kept = [one for one in kept if one.cost - kept[0].cost <= MARGIN]
        return _Place(tuple(kept), 0 if kept[0].agreeing >= SOLID else place.doubtful + 1)

    def _replaces(self, token_id: int, expected: int) -> bool:
        """Whether a token stands for the guess's own, rather than before it: by which of the pairs of neighbours that
        would follow from it are elsewhere in the guess."""
        here, after = self._guess[expected : expected + 1], self._guess[expected + 1 : expected + 2]
        joined = 2 * (self._pairs[token_id, *after] > 0)
        parted = 2 * (self._pairs[token_id, *here] > 0) + (self._pairs[*here, *after] > 1)
        return joined >= parted

    def _skipped(self, token_id: int, expected: int) -> int:
        """How many tokens of the guess come before the next one that is this; 0: none is near."""
        places = self._found.get(token_id, ())
        index = bisect_left(places, expected)
        return places[index] - expected if index < len(places) and places[index] - expected <= MAX_SKIPPED else 0

    def _anchors(self, token_id: int, expected: int) -> list[tuple[int, int]]:
        """Where else the answer's last tokens stand: behind which token of the guess, and how many of them. The longest
        first, of equals the nearest."""
        places = self._found.get(token_id, ())
        middle = bisect_left(places, expected)
        near = places[max(0, middle - MAX_COMPARED // 2) : middle + MAX_COMPARED // 2]
        anchors = [(index + 1, self._agreeing(index)) for index in near]
        anchors.sort(key=lambda anchor: (-anchor[1], abs(anchor[0] - expected)))
        return [anchor for anchor in anchors[:2] if anchor[1] >= LEAST_ANCHOR]

    def _agreeing(self, index: int) -> int:
        """How many tokens up to the guess's at `index` are the answer's last."""
        count = 1
        most = min(index + 1, len(self._answer), 4 * LEAST_ANCHOR)
        while count < most and self._guess[index - count] == self._answer[-1 - count]:
            count += 1
        return count
