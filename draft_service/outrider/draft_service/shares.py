"""Who gives way where a draft is full: of several models' sequences those of one that has more than its share. A
request whose draft leaves goes on without one: what is lent can be had back at once, and nothing is kept empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from outrider.draft_service.sequence import SequenceKey
from outrider.planner.estimates import OpenWork
from outrider.rpc.settings import named_values

MAX_WEIGHT = 1000.0
FIELD = "share (--share)"


class ModelShares:
    """What the models have of a draft's room, by the names that their gateways call them. A model's share is its
    greatest part of a bound, sequences or tokens, over its weight (dominant resource fairness; Ghodsi et al. 2011)."""

    def __init__(self, max_sequences: int, max_tokens: int, weights: Mapping[str, float]) -> None:
        """Of at most so many sequences and tokens (0: any number). A model without a weight has 1."""
        self._max_sequences, self._max_tokens, self._weights = max_sequences, max_tokens, weights
        self._held: dict[str, dict[SequenceKey, int]] = defaultdict(dict)  # tokens, in the order of their coming

    @property
    def counts(self) -> dict[str, float]:
        """Open sequences by model."""
        return {model: len(held) for model, held in list(self._held.items())}

    def add(self, key: SequenceKey, model: str, num_tokens: int) -> None:
        """One is open."""
        self._held[model][key] = num_tokens

    def remove(self, key: SequenceKey) -> None:
        """It is no more, if it was."""
        for model, held in list(self._held.items()):
            if held.pop(key, None) is not None and not held:
                del self._held[model]

    def giving_way(self, work: OpenWork, model: str, num_tokens: int) -> Sequence[SequenceKey]:
        """The sequences that leave so that one more of a model finds room: one after another the latest of the model
        with the greatest share, as long as that is greater than this one's will be. None where there is room, or where
        all that may leave would not make it."""
        leaving: list[SequenceKey] = []
        most_to_leave = self._by_share(model, num_tokens)
        while not work.has_room(num_tokens, leaving):
            key = next(most_to_leave, None)
            if key is None:
                return ()
            leaving.append(key)
        return leaving

    def _by_share(self, model: str, num_tokens: int) -> Iterator[SequenceKey]:
        own = self._held.get(model, {})
        least = self._share(model, [*own.values(), num_tokens])
        left = {other: list(held.items()) for other, held in self._held.items() if other != model}
        while left:
            shares = {other: self._share(other, [tokens for _, tokens in held]) for other, held in left.items()}
            greatest = max(shares, key=shares.__getitem__)
            if shares[greatest] <= least:
                return
            key, _ = left[greatest].pop()
            yield key

    def _share(self, model: str, tokens: Sequence[int]) -> float:
        by_sequences = len(tokens) / self._max_sequences
        by_tokens = sum(tokens) / self._max_tokens if self._max_tokens else 0.0
        return max(by_sequences, by_tokens) / self._weights.get(model, 1.0)


def weights_of(given: Sequence[str]) -> dict[str, float]:
    """The weights of a list of NAME=WEIGHT, by name. ValueError for what is none, or comes twice."""
    weights: dict[str, float] = {}
    for name, number in named_values(given, FIELD, "WEIGHT").items():
        weights[name] = float(number) if number.replace(".", "", 1).isdecimal() else 0.0
        if not 0 < weights[name] <= MAX_WEIGHT:
            raise ValueError(f"{FIELD}: is {number[:200]!r} for {name}; allowed: over 0 and at most {MAX_WEIGHT:g}")
    return weights
