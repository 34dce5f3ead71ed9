"""The low-rank weights that draft for some sequences in place of the model alone: they were learned from others of the
same key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.engine.batch import PreparedAdapter
from outrider.rpc.messages import LearnedDraft, LearningKey

if TYPE_CHECKING:
    from outrider.draft_service.lessons import Teaching


@dataclass(frozen=True, slots=True)
class LearnedAdapter:
    """Weights, and the callers for whom the model alone drafts all the same."""

    adapter: PreparedAdapter
    left_out: frozenset[str] = frozenset()


class LearnedAdapters:
    """Those in use, by key: the most that there may be, of which the one goes that was wanted longest ago. Belongs to
    the device thread."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._adapters: OrderedDict[LearningKey, LearnedAdapter] = OrderedDict()

    def get(self, teaching: Teaching | None) -> PreparedAdapter | None:
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

    def put(
        self, key: LearningKey, adapter: PreparedAdapter | None, left_out: Collection[str] = ()
    ) -> set[LearningKey]:
        """Lets one draft, but for callers who are left out, or the model alone. Returns the keys for which another
        drafts now."""
        changed = {key}
        self._adapters.pop(key, None)
        if adapter is not None:
            self._adapters[key] = LearnedAdapter(adapter, frozenset(left_out))
        while len(self._adapters) > self.most:
            changed.add(self._adapters.popitem(last=False)[0])
        return changed

    def rows(self) -> tuple[LearnedDraft, ...]:
        """What is told of them."""
        return tuple(
            LearnedDraft(*key, one.adapter.digest, tuple(sorted(one.left_out))) for key, one in self._adapters.items()
        )

    def __len__(self) -> int:
        return len(self._adapters)
