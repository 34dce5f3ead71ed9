"""When a call that failed is made again, where, and after how long. No I/O."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.wire.checks import Violations
from outrider.wire.errors import OTHER_MODEL, InvalidArgument, OutriderError, ResourceExhausted, Unavailable, Violation

_LEAST_TIMEOUT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call is made again. Waits double, less up to a half of each by chance."""

    attempts: int = 6  # at each address, in a row without a token
    first_wait_s: float = 0.1
    most_wait_s: float = 2.0


NO_RETRY = Retry(attempts=1)


def may_repeat(error: OutriderError) -> bool:
    """Whether another try can help, and does no harm: the gateway is gone, drains or has no target, or it refused the
    call before anything ran and said when to come back."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_ms > 0
    return isinstance(error, Unavailable) or error.reason == OTHER_MODEL


def addresses_of(address: str | Sequence[str]) -> tuple[str, ...]:
    """One address or several, of which at least one is needed."""
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if not addresses:
        raise InvalidArgument.of([Violation("address", "has no entries; allowed: at least one")])
    return addresses


def check_timeout(timeout: object) -> None:
    """A time that may be waited for. InvalidArgument names it."""
    found = Violations()
    found.number("timeout", timeout, _LEAST_TIMEOUT_S, math.inf, say="seconds, above 0; or None")
    found.raise_if_any()


@dataclass(slots=True)
class Route:
    """The way of one request over the addresses: another address at once, one that failed before after a wait."""

    retry: Retry
    num_addresses: int
    index: int  # of the address in use
    timeout: float | None  # for all tries together
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    _deadline: float = field(init=False)
    _num_failures: int = 0  # in a row

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_timeout(self.timeout)
        self._deadline = math.inf if self.timeout is None else self.clock() + self.timeout

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline."""
        return None if self.timeout is None else max(0.0, self._deadline - self.clock())

    def progressed(self) -> None:
        """Tokens came: what failed before does not count any more."""
        self._num_failures = 0

    def failed(self, error: OutriderError) -> float:
        """Turns to the next address and says after how long to ask it. Raises the error if there is to be no other
        try."""
        self._num_failures += 1
        if not may_repeat(error) or self._num_failures >= self.retry.attempts * self.num_addresses:
            raise error
        wait = self._wait(error)
        if self.clock() + wait >= self._deadline:
            raise error
        self.index = (self.index + 1) % self.num_addresses
        return wait

    def _wait(self, error: OutriderError) -> float:
        whole_rounds, rest = divmod(self._num_failures, self.num_addresses)
        if rest:
            return 0.0  # the next one has not failed in this round
        wait = min(self.retry.most_wait_s, self.retry.first_wait_s * 2.0 ** (whole_rounds - 1))
        return max(wait * (1 - self.chance() / 2), error.retry_after_ms / 1000)
