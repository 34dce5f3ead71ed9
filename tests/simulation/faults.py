"""What goes wrong, and when. Times and kinds are drawn before the world starts: no fault can depend on a token, so
that even the law of rejection sampling must hold under them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from simulation.clock import Clock
from simulation.hosts import DraftHost, EngineHost, TargetHost
from simulation.network import Peer


@dataclass(frozen=True, slots=True)
class Climate:
    """How often things go wrong, while they do."""

    every_s: float  # mean time between two faults; 0: none
    until: float  # no fault after it, so that everything can end
    steps_fail: bool = False  # device errors end requests


class Faults:
    """Brings faults over both services."""

    def __init__(
        self, clock: Clock, dice: random.Random, climate: Climate, targets: tuple[TargetHost, Peer],
        drafts: tuple[DraftHost, Peer],
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self._clock, self._dice = clock, dice
        kinds: list[tuple[str, Callable[[], None]]] = []
        for name, (host, peer) in (("target", targets), ("draft", drafts)):
            kinds += [
                (f"{name} stream broken", lambda peer=peer: peer.break_stream()),
                (f"{name} crashed", lambda host=host, peer=peer: self._crash(host, peer)),
                (f"{name} stalled", lambda host=host: host.stall(dice.uniform(0, 0.05))),
            ]
            if climate.steps_fail:
                kinds.append((f"{name} step failed", lambda host=host: self._fail_step(host)))
        when = dice.expovariate(1 / climate.every_s) if climate.every_s else climate.until
        while when < climate.until:
            name, bring = dice.choice(kinds)
            clock.at(when, lambda name=name, bring=bring: self._happen(name, bring))
            when += dice.expovariate(1 / climate.every_s)

    def _happen(self, name: str, bring: Callable[[], None]) -> None:
        self.counts[name] += 1
        bring()

    def _crash(self, host: EngineHost, peer: Peer) -> None:
        if host.up:
            host.crash(self._dice.uniform(0, 0.05))
            peer.break_stream(host_is_down=True)

    @staticmethod
    def _fail_step(host: EngineHost) -> None:
        host.runner.fails_next = True
