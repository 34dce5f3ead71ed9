"""How far each side of one sequence may go, and who chooses that anew as rounds end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.rounds import Round


@dataclass(frozen=True, slots=True)
class Policy:
    """How far each side may go."""

    num_draft_tokens: int  # k; 0: plain decoding
    patience_ms: int = 500  # how long the target waits for a chain
    windows_ahead: int = 0  # drafted past the verification under way; 0: sequential
    max_branches: int = 0  # that the draft may hold for other outcomes of it
    plain_ahead: int = 16  # plain tokens that the target may commit beyond what the gateway has seen
    max_unread: int = 256  # committed tokens that a slow client may leave unread before credit stops
    max_target_opens: int = 3  # times in a row without a commit, the last one alone in its steps, before it is given up
    reopen_s: float = 15.0  # how long a sequence whose target was lost waits for another

    @property
    def mode(self) -> str:
        """Its name."""
        if not self.num_draft_tokens:
            return "off"
        return ("branches" if self.max_branches else "chains") if self.windows_ahead else "sequential"


class Chooser(Protocol):
    """Chooses the policy anew as rounds end (the controller)."""

    @property
    def policy(self) -> Policy:
        """The present choice."""

    def inputs(self) -> Mapping[str, float]:
        """What the choice rests on, for traces."""

    def on_piece(self, num_ids: int, draft_us: int) -> None:
        """A piece arrived."""

    def on_round(self, closed: Round) -> bool:
        """A round ended; returns whether the choice changed."""
