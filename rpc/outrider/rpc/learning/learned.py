"""The low-rank weights that draft for some sequences in place of the model or the head alone: they were learned from
others of the same key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from outrider.rpc.messages import LearnedDraft, LearningKey

if TYPE_CHECKING:
    from outrider.rpc.learning.lessons import Teaching


class HasDigest(Protocol):
    """Weights that are known by their digest."""

    @property
    def digest(self) -> str:
        """Of their content, and of what they are beside."""


Weights = TypeVar("Weights", bound=HasDigest)


@dataclass(frozen=True, slots=True)
class LearnedAdapter(Generic[Weights]):
    """Weights, and the callers for whom the model alone drafts all the same."""

    adapter: Weights
    left_out: frozenset[str] = frozenset()


class LearnedAdapters(Generic[Weights]):
    """Those in use, by key: the most that there may be, of which the one goes that was wanted longest ago. Belongs to
    the device thread."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._adapters: OrderedDict[LearningKey, LearnedAdapter[Weights]] = OrderedDict()
        self.rows: tuple[LearnedDraft, ...] = ()  # what is told of them, to any thread

    def get(self, teaching: Teaching | None) -> Weights | None:
        """What drafts for a sequence; None: the model alone."""
        found = None if teaching is None else self._adapters.get(teaching.key)
        if teaching is None or found is None or teaching.caller in found.left_out:
            return None
        self._adapters.move_to_end(teaching.key)
        return found.adapter

    def digest(self, key: LearningKey) -> str:
        """Of what is in use; empty: the model alone is."""
        found = self._adapters.get(key)
        return "" if found is None else found.adapter.digest

    def put(self, key: LearningKey, adapter: Weights | None, left_out: Collection[str] = ()) -> set[LearningKey]:
        """Lets one draft, but for callers who are left out, or the model alone. Returns the keys for which another
        drafts now."""
        changed = {key}
        self._adapters.pop(key, None)
        if adapter is not None:
            self._adapters[key] = LearnedAdapter(adapter, frozenset(left_out))
        while len(self._adapters) > self.most:
            changed.add(self._adapters.popitem(last=False)[0])
        self.rows = tuple(
            LearnedDraft(*key, one.adapter.digest, tuple(sorted(one.left_out))) for key, one in self._adapters.items()
        )
        return changed

    def __len__(self) -> int:
        return len(self._adapters)
