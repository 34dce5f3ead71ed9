"""What the sans-I/O core asks for, in order; the driver applies it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.gateway.rounds import Round
from outrider.wire.messages import Arithmetic, Commit, Credit, Failure, Open, Piece, PromptLogprobs


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Open the sequence at a target (again: with the tokens generated so far), then send the messages."""

    request: Open
    messages: tuple[Piece | Credit, ...]
    like: Arithmetic | None = None  # of the target before
    refusal: Failure | None = None  # by the target just asked, which is full: another one is to be asked


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Open the sequence at a draft, then send the messages."""

    request: Open
    messages: tuple[Credit, ...]


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send to the target, in one frame."""

    messages: tuple[Piece | Credit, ...]


@dataclass(frozen=True, slots=True)
class ToDraft:
    """Send to the draft, in one frame."""

    messages: tuple[Commit | Credit, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """Committed tokens for the client."""

    round: Round


@dataclass(frozen=True, slots=True)
class EmitPrompt:
    """Log probabilities of the prompt for the client."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """The draft is not needed any more; `reason` is for the log, empty at the normal end. `may_return` says that
    another attempt makes sense later."""

    reason: str = ""
    may_return: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error."""

    failure: Failure


Effect = OpenTarget | OpenDraft | ToTarget | ToDraft | Emit | EmitPrompt | CloseDraft | Fail
