"""The low-rank weights of a draft's model that were learned: how they are read, and put in use."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.batch import PreparedAdapter
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import LearningKey

if TYPE_CHECKING:
    from outrider.draft_service.engine import DraftEngine
    from outrider.rpc.learning.learned import LearnedAdapters


@dataclass(frozen=True, slots=True, eq=False)
class ModelsLearned:
    """Those of an engine's present model."""

    engine: DraftEngine
    model_digest: Callable[[], str]

    @property
    def learned(self) -> LearnedAdapters[PreparedAdapter]:
        """Those in use."""
        return self.engine.model.learned

    def load_learned(self, folder: Path) -> PreparedAdapter:
        """Reads a folder in PEFT's layout. Raises FailedPrecondition, and UnsupportedAdapter."""
        runner = self.engine.model.proposer.runner
        if runner.adapters is None:
            raise FailedPrecondition("path: this draft's model has no room for learned weights", reason="NO_ROOM")
        most_rank = runner.adapters.room.max_rank
        return runner.adapters.prepare(load_adapter(folder, runner.model, self.model_digest(), most_rank=most_rank))

    def put_learned(self, key: LearningKey, adapter: PreparedAdapter | None, left_out: Collection[str] = ()) -> int:
        """Between two steps, on the device thread; how many open sequences go on so."""
        return self.engine.put_learned(key, adapter, left_out)
