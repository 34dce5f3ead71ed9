"""vLLM's engine as the servicer sees it, with neither vLLM nor a link: what its scheduler reports goes to the sinks, to
metrics and to traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import opened
from support.fakes import until
from support.metrics import MODEL, scraped

from outrider.rpc.errors import InvalidArgument
from outrider.rpc.messages import Close, Closed, Commit, Credit, DraftTokens, Failure, Load, Open, StepTimings
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import FinishReason
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.metrics import TargetMetrics
from outrider.target_service.observed import ObservedStep
from outrider.target_service.sequence import TargetLimits
from outrider.vllm.source import StepReport
from outrider.vllm.target import engine as engine_module
from outrider.vllm.target.engine import VllmEngine
from outrider.vllm.target.requests import GRAMMARS, VLLM_CAPABILITIES

STREAM = 1
HEADER = f"00-{'a' * 32}-{'b' * 16}-01"


class FakeLink:
    """Keeps what would go to the scheduler."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.batches: list[int] = []
        self.on_event: Any = None
        self.on_end: Any = None
        self.step_started = 0.0

    def send(self, commands: Sequence[Any]) -> None:
        self.sent += commands
        self.batches.append(len(commands))

    def close(self) -> None:
        pass


class FakeLlm:
    """Takes no request."""

    errored = False


class Harness:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link, self.events = FakeLink(), list[Any]()
        self.steps: list[ObservedStep] = []
        self.metrics = TargetMetrics()
        limits = TargetLimits(97, 512, (2,), num_blocks=8, block_size=16, max_open_tokens=100)
        self.engine = VllmEngine(FakeLlm(), self.link, limits, on_step=self._watch)
        self.metrics.attach(self.engine.stats, self.engine, MODEL)

        async def never(sequence: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(self.engine, "_run", never)

    def _watch(self, step: ObservedStep) -> None:
        self.steps.append(step)
        self.metrics.add_step(step)

    def send(self, *messages: Any) -> None:
        self.engine.submit(Deliver(STREAM, messages, self.events.append))

    def report(self, *events: Any, num_rows: int, num_preempted: int = 0) -> None:
        timings, load = StepTimings(verify_us=2000, num_rows=num_rows, num_sequences=len(events)), Load(1, 0, 5)
        self.link.on_event(StepReport(17, 0.002, timings, events, load, num_preempted, waits=(0.5,)))


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return Harness(monkeypatch)


def traced(number: int, count: int) -> Open:
    request = opened(number, range(10, 10 + count))
    return replace(request, traceparent=HEADER)


async def test_steps_are_counted_and_traced(harness: Harness) -> None:
    harness.send(traced(7, 40), Credit(7, 100, 4))
    harness.report(Commit(1, 40, (11,), num_cached_ids=32), num_rows=8)
    harness.report(Commit(1, 41, (12, 13), num_drafted=3, num_accepted=1, num_cached_ids=32), num_rows=4)

    assert [one.sequence_id for one in harness.events] == [7, 7]  # its own id on its stream
    first, second = harness.steps
    assert list(first.traceparents) == [HEADER]
    assert (first.started_ns, first.seconds) == (17, 0.002)
    assert (second.num_drafted, second.num_accepted, second.num_verify_rows) == (3, 1, 4)
    read = {(name, labels): value for (name, labels), value in scraped(harness.metrics).items()}
    assert read["target_step_rows_total", (("kind", "prompt"),)] == 7
    assert read["target_step_rows_total", (("kind", "verify"),)] == 5
    assert read["target_step_seconds_count", (("rows", "8"),)] == 1
    assert read["target_queue_seconds_sum", ()] == 1.0
    assert read["target_prefix_cache_queries_total", ()] == 40
    assert read["target_prefix_cache_hits_total", ()] == 32
    assert read["target_num_requests_open", ()] == 1
    assert read["target_kv_cache_usage_perc", ()] == 1 - 5 / 8


async def test_no_more_is_let_in_than_there_is_room_for(harness: Harness) -> None:
    """Prompts and max_tokens count, as at our own engine; what began elsewhere was promised its room."""
    harness.send(opened(1, range(3, 23), max_tokens=40), opened(2, range(3, 23), max_tokens=40))
    (refused,) = harness.events
    assert isinstance(refused, Failure) and (refused.sequence_id, refused.reason) == (2, "BUSY")
    assert "120 tokens would be open" in refused.message and "allowed: 100" in refused.message
    assert refused.retry_after_ms > 0
    again = replace(opened(3, range(3, 23), max_tokens=40), output_ids=(7,))
    harness.send(again, replace(again, sequence_id=5, resumed=True))
    resumed = harness.events.pop()
    assert isinstance(resumed, Failure) and (resumed.sequence_id, resumed.reason) == (5, "BUSY")
    assert harness.engine.stats().num_open == 2
    harness.send(Close(1), Close(3), opened(4, range(3, 23), max_tokens=40))  # there is room again
    assert harness.events[1:] == [Closed(1), Closed(3)] and harness.engine.stats().num_open == 1


async def test_the_age_of_a_step_is_the_link_s(harness: Harness) -> None:
    assert harness.engine.step_age_s() == 0.0
    harness.link.step_started = time.monotonic() - 5
    assert 5 <= harness.engine.step_age_s() < 60


async def test_what_one_frame_brought_leaves_together(harness: Harness) -> None:
    harness.send(opened(7, range(5)), Credit(7, 8, 4))
    harness.link.batches.clear()
    harness.send(DraftTokens(7, 0, 5, (1, 2)), Credit(7, 9, 4))
    assert harness.link.batches == [2]


async def test_preemptions_are_counted(harness: Harness) -> None:
    harness.report(num_rows=1, num_preempted=2)
    harness.report(num_rows=1, num_preempted=3)
    assert scraped(harness.metrics)["target_num_preemptions_total", ()] == 3


async def test_messages_go_on_by_the_link_s_numbers(harness: Harness) -> None:
    harness.send(opened(7, range(5)), Credit(7, 8, 4), DraftTokens(7, 0, 5, (1, 2)), Close(7))
    assert harness.link.sent == [Credit(1, 8, 4), DraftTokens(1, 0, 5, (1, 2)), Close(1)]
    assert harness.events == [Closed(7)]


async def test_a_commit_without_ids_names_what_was_dropped(harness: Harness) -> None:
    harness.send(opened(7, range(5)), Credit(7, 8, 4))
    harness.link.on_event(Commit(1, 5, (), dropped=(3,)))
    (commit,) = harness.events
    assert (commit.sequence_id, commit.dropped, commit.ids) == (7, (3,), ())
    assert not harness.steps


async def test_what_fails_in_the_scheduler_ends_its_sequence_alone(harness: Harness) -> None:
    harness.send(opened(7, range(5)), Credit(7, 8, 4), opened(8, range(5)), Credit(8, 8, 4))
    harness.report(Failure(1, 13, "a commit failed", "COMMIT_FAILED"), Commit(2, 5, (11,)), num_rows=2)
    assert [type(one) for one in harness.events] == [Failure, Commit]
    assert [one.sequence_id for one in harness.events] == [7, 8]
    assert harness.engine.stats().num_open == 1


async def test_a_commit_that_cannot_be_handed_on_ends_its_sequence_alone(harness: Harness) -> None:
    """An exception would end the link, and with it the service."""

    def refuse_commits(event: Any) -> None:
        if isinstance(event, Commit):
            raise RuntimeError("of the sink")
        harness.events.append(event)

    harness.engine.submit(Deliver(STREAM, (opened(7, range(5)), Credit(7, 8, 4)), refuse_commits))
    harness.send(opened(8, range(5)), Credit(8, 8, 4))
    harness.report(Commit(1, 5, (11,)), Commit(2, 5, (11,)), num_rows=2)
    failure, commit = harness.events
    assert (failure.sequence_id, failure.reason) == (7, "COMMIT_FAILED")
    assert isinstance(commit, Commit) and commit.sequence_id == 8
    assert harness.engine.is_alive and Close(1) in harness.link.sent


async def test_where_the_scheduler_is_gone_the_gateways_open_elsewhere(harness: Harness) -> None:
    harness.send(opened(7, range(5)), Credit(7, 8, 4))
    harness.link.on_end()
    assert [one.reason for one in harness.events] == ["DEVICE_DEAD"]
    assert not harness.engine.is_alive
    with pytest.raises(RuntimeError, match="has ended"):
        harness.send(Close(7))
    assert isinstance(harness.engine.ended.exception(), RuntimeError)


class Asked:
    """A sequence whose request is asked for while another one comes."""

    def __init__(self, sequences: dict[Any, Any]) -> None:
        self._sequences = sequences

    @property
    def request(self) -> None:
        self._sequences[STREAM, len(self._sequences)] = self


async def test_the_load_is_read_while_sequences_come(harness: Harness) -> None:
    """By the thread that answers a scrape."""
    sequences: dict[Any, Any] = harness.engine._sequences
    for number in range(2):
        sequences[STREAM, number] = Asked(sequences)
    assert harness.engine.load() == Load(free_blocks=8)
    assert len(sequences) == 4


class EndingLlm(FakeLlm):
    """Every request ends at once."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason="length")])


async def test_a_request_whose_last_commit_does_not_come_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the scheduler could make no row of it: nobody waits for ever."""
    monkeypatch.setattr(engine_module, "sampling_of", lambda *args: None)
    monkeypatch.setattr(engine_module, "LAST_COMMIT_S", 0.05)
    link, events = FakeLink(), list[Any]()
    engine = VllmEngine(EndingLlm(), link, TargetLimits(97, 512, (2,), num_blocks=8, block_size=16))
    for number in (7, 8):
        engine.submit(Deliver(STREAM, (opened(number, range(5)), Credit(number, 9, 4)), events.append))
    last = Commit(2, 5, (11,), finish_reason=FinishReason.LENGTH)
    link.on_event(StepReport(17, 0.002, StepTimings(), [last], Load()))

    await until(lambda: len(events) == 2)

    await asyncio.sleep(0.1)
    commit, failure = events
    assert isinstance(commit, Commit) and commit.sequence_id == 8
    assert (failure.sequence_id, failure.reason) == (7, "COMMIT_LOST")
    assert not engine.stats().num_open


class RefusingLlm(FakeLlm):
    """Says why it does not take a request."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise ValueError("it has no end")
        yield


@pytest.mark.parametrize("constraint", [None, StructuredOutput(regex="a*")])
async def test_of_what_vllm_refuses_a_grammar_is_named(
    constraint: StructuredOutput | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 refuses a grammar that fails to compile, where 0.32 ends the request."""
    monkeypatch.setattr(engine_module, "sampling_of", lambda *args: None)
    monkeypatch.setattr(engine_module, "refusals", lambda: (ValueError,))  # no vLLM has to be there
    events: list[Any] = []
    limits = TargetLimits(97, 512, (2,), num_blocks=8, block_size=16)
    engine = VllmEngine(RefusingLlm(), FakeLink(), limits, capabilities=(*VLLM_CAPABILITIES, GRAMMARS))
    asked = opened(7, range(5), structured_output=constraint)
    engine.submit(Deliver(STREAM, (asked, Credit(7, 9, 4)), events.append))

    await until(lambda: bool(events))

    (refused,) = events
    assert (refused.sequence_id, refused.code) == (7, InvalidArgument.code.value[0])
    assert "it has no end" in refused.message
    assert ("sampling.structured_output" in refused.message) == (constraint is not None)
    assert not engine.stats().num_open
