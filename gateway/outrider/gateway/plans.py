"""The ways to decode a request that its controller chooses from, and what each asks of the two services."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from outrider.gateway.policy import Policy


class Mode(Enum):
    """How a request is decoded."""

    OFF = "off"
    SEQUENTIAL = "sequential"
    CHAINS = "chains"
    BRANCHES = "branches"


AHEAD = (Mode.CHAINS, Mode.BRANCHES)


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice."""

    mode: Mode
    num_draft_tokens: int
    waits: bool = True  # for a chain where none is at hand; else the target decodes plain tokens until one is

    @property
    def way(self) -> tuple[Mode, bool]:
        """What its measurements hold for, whatever the number of tokens."""
        return self.mode, self.waits

    def policy(self, base: Policy, max_branches: int, deep: bool = False) -> Policy:
        """As credit and patience. Branches of branches reach into a second window, and need room beside the others."""
        branching = self.mode is Mode.BRANCHES
        return replace(
            base,
            num_draft_tokens=self.num_draft_tokens,
            patience_ms=base.patience_ms if self.waits else 0,
            windows_ahead=(self.mode in AHEAD) + (branching and deep),
            max_branches=max_branches * (1 + deep) if branching else 0,
        )


OFF = Plan(Mode.OFF, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request lets the controller choose."""

    base: Policy
    most: int  # tokens drafted a round, at most
    fixed: bool = False  # exactly so many: the request says so
    modes: tuple[Mode, ...] = (Mode.OFF, Mode.SEQUENTIAL, Mode.CHAINS, Mode.BRANCHES)
    max_branches: int = 12
    weighs: bool = False  # rejection with weights: no token of the target's own where the chain goes on
    waits: bool = False  # the target always waits for a chain

    plans: tuple[Plan, ...] = field(init=False)  # everything allowed

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", tuple(self._allowed()))

    def _allowed(self) -> Iterator[Plan]:
        """Under rejection the target must wait: when a chain comes is no business of the law's."""
        if Mode.OFF in self.modes:
            yield OFF
        for mode in self.modes:
            if mode is not Mode.OFF:
                for k in [self.most] if self.fixed else range(1, self.most + 1):
                    yield Plan(mode, k)
                    if mode in AHEAD and not (self.weighs or self.waits):
                        yield Plan(mode, k, waits=False)
