"""What the loop talks to: a drafter and a verifier, each opening one link per sequence. In process, over gRPC and as
scripted fakes these are the same two protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.rpc.messages import (
    Arithmetic,
    Commit,
    Credit,
    DraftEvent,
    DraftInfo,
    DraftTokens,
    ModelInfo,
    Open,
    TargetEvent,
    TargetInfo,
)


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer is gone: the stream broke, the process died or its device did. Every sequence on it has to be opened
    elsewhere."""

    reason: str
    unheard: bool = False  # silent since the sequence was opened, which it need not have got
    moved: bool = False  # the peer is well: another draft has come, which is to take the sequence at once


class VerifierLink(Protocol):
    """One sequence at a target. Messages carry no sequence id of their own; the link sets it."""

    @property
    def model(self) -> ModelInfo:
        """What the target that has it said of its model."""

    def send(self, *messages: DraftTokens | Credit) -> None:
        """Sends in order, in one frame where they fit; never blocks."""

    def close(self) -> None:
        """Ends the sequence; no event follows."""


class DrafterLink(Protocol):
    """One sequence at a draft."""

    def send(self, *messages: Commit | Credit) -> None:
        """Sends in order, in one frame where they fit; never blocks."""

    def close(self) -> None:
        """Ends the sequence; no event follows."""


class Verifier(Protocol):
    """A target service, or several behind one name."""

    @property
    def info(self) -> TargetInfo:
        """What the target said of itself."""

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> VerifierLink | None:
        """Starts a sequence, at a target of `request.model_digest` alone where that is set; None if none can take one
        now. With `fork_of` a link of the same peer shares its prompt. A target that computes `like` the one before is
        preferred. The targets of the links in `refused_by` are full, and not asked again."""


class Drafter(Protocol):
    """A draft service, or several behind one name."""

    @property
    def info(self) -> DraftInfo | None:
        """What the draft said of itself; None while none is reached."""

    @property
    def round_trip_us(self) -> float:
        """The smoothed round trip to the draft; 0 in process and before the first measurement."""

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Starts a sequence; None if no draft can take one now."""
