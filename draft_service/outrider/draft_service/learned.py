"""The low-rank weights that draft for some sequences in place of the model alone: they were learned from others of the
same key."""

from __future__ import annotations

from collections import OrderedDict

from outrider.engine.batch import PreparedAdapter
from outrider.rpc.messages import LearnedDraft, LearningKey


class LearnedAdapters:
    """Those in use, by key: the most that there may be, of which the one goes that was wanted longest ago. Belongs to
    the device thread."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._adapters: OrderedDict[LearningKey, PreparedAdapter] = OrderedDict()

    def get(self, key: LearningKey | None) -> PreparedAdapter | None:
        """What drafts for these; None: the model alone."""
        found = None if key is None else self._adapters.get(key)
        if key is not None and found is not None:
            self._adapters.move_to_end(key)
        return found

    def put(self, key: LearningKey, adapter: PreparedAdapter | None) -> set[LearningKey]:
        """Lets one draft, or the model alone. Returns the keys for which another drafts now."""
        changed = {key}
        self._adapters.pop(key, None)
        if adapter is not None:
            self._adapters[key] = adapter
        while len(self._adapters) > self.most:
            changed.add(self._adapters.popitem(last=False)[0])
        return changed

    def rows(self) -> tuple[LearnedDraft, ...]:
        """What is told of them."""
        return tuple(LearnedDraft(*key, adapter.digest) for key, adapter in self._adapters.items())

    def __len__(self) -> int:
        return len(self._adapters)
