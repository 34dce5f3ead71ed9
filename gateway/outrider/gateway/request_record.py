"""What a request has come to, and who observes it. A record is made for each request, and kept from its deltas as they
are made; metrics, traces, the log, answers over HTTP and `LLM` read it, so that a first token is one moment to all."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from outrider.gateway.prepare import Prepared
from outrider.rpc.messages import DraftTokens
from outrider.rpc.token_times import TokenTimes
from outrider.rpc.words.answer import GenerationDelta, SpeculationStats
from outrider.rpc.words.request import GenerationRequest


@dataclass(slots=True)
class RequestRecord:
    """One request so far. Times are seconds on the monotonic clock, of commits: how fast the caller takes them is not
    the service's time. 0: not yet, or nobody knows it here."""

    request: GenerationRequest
    arrived: float = field(default_factory=time.monotonic)
    prepared: Prepared | None = None  # once it may run
    started: float = 0.0  # when it could run: checked, and let in
    scheduled: float = 0.0  # at the target, whose queue it has left
    first_token: float = 0.0
    last_token: float = 0.0
    unreachable: tuple[str, ...] = ()  # goals that were foreseen to be missed
    traceparent: str = ""  # of its own span, where it is traced
    delivered: bool = False  # anything at all
    num_tokens: int = 0
    num_reasoning: int = 0
    num_cached: int | None = None  # tokens of the prompt; None: no completion has ended
    completions: dict[int, TokenTimes] = field(default_factory=dict)  # by index
    finish_reasons: list[str] = field(default_factory=list)
    tally: SpeculationStats = field(default_factory=SpeculationStats)  # of the completions that have ended

    def add(self, delta: GenerationDelta) -> None:
        """Notes what one commit gave to one completion."""
        self.delivered = True
        closed, num_tokens = delta.round, len(delta.token_ids)
        if closed is not None and not self.scheduled:
            self.scheduled = min(closed.ended, closed.started + closed.commit.timings.queue_us * 1e-6)
        if closed is not None or num_tokens:
            self._add_tokens(delta, num_tokens)
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason.name.lower())
        if delta.usage is not None:
            cached = delta.usage.cached_tokens  # the least is the completion's that computed what was not there
            self.num_cached = cached if self.num_cached is None else min(self.num_cached, cached)
        if delta.speculation is not None:
            add_stats(self.tally, delta.speculation)

    def restart(self) -> None:
        """All that came is dropped, before anybody saw it and before any completion ended."""
        self.first_token = self.last_token = 0.0
        self.num_tokens = self.num_reasoning = 0
        self.completions.clear()

    def _add_tokens(self, delta: GenerationDelta, num_tokens: int) -> None:
        times, closed = self.times_of(delta.index), delta.round
        if closed is None:
            at = time.monotonic()
            times.add(at, num_tokens)
        else:
            at = closed.ended
            times.add(at, num_tokens, closed.total_us * 1e-6)
        if num_tokens:
            self.first_token, self.last_token = self.first_token or at, at
            self.num_tokens += num_tokens
            self.num_reasoning += delta.num_reasoning

    def times_of(self, index: int) -> TokenTimes:
        """When the tokens of one completion came."""
        times = self.completions.get(index)
        if times is None:
            times = self.completions[index] = TokenTimes()
        return times


def add_stats(total: SpeculationStats, more: SpeculationStats) -> None:
    """Adds what became of one completion's drafts to that of others."""
    total.num_rounds += more.num_rounds
    total.num_drafts += more.num_drafts
    total.num_draft_tokens += more.num_draft_tokens
    total.num_accepted_tokens += more.num_accepted_tokens
    total.num_forced_tokens += more.num_forced_tokens
    pairs = itertools.zip_longest(total.num_accepted_per_position, more.num_accepted_per_position, fillvalue=0)
    total.num_accepted_per_position = tuple(before + added for before, added in pairs)


class RequestObserver:
    """Who observes requests overrides what it wants to know of. One may observe a single request or any number: what is
    kept of each stands in its record."""

    def began(self, record: RequestRecord) -> None:
        """A request may run: `record.prepared` is there."""

    def drafted(self, record: RequestRecord, completion: int, piece: DraftTokens) -> None:
        """Drafted tokens have come for a completion; nothing is judged yet."""

    def add(self, record: RequestRecord, delta: GenerationDelta) -> None:
        """A completion has got a delta, which is in the record already."""

    def restarted(self, record: RequestRecord) -> None:
        """It begins anew: nobody saw what came of it."""

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """It is over: well, by an error, or since its caller went away. One that never began was refused."""


class Watch:
    """A record and those who observe it, in their order. It is a context: its end is the request's."""

    def __init__(self, record: RequestRecord, observers: Sequence[RequestObserver]) -> None:
        self.record, self._observers = record, observers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for observer in self._observers:
            observer.ended(self.record, error)

    def began(self, prepared: Prepared) -> None:
        """The request may run."""
        self.record.prepared, self.record.started = prepared, time.monotonic()
        for observer in self._observers:
            observer.began(self.record)

    def drafted(self, completion: int, piece: DraftTokens) -> None:
        """Drafted tokens have come for a completion."""
        for observer in self._observers:
            observer.drafted(self.record, completion, piece)

    def add(self, delta: GenerationDelta) -> None:
        """A completion has got a delta."""
        self.record.add(delta)
        for observer in self._observers:
            observer.add(self.record, delta)

    @property
    def may_restart(self) -> bool:
        """Whether nobody has seen anything of the answer, and none of its completions has ended."""
        request, has_ended = self.record.request, bool(self.record.finish_reasons)
        return request.whole and not request.output_ids and not has_ended

    def restart(self) -> None:
        """The request begins anew."""
        self.record.restart()
        for observer in self._observers:
            observer.restarted(self.record)
