"""Log probabilities of positions, as vLLM's module of this name has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Logprob:
    """One candidate at one position; rank is 1-based."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class FlatLogprobs(MutableSequence[LogprobsOnePosition]):
    """Those of many positions in a few lists, which garbage collection is quick with. Read as a sequence it is the list
    of dicts that comes without `flat_logprobs`; positions are only added."""

    def __init__(self, positions: Iterable[Mapping[int, Logprob] | None] = ()) -> None:
        self.start_indices: list[int] = []  # by position, of the lists below
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        self.extend(positions)  # type: ignore[arg-type]  # as `append`

    def append(self, value: Mapping[int, Logprob] | None) -> None:
        """A position more; None: one of which nothing is known, as a prompt's first."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return FlatLogprobs(self[place] for place in range(*index.indices(len(self))))
        places = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at]) for at in places
        }

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("positions of FlatLogprobs are only added")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("positions of FlatLogprobs are only added")

    def insert(self, index: int, value: Any) -> None:
        """Not there."""
        raise TypeError("positions of FlatLogprobs are only added")
