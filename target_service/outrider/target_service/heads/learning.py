"""A head learns: what ended sequences teach, and what was learned of that drafts.

Learned weights change neither what the head keeps of a text nor, of a step that has been drafted for, anything: they
are others between two steps. Sequences with an adapter of the target teach nothing, and are drafted for by the head
alone: its features are another model's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import BatchEntry, PreparedAdapter
from outrider.engine.models.base import UnsupportedModel
from outrider.proposers.heads.layer import LayerHead
from outrider.proposers.heads.loading import AnyHead
from outrider.rpc.learning.learned import LearnedAdapters
from outrider.rpc.learning.lessons import Lessons, Teaching
from outrider.rpc.messages import LearningKey
from outrider.target_service.parts import EnginePart
from outrider.target_service.sequence import TargetSequence


class HeadLearning(EnginePart):
    """Of one head beside one target's weights. Belongs to the device thread, but for `load_learned`."""

    def __init__(
        self,
        head: AnyHead,
        digest: str,  # of the head
        target_digest: str,
        salts: Collection[str],  # whose sequences learn of one another
        room: AdapterRoom,
        lessons: Lessons,
    ) -> None:
        """Takes the memory. Raises UnsupportedModel for a head that cannot learn."""
        self._resident = ResidentAdapters(require_learning(head), room)
        self._head, self._digest, self._target_digest, self._salts = head, digest, target_digest, salts
        self.lessons, self.learned = lessons, LearnedAdapters[PreparedAdapter](room.num_slots)
        self._teaching: WeakKeyDictionary[TargetSequence, Teaching] = WeakKeyDictionary()  # of those that are open

    def opened(self, target: TargetSequence) -> None:
        """It may teach, and be drafted for by what others taught."""
        if target.adapter is None:
            teaching = Teaching.of(replace(target.open, model_digest=self._target_digest), self._salts)
            if teaching is not None:
                self._teaching[target] = teaching

    def released(self, target: TargetSequence) -> None:
        """What it teaches waits for who learns."""
        if (teaching := self._teaching.pop(target, None)) is not None:
            lesson = teaching.lesson(target.sequence.tokens, target.prompt_len)
            if lesson is not None:
                self.lessons.add(lesson)

    def adapter_of(self, target: TargetSequence) -> PreparedAdapter | None:
        """What the head drafts for it with; None: alone."""
        return self.learned.get(self._teaching.get(target))

    def slots_for(self, entries: Sequence[BatchEntry]) -> list[int] | None:
        """Where the entries' adapters lie, once they are on the device; None where no entry has one."""
        if all(entry.adapter is None for entry in entries):
            return None
        return self._resident.slots_for([entry.adapter for entry in entries])

    def load_learned(self, folder: Path) -> PreparedAdapter:
        """Reads a folder in PEFT's layout. From any thread. Raises UnsupportedAdapter."""
        loaded = load_adapter(folder, self._head, self._digest, most_rank=self._resident.room.max_rank)
        return self._resident.prepare(loaded)

    def put_learned(self, key: LearningKey, adapter: PreparedAdapter | None, left_out: Collection[str] = ()) -> int:
        """From the next step on drafts for a key's sequences with these, but for callers who are `left_out`; None: the
        head alone does. How many open sequences go on so."""
        changed = self.learned.put(key, adapter, left_out)
        return sum(1 for teaching in self._teaching.values() if teaching.key in changed)

    def stats(self) -> Mapping[str, Any]:
        """What waits for who learns, and how much is in use."""
        return {"lesson_bytes": self.lessons.num_bytes, "num_learned": len(self.learned)}


@dataclass(frozen=True, slots=True)
class HeadTeaching:
    """What stays of that, whatever weights the target has."""

    digest: str  # of the head
    salts: frozenset[str]  # whose sequences learn of one another
    room: AdapterRoom
    lessons: Lessons = field(default_factory=Lessons)

    def beside(self, head: AnyHead, target_digest: str) -> HeadLearning:
        """Of the head beside these weights."""
        return HeadLearning(head, self.digest, target_digest, self.salts, self.room, self.lessons)


def require_learning(head: AnyHead) -> LayerHead:
    """Raises UnsupportedModel for a head that cannot learn."""
    if not isinstance(head, LayerHead) or not head.may_learn:
        raise UnsupportedModel(
            f"learn_from (--learn-from): a {head.name} head does not learn here; allowed: one of a single layer that "
            "drafts a token a pass, as eagle, eagle3 and mtp"
        )
    return head
