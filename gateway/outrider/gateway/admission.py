"""How much work is let in: the sequences that run and wait, and the tokens that all of them may still take. Who waits
is let in by priority, the lowest number first, then by arrival."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.rpc.errors import InvalidArgument, ResourceExhausted, Violation

MAX_REQUEST_BYTES = 4 << 20  # of one message or body
RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class AdmissionCost:
    """What a request asks for."""

    num_sequences: int = 0  # one for each completion
    num_tokens: int = 0  # of the prompt, and max_tokens of every completion

    def __add__(self, other: AdmissionCost) -> AdmissionCost:
        return AdmissionCost(self.num_sequences + other.num_sequences, self.num_tokens + other.num_tokens)

    def __sub__(self, other: AdmissionCost) -> AdmissionCost:
        return AdmissionCost(self.num_sequences - other.num_sequences, self.num_tokens - other.num_tokens)


class AdmissionGate(Protocol):
    """Where a request waits for its turn."""

    async def enter(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits until the work may run. Raises ResourceExhausted or InvalidArgument where it is refused."""


class Admission:
    """Lets `max_active` sequences run and `max_waiting` wait, of at most `max_tokens()` tokens together; refuses more
    at once. A request of more sequences than may run waits until it is alone."""

    def __init__(self, max_active: int, max_waiting: int, max_tokens: Callable[[], int] = lambda: sys.maxsize) -> None:
        self._max_active, self._max_tokens = max_active, max_tokens
        self._max_sequences = max_active + max_waiting
        self._admitted = AdmissionCost()  # what runs and waits
        self._num_active = 0
        self._num_arrived = 0
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []  # priority, arrival, sequences

    @property
    def num_active(self) -> int:
        """Sequences that run."""
        return self._num_active

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return self._admitted.num_sequences - self._num_active

    @property
    def num_tokens(self) -> int:
        """Tokens of all that run or wait, whatever they have generated so far."""
        return self._admitted.num_tokens

    def require_room(self, work: AdmissionCost) -> None:
        """ResourceExhausted with a time to come back if it cannot be let in now, InvalidArgument if it never can."""
        wanted, tokens = self._admitted + work, self._max_tokens()
        sequences = "sequences (max_active and max_waiting together)"
        if work.num_sequences > self._max_sequences:
            raise _too_large("n", f"asks for {work.num_sequences} completions", f"{self._max_sequences} {sequences}")
        if work.num_tokens > tokens:
            asked = f"asks for {work.num_tokens} tokens in all, of prompts and max_tokens"
            raise _too_large("sampling.max_tokens", asked, f"{tokens} (max_admitted_tokens)")
        if wanted.num_sequences > self._max_sequences:
            raise _busy(f"{wanted.num_sequences} sequences", f"{self._max_sequences} {sequences}", "SEQUENCES")
        if wanted.num_tokens > tokens:
            raise _busy(f"{wanted.num_tokens} tokens", f"{tokens} tokens (max_admitted_tokens)", "TOKENS")

    async def enter(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits until the work may run; who was let in gives it back by `leave`, in parts or as a whole."""
        self.reserve(work)
        await self.wait_turn(work, priority)

    def reserve(self, work: AdmissionCost) -> None:
        """Admits the work, or raises as `require_room` does; `wait_turn` has to follow."""
        self.require_room(work)
        self._admitted += work

    async def wait_turn(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits until what was reserved may run; a wait that is given up gives it back."""
        self._num_arrived += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, self._num_arrived, work.num_sequences, future))
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self._num_active -= work.num_sequences  # it was let in within the same turn
            elif len(self._waiting) > 2 * sum(not entry[3].done() for entry in self._waiting):
                self._waiting = [entry for entry in self._waiting if not entry[3].done()]
                heapq.heapify(self._waiting)
            self.give_back(work)
            raise

    def leave(self, work: AdmissionCost) -> None:
        """Work that ran is done."""
        self._num_active -= work.num_sequences
        self.give_back(work)

    def give_back(self, work: AdmissionCost) -> None:
        """Work that was reserved will not run."""
        self._admitted -= work
        self._let_in()

    def _let_in(self) -> None:
        """No one overtakes the first: a large request is not starved by small ones."""
        while self._waiting:
            _, _, num_sequences, future = self._waiting[0]
            if not future.done():
                if self._num_active and self._num_active + num_sequences > self._max_active:
                    return
                self._num_active += num_sequences
                future.set_result(None)
            heapq.heappop(self._waiting)


def _too_large(field: str, problem: str, allowed: str) -> InvalidArgument:
    return InvalidArgument.of([Violation(field, f"{problem}; allowed: at most {allowed}")])


def _busy(wanted: str, allowed: str, what: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"with this request there would be {wanted} running and waiting; allowed: at most {allowed}",
        reason=f"TOO_MANY_{what}",
        retry_after_ms=RETRY_AFTER_MS,
    )
