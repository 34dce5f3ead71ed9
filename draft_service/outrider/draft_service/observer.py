"""What an engine tells of what it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.draft_service.sequence import DraftSequence, SequenceKey
from outrider.rpc.messages import DraftCommand, DraftEvent, DraftTokens
from outrider.rpc.servicer import Deliver, Detach

DraftEngineCommand = Deliver[DraftCommand, DraftEvent] | Detach


class DraftObserver:
    """Who observes an engine overrides what it wants to know of. All is told on the device's thread."""

    def on_command(self, command: DraftEngineCommand, drafts: Mapping[SequenceKey, DraftSequence]) -> None:
        """A command was applied; `drafts` are the open sequences."""

    def on_start(self, drafts: Iterable[DraftSequence]) -> None:
        """The next tokens of these are about to be drafted."""

    def on_passes(self, num_passes: int, num_lines: int, seconds: float) -> None:
        """So many passes have run, one after the other, each for as many chains and branches."""

    def on_piece(self, draft: DraftSequence, piece: DraftTokens) -> None:
        """A piece leaves."""

    def on_step(self, drafts: Iterable[DraftSequence]) -> None:
        """A step is over; these are the open sequences."""

    def on_release(self, key: SequenceKey) -> None:
        """A sequence is gone."""
