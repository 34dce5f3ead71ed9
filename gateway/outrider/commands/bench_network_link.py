"""Networks by name, and when what enters one comes out.

`5` is 5 ms each way on each link, `0.2v` a share of the time of a verification, `0v` is what stands between the
services and adds no delay, where `0` is loopback alone; `5~2` has up to 2 ms of jitter more or
less, `5!200` stands still for 200 ms every now and then. Order is kept, as TCP keeps it."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from dataclasses import dataclass

NOTATION = re.compile(r"(?P<delay>\d+(?:\.\d+)?)(?P<relative>v?)(?:~(?P<jitter>\d+(?:\.\d+)?))?(?:!(?P<stall>\d+))?")
STALL_EVERY_S = 2.0  # from the end of one stall to the next, on average
CROSSINGS = 4  # a round trip: target to gateway to draft, and back


@dataclass(frozen=True, slots=True)
class Network:
    """What a network does to each link, in milliseconds."""

    name: str
    delay: float  # each way
    relative: bool = False  # the delay is a share of a verification
    jitter_ms: float = 0.0
    stall_ms: float = 0.0

    @classmethod
    def parse(cls, name: str) -> Network:
        """A network by its notation. Raises ValueError."""
        found = NOTATION.fullmatch(name)
        if found is None:
            raise ValueError(f"{name} is no network: give DELAY, DELAYv, DELAY~JITTER or DELAY!STALL, as in 5~2")
        delay, jitter, stall = (float(found[part] or 0) for part in ("delay", "jitter", "stall"))
        return cls(name, delay, bool(found["relative"]), jitter, stall)

    @property
    def steady(self) -> bool:
        """Whether its delay is always the same."""
        return not (self.jitter_ms or self.stall_ms)

    @property
    def is_direct(self) -> bool:
        """Whether nothing stands between the services but loopback."""
        return not (self.delay or self.relative) and self.steady

    def delay_ms(self, verify_ms: float) -> float:
        """Each way."""
        return self.delay * verify_ms if self.relative else self.delay

    def round_trip_ms(self, verify_ms: float) -> float:
        """From a commit to the chain that follows from it, drafting apart."""
        return CROSSINGS * self.delay_ms(verify_ms)


class Stalls:
    """When a link stands still: the same times for the same seed."""

    def __init__(self, stall_s: float, began: float, seed: int) -> None:
        self._stall_s = stall_s
        self._rng = random.Random(seed)
        self._starts = [began + self._gap()]

    def after(self, when: float) -> float:
        """The end of the stall that `when` lies in, else `when`."""
        if not self._stall_s:
            return when
        while self._starts[-1] <= when:
            self._starts.append(self._starts[-1] + self._stall_s + self._gap())
        index = bisect_right(self._starts, when) - 1
        return max(when, self._starts[index] + self._stall_s) if index >= 0 else when

    def _gap(self) -> float:
        return self._rng.expovariate(1 / STALL_EVERY_S)


class Direction:
    """One direction of a link, as of one change of its conditions."""

    def __init__(self, delay_s: float, jitter_s: float, stalls: Stalls, seed: int) -> None:
        self._delay_s, self._jitter_s, self._stalls = delay_s, jitter_s, stalls
        self._rng = random.Random(seed)
        self._last = 0.0

    def due(self, now: float) -> float:
        """When what enters now comes out: never before what entered earlier."""
        late = self._rng.uniform(-self._jitter_s, self._jitter_s) if self._jitter_s else 0.0
        self._last = self._stalls.after(max(self._last, now + max(0.0, self._delay_s + late)))
        return self._last
