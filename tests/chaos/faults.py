"""Faults: at what point of a request which of them befalls which services, chosen from a seed; how each is done,
undone, and shown to have taken place."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import re
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from chaos.fleet import Fleet, Member, memory_bytes
from chaos.proxy import DOWN, UP

SILENCE_S = 2.0  # in which a peer that says nothing is given up

# The messages by which faults are timed, of opening and of a round, by whose proxy they pass.
POINTS: dict[str, tuple[tuple[str, str], ...]] = {
    "target": (
        (UP, "open"),  # the target has not got the sequence
        (DOWN, "first commit"),  # its prompt is computed, and nobody knows
        (UP, "piece"),  # a window is on its way
        (UP, "credit"),
        (DOWN, "commit"),  # a window is verified, and nobody knows
        (UP, "close"),
    ),
    "draft": (
        (UP, "open"),
        (DOWN, "first piece"),
        (DOWN, "piece"),  # what is drafted is on its way
        (UP, "commit"),  # what is committed has not been told
        (UP, "credit"),
        (UP, "close"),
    ),
    "gateway": ((UP, "request"), (DOWN, "tokens")),
}


@dataclass(frozen=True)
class Fault:
    """What befalls whom when: the message passes the first victim's proxy, and all are struck in that moment."""

    number: int
    kinds: tuple[str, ...]  # one for each victim
    victims: tuple[str, ...]
    direction: str
    message: str
    lost: bool  # the message is lost by it, where connections are

    def __str__(self) -> str:
        blows = " and ".join(f"{kind} of {victim}" for kind, victim in zip(self.kinds, self.victims, strict=True))
        way = "on its way to" if self.direction == UP else "on its way from"
        return f"{self.number}: {blows}, at a {self.message} {way} {self.victims[0]}{', lost' if self.lost else ''}"


def schedule(seed: int) -> Iterator[Fault]:
    """Endless. Every kind at every point of every role comes once before any comes again; every second cell has a
    second victim, of any other service and by any kind."""
    dice = random.Random(f"faults {seed}")
    number = 0
    while True:
        cells = [(kind, role, point) for kind in BLOWS for role in POINTS for point in POINTS[role]]
        dice.shuffle(cells)
        for kind, role, (direction, message) in cells:
            others = [f"{other} {each}" for other in POINTS for each in range(2)]
            first = f"{role} {dice.randrange(2)}"
            second = dice.choice([other for other in others if other != first])
            both = number % 2 == 1
            kinds = (kind, dice.choice(list(BLOWS))) if both else (kind,)
            lost = dice.random() < 0.5 and kinds[0] in LOSING
            yield Fault(number, kinds, (first, second) if both else (first,), direction, message, lost)
            number += 1


class Blow(ABC):
    """One kind of fault at one service."""

    lasts_s: ClassVar[float] = 0.0
    noticed_within_s: ClassVar[float | None] = 0.5  # by gateways, where the service is none; None: it need not be
    ends_streams: ClassVar[bool] = True  # of a service's own clients

    def __init__(self, member: Member) -> None:
        self.member = member

    async def strike(self) -> None:
        """Does it; from then on, until the fleet is whole, its clients' streams may end by it."""
        if self.ends_streams:
            self.member.victim_until = math.inf
        await self._strike()

    @abstractmethod
    async def _strike(self) -> None: ...

    @abstractmethod
    async def heal(self) -> bool:
        """Shows whether it took place, and puts all in order again, whether it did or not."""


class Kill(Blow):
    """As by a machine that loses its power."""

    number: ClassVar[int] = signal.SIGKILL
    status: ClassVar[int] = -signal.SIGKILL
    ends_s: ClassVar[float] = 5.0

    async def _strike(self) -> None:
        os.killpg(self.member.pid, self.number)

    async def heal(self) -> bool:
        status = await self.member.ended(self.ends_s)
        if status is not None:
            await self.member.restart()
        return status == self.status


class Restart(Kill):
    """As by a rollout: it drains for its grace period, and comes again."""

    number = signal.SIGTERM
    status = 0
    ends_s = 15.0


class Stop(Blow):
    """A process that stands still: its connections live, and nothing comes."""

    lasts_s = 5.0
    noticed_within_s: ClassVar[float | None] = SILENCE_S
    ends_streams = False

    async def _strike(self) -> None:
        os.killpg(self.member.pid, signal.SIGSTOP)

    async def heal(self) -> bool:
        stood_still = self.member.state() == "T"
        os.killpg(self.member.pid, signal.SIGCONT)
        return stood_still


class Pause(Stop):
    """So short that nobody may take it for the end."""

    lasts_s = 0.7
    noticed_within_s = None


class Reset(Blow):
    """Every connection is cut, once there is one: with few readers a gateway may have none at a moment."""

    connects_s: ClassVar[float] = 2.0

    async def _strike(self) -> None:
        proxies, end = self.member.proxies, time.monotonic() + self.connects_s
        while not any(proxy.num_connections for proxy in proxies) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the proxies go on accepting
        self._before = self.member.count("resets")
        for proxy in proxies:
            proxy.reset()

    async def heal(self) -> bool:
        now = self.member.count("resets")
        return now > getattr(self, "_before", now)


class BlackHole(Blow):
    """Connections live, new ones come about, and nothing passes; in the end they are cut."""

    lasts_s = 5.0
    noticed_within_s: ClassVar[float | None] = SILENCE_S

    async def _strike(self) -> None:
        self._before = self.member.count("swallowed")
        for proxy in self.member.proxies:
            proxy.swallows = True

    async def heal(self) -> bool:
        for proxy in self.member.proxies:
            proxy.heal()
        now = self.member.count("swallowed")
        return now > getattr(self, "_before", now)


class SlowLink(Blow):
    """Whatever passes takes its time."""

    lasts_s = 3.0
    noticed_within_s = None
    ends_streams = False
    delay_s: ClassVar[float] = 0.12

    async def _strike(self) -> None:
        self._before = self.member.count("delayed")
        for proxy in self.member.proxies:
            proxy.delay_s = self.delay_s

    async def heal(self) -> bool:
        for proxy in self.member.proxies:
            proxy.heal()
        now = self.member.count("delayed")
        return now > getattr(self, "_before", now)


class OutOfMemory(Blow):
    """The kernel refuses the process every further page. It may end by that, or live on in what it has: who decodes the
    same things over and over seldom needs more. So the limit is all that has to be shown, and what it did is said
    apart."""

    lasts_s = 4.0
    noticed_within_s = None  # it need not end
    bit = False  # the process ended, or wrote that it was refused memory

    async def _strike(self) -> None:
        self._before = len(self.member.log())
        self._limits = resource.prlimit(self.member.pid, resource.RLIMIT_AS)
        resource.prlimit(self.member.pid, resource.RLIMIT_AS, (memory_bytes(self.member.pid) // 2, self._limits[1]))

    async def heal(self) -> bool:
        if not hasattr(self, "_limits"):
            return False
        if self.member.status is None:
            limit, _ = resource.prlimit(self.member.pid, resource.RLIMIT_AS, self._limits)  # returns what was
            is_below = limit < memory_bytes(self.member.pid)
            if await self.member.ended(1.0) is None:
                self.bit = REFUSED.search(self.member.log()[self._before :]) is not None
                return is_below or self.bit
        self.bit = True
        await self.member.restart()
        return True


BLOWS: dict[str, type[Blow]] = {
    "kill": Kill,
    "stop": Stop,
    "pause": Pause,
    "reset": Reset,
    "black hole": BlackHole,
    "slow link": SlowLink,
    "restart": Restart,
    "out of memory": OutOfMemory,
}
REFUSED = re.compile(r"MemoryError|[Oo]ut of memory|an('t|not) allocate memory|bad_alloc|start new thread")
LOSING = ("kill", "reset")  # a message can be lost with its connection, and no byte of a living one


async def strike(fault: Fault, fleet: Fleet) -> list[Blow]:
    """All of a fault's blows at once."""
    blows = blows_of(fault, fleet)
    await asyncio.gather(*(blow.strike() for blow in blows))
    return blows


def blows_of(fault: Fault, fleet: Fleet) -> list[Blow]:
    """One for each victim."""
    return [BLOWS[kind](fleet.members[name]) for kind, name in zip(fault.kinds, fault.victims, strict=True)]


def first_of(seed: int, count: int) -> list[Fault]:
    """The schedule's beginning."""
    return list(itertools.islice(schedule(seed), count))
