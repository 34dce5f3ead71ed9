"""How much work is let in: the sequences that run and wait, and the tokens that all of them may still take. One caller
has a share of that alone, so that there is room for who comes next. Who waits is let in as the FairQueue says, and who
runs more than its share after all others."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.fair_queue import FairQueue
from outrider.planner.estimates import Departures
from outrider.rpc.errors import InvalidArgument, ResourceExhausted, Violation

MAX_REQUEST_BYTES = 4 << 20  # of one message or body
SLOW_REQUEST_BYTES = 64 << 10  # of one whose fields may take tens of milliseconds: not on the event loop
MOST_STALLS = 5  # of an answer that is held back for its client, in times that this may read nothing
WAYS_OUT = (
    "For more: a token (tokens) or salt (cache_salt) a user, or more caller_share, max_waiting, max_admitted_tokens"
)
_NAMES = {  # of what bounds it
    "sequences": "max_active and max_waiting together",
    "tokens": "max_admitted_tokens",
    "bytes": "of media, a multiple of max_media_bytes",
}


@dataclass(frozen=True, slots=True)
class AdmissionCost:
    """What a request asks for."""

    num_sequences: int = 0  # one for each completion
    num_tokens: int = 0  # of the prompt, and max_tokens of every completion
    caller: str = ""  # whose share it is a part of
    num_bytes: int = 0  # of media, which are kept to the request's end

    def __add__(self, other: AdmissionCost) -> AdmissionCost:
        num_sequences, num_tokens = self.num_sequences + other.num_sequences, self.num_tokens + other.num_tokens
        return AdmissionCost(num_sequences, num_tokens, self.caller or other.caller, self.num_bytes + other.num_bytes)

    def __sub__(self, other: AdmissionCost) -> AdmissionCost:
        return self + AdmissionCost(-other.num_sequences, -other.num_tokens, num_bytes=-other.num_bytes)


class AdmissionGate(Protocol):
    """Where a request waits for its turn."""

    async def enter(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits until the work may run. Raises ResourceExhausted or InvalidArgument where it is refused."""


class Admission:
    """Lets `max_active` sequences of `max_running_tokens()` run and `max_waiting` wait, of at most `max_tokens()` and
    `max_bytes` of media together; one caller has no more than its `share` of what others leave, and while others wait
    none begins beyond its share of what may run. Refuses more at once. A request that is larger than what may run waits
    until it is alone."""

    def __init__(
        self,
        max_active: int,
        max_waiting: int,
        max_tokens: Callable[[], int] = lambda: sys.maxsize,
        max_running_tokens: Callable[[], int] = lambda: sys.maxsize,
        share: float = 1.0,
        max_bytes: int = sys.maxsize,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_active, self._max_tokens, self._max_running_tokens = max_active, max_tokens, max_running_tokens
        self._max_sequences, self._max_bytes = max_active + max_waiting, max_bytes
        self._share, self._clock = share, clock
        self._admitted, self._running = AdmissionCost(), AdmissionCost()  # what runs and waits; what runs
        self._of_callers: dict[str, AdmissionCost] = {}  # what runs and waits, by caller
        self._num_running: Counter[str] = Counter()  # sequences, by caller
        self._queue: FairQueue[tuple[asyncio.Future[None], AdmissionCost]] = FairQueue()
        self._departures = Departures()
        self.on_turn: Callable[[float], None] = lambda waited_s: None

    @property
    def num_active(self) -> int:
        """Sequences that run."""
        return self._running.num_sequences

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return self._admitted.num_sequences - self._running.num_sequences

    @property
    def num_tokens(self) -> int:
        """Tokens of all that run or wait, whatever they have generated so far."""
        return self._admitted.num_tokens

    def require_room(self, work: AdmissionCost) -> None:
        """ResourceExhausted with a time to come back if it cannot be let in now, InvalidArgument if it never can."""
        tokens, held = self._max_tokens(), self._of_callers.get(work.caller, AdmissionCost())
        if work.num_sequences > self._max_sequences:
            allowed = f"{self._max_sequences} sequences (max_active and max_waiting together)"
            raise _too_large("n", f"asks for {work.num_sequences} completions", allowed)
        if work.num_tokens > tokens:
            asked = f"asks for {work.num_tokens} tokens in all, of prompts and max_tokens"
            raise _too_large("sampling.max_tokens", asked, f"{tokens} (max_admitted_tokens)")
        all_of_it, mine = self._admitted + work, held + work
        self._check("sequences", all_of_it.num_sequences, mine.num_sequences, work.num_sequences, self._max_sequences)
        self._check("tokens", all_of_it.num_tokens, mine.num_tokens, work.num_tokens, tokens)
        if work.num_bytes:
            self._check("bytes", all_of_it.num_bytes, mine.num_bytes, work.num_bytes, self._max_bytes)

    async def enter(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits until the work may run; who was let in gives it back by `leave`, in parts or as a whole."""
        self.reserve(work)
        await self.wait_turn(work, priority)

    def reserve(self, work: AdmissionCost) -> None:
        """Admits the work, or raises as `require_room` does; `wait_turn` has to follow."""
        self.require_room(work)
        if not self._of_callers:
            self._departures.since = self._clock()
        self._change(work)

    async def wait_turn(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits until what was reserved may run; a wait that is given up gives it back."""
        began = self._clock()
        if not self._queue.num_waiting and self._fits(work):
            self._run(work)
            self.on_turn(0.0)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._queue.add((turn, work), work.caller, work.num_tokens, priority, began)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            self._queue.remove(ticket)
            if not turn.cancelled():
                self._stop(work)  # it was let in within the same turn of the event loop
            self.give_back(work)
            raise
        self.on_turn(self._clock() - began)

    def foreseen_wait_s(self, work: AdmissionCost, priority: int) -> float:
        """How long the work would wait, as if all that wait and are not less urgent went first, by how fast work has
        left of late; 0 where it may run at once, and while nothing has left."""
        if not self._queue.num_waiting and self._fits(work):
            return 0.0
        wanted = sum((waiting for _, waiting in self._queue.not_behind(priority)), self._running + work)
        num_sequences = max(0, wanted.num_sequences - self._max_active)
        num_tokens = max(0, wanted.num_tokens - self._max_running_tokens())
        return self._departures.seconds_until(num_sequences, num_tokens, self._clock())

    def leave(self, work: AdmissionCost) -> None:
        """Work that ran is done."""
        self._stop(work)
        self.give_back(work)

    def give_back(self, work: AdmissionCost) -> None:
        """Work that was reserved will not run, or has."""
        self._change(AdmissionCost(caller=work.caller) - work)
        self._departures.add(work.num_sequences, work.num_tokens, self._clock())
        self._let_in()

    def _change(self, by: AdmissionCost) -> None:
        self._admitted += by
        mine = self._of_callers.pop(by.caller, AdmissionCost()) + by
        if mine.num_sequences or mine.num_tokens or mine.num_bytes:
            self._of_callers[by.caller] = mine

    def _run(self, work: AdmissionCost) -> None:
        self._running += work
        self._num_running[work.caller] += work.num_sequences
        if not self._num_running[work.caller]:
            del self._num_running[work.caller]

    def _stop(self, work: AdmissionCost) -> None:
        self._run(AdmissionCost(caller=work.caller) - work)

    def _has_enough(self, caller: str) -> bool:
        """Whether one more would be beyond its share of what may run."""
        return bool(num := self._num_running[caller]) and num >= int(self._share * self._max_active)

    def _fits(self, work: AdmissionCost) -> bool:
        running = self._running + work
        within = running.num_sequences <= self._max_active and running.num_tokens <= self._max_running_tokens()
        return within or not self._running.num_sequences

    def _let_in(self) -> None:
        """Lets as many of those that wait in as there is room for."""
        while self._queue.num_waiting and self._running.num_sequences < self._max_active:
            ticket = self._queue.first(self._clock(), self._has_enough)
            turn, work = ticket.item
            if turn.done():  # it has given up, and not come to say so
                self._queue.remove(ticket)
            elif self._fits(work):
                self._queue.let_in(ticket)
                self._run(work)
                turn.set_result(None)
            else:
                self._queue.hold(ticket)
                return

    def _check(self, what: str, wanted: int, mine: int, asked: int, limit: int) -> None:
        """Refuses what goes beyond a bound on sequences, tokens or bytes: with this request there would be `wanted`, of
        its caller `mine`. Who has none yet may have all that is left, others their share of what is not other
        callers'."""
        most = int(self._share * (limit - wanted + mine))
        if wanted > limit:
            reason, missing = f"TOO_MANY_{what.upper()}", wanted - limit
            problem, allowed = f"there would be {wanted}", f"{limit} {what} ({_NAMES[what]})"
        elif mine > max(most, asked):
            reason, missing = "CALLER_SHARE", mine - most
            problem = f"its caller would have {mine}"
            allowed = f"{most} {what}, its share (caller_share) of what others leave. {WAYS_OUT}"
        else:
            return
        waits_for = {"sequences": (missing, 0), "tokens": (0, missing), "bytes": (1, 0)}[what]
        wait_ms = self._departures.wait_ms(*waits_for, self._clock())
        message = f"with this request {problem} {what} running and waiting; allowed: at most {allowed}"
        raise ResourceExhausted(message, reason=reason, retry_after_ms=wait_ms)


def _too_large(field: str, problem: str, allowed: str) -> InvalidArgument:
    return InvalidArgument.of([Violation(field, f"{problem}; allowed: at most {allowed}")])
