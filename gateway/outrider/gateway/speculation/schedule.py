"""How many tokens to draft by the number of running requests, and the drafter that keeps to it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from outrider.gateway.speculation.backends import Drafter, DrafterLink, Lost
from outrider.rpc.messages import Commit, Credit, DraftEvent, DraftInfo, Open


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """`ranges` are (first, k) by rising batch size: from `first` running requests on, k tokens are drafted."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, k: int, disable_by_batch_size: int | None, per_batch_size: Iterable[tuple[int, int, int]] | None
    ) -> BatchSchedule:
        """A schedule from vLLM's two fields: no drafts above a number of requests, and (first, last, k) with both ends
        included, where gaps and the tail carry the k before them."""
        ranges = [(1, k)]
        if per_batch_size is not None:
            ranges = _checked(k, list(per_batch_size))
        if disable_by_batch_size is not None:
            ranges = [entry for entry in ranges if entry[0] <= disable_by_batch_size]
            ranges.append((disable_by_batch_size + 1, 0))
        return cls(tuple(ranges))

    @classmethod
    def parse(cls, text: str, k: int, disable_by_batch_size: int | None) -> BatchSchedule:
        """A schedule from `1-4:8,5-16:4`: batch sizes and k. Empty: k for all. Raises ValueError."""
        entries = []
        for part in text.split(",") if text else ():
            match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?:(\d+)\s*", part)
            if match is None:
                raise ValueError(f"{part!r} is no range of batch sizes with a number of tokens, as in 1-4:8 or 5:0")
            first, last, tokens = match.groups()
            entries.append((int(first), int(last or first), int(tokens)))
        try:
            return cls.of(k, disable_by_batch_size, entries or None)
        except ValueError as error:  # in the words of this form
            raise ValueError(str(error).partition(": ")[2] or "it must start at a batch size of 1") from None

    @property
    def constant(self) -> bool:
        """Whether the batch size does not matter."""
        return len({k for _, k in self.ranges}) == 1

    def num_draft_tokens(self, num_running: int) -> int:
        """The k for a number of running requests; 0 is off."""
        return next((k for first, k in reversed(self.ranges) if first <= num_running), self.ranges[0][1])


def _checked(most: int, entries: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    name, after = "num_speculative_tokens_per_batch_size", 0
    if not entries or entries[0][0] != 1:
        raise ValueError(f"{name}: it must start at a batch size of 1")
    for first, last, k in entries:
        if first <= after or last < first:
            raise ValueError(f"{name}: ({first}, {last}, {k}) overlaps the range before it, or ends before it starts")
        if not 0 <= k <= most:
            raise ValueError(f"{name}: k is {k}; allowed: 0 to num_speculative_tokens ({most})")
        after = last
    return [(first, k) for first, _, k in entries]


class ScheduledDrafter:
    """A Drafter that grants another one only what the schedule allows at the present number of requests. Where that
    is nothing the draft counts as lost: the loop decodes plainly, and asks again later."""

    def __init__(self, inner: Drafter, schedule: BatchSchedule, num_running: Callable[[], int]) -> None:
        self.inner, self._schedule, self._num_running = inner, schedule, num_running

    @property
    def info(self) -> DraftInfo | None:
        """None while nothing may be drafted."""
        return self.inner.info if self.allowed() else None

    @property
    def round_trip_us(self) -> float:
        """The round trip of the drafter that it bounds."""
        return self.inner.round_trip_us

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Starts a sequence, or one that ends at once where nothing may be drafted."""
        link = self.inner.open(request, on_event) if self.allowed() else _Absent()
        return None if link is None else _ScheduledLink(self, link, request, on_event)

    def bound(self, other: Drafter) -> ScheduledDrafter:
        """Another one under the same schedule."""
        return ScheduledDrafter(other, self._schedule, self._num_running)

    def allowed(self) -> int:
        """The k of this moment."""
        return self._schedule.num_draft_tokens(self._num_running())


class _Absent:
    """The link of a sequence that nothing is drafted for."""

    def send(self, *messages: Commit | Credit) -> None:
        """Drops what is sent: nobody hears it."""

    def close(self) -> None:
        """There is nothing to end."""


class _ScheduledLink:
    """Passes commits on and cuts credit: at most k tokens past the committed length where the gateway meant k more."""

    def __init__(
        self,
        drafter: ScheduledDrafter,
        inner: DrafterLink,
        request: Open,
        on_event: Callable[[DraftEvent | Lost], None],
    ) -> None:
        self._drafter, self._inner = drafter, inner
        self._on_event: Callable[[DraftEvent | Lost], None] | None = on_event
        self._committed = len(request.prompt_ids) + len(request.output_ids)
        self._granted: Credit | None = None
        self._passed: Credit | None = None

    def send(self, *messages: Commit | Credit) -> None:
        """Sends what the schedule allows now."""
        k = self._drafter.allowed()
        if k == 0:
            asyncio.get_running_loop().call_soon(self._lose)
            return
        passed: list[Commit | Credit] = []
        for message in messages:
            if isinstance(message, Commit):
                self._committed = max(self._committed, message.position + len(message.ids))
                passed.append(message)
            else:
                self._granted = message
        if (credit := self._cut(k)) is not None:
            self._passed = credit
            passed.append(credit)
        self._inner.send(*passed)

    def close(self) -> None:
        """Ends the link: no event follows."""
        self._on_event = None
        self._inner.close()

    def _cut(self, k: int) -> Credit | None:
        """The credit to pass on; None if the draft has it. It never falls."""
        granted, before = self._granted, self._passed
        if granted is None:
            return None
        less = max(0, granted.max_window - k)
        until = min(granted.until, max(granted.until - less, self._committed + k))
        credit = replace(
            granted, until=max(until, before.until if before else 0), max_window=min(granted.max_window, k)
        )
        return None if credit == before else credit

    def _lose(self) -> None:
        if self._on_event is not None:
            self._on_event(Lost("speculation is off at this number of running requests"))
