"""The link between a target service and the engine that it drives, with both ends in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.rpc.messages import Close, Commit, Credit, DraftTokens, Load, StepTimings
from outrider.vllm.link import EXTRA, EngineLink, LinkedService, Unframing, framed
from outrider.vllm.rows import DraftedRow
from outrider.vllm.source import LINK, StepReport

CONFIG = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 97))
WAIT_S = 60.0


class Linked:
    """Both ends."""

    def __init__(self, link: EngineLink, engine: LinkedService) -> None:
        self.link, self.engine = link, engine
        self.events: list[Any] = []
        self.has_ended = asyncio.Event()
        self.rows: dict[int, DraftedRow] = {}
        link.on_event, link.on_end = self.events.append, self.has_ended.set

    def open(self, number: int) -> DraftedRow:
        request = SimpleNamespace(
            request_id=f"request-{number}", all_token_ids=[1, 2, 3], num_prompt_tokens=3, max_tokens=40,
            sampling_params=SimpleNamespace(
                extra_args={EXTRA: {"sequence_id": number, "weighs": False, "num_output": 0, "suspect": True}}
            ),
        )  # fmt: skip
        row = self.engine.opened(request)
        assert row is not None
        self.rows[number] = row
        return row

    async def take(self) -> bool:
        """What the service sent, once it is there."""
        await asyncio.to_thread(self.engine.wait, WAIT_S)
        return self.engine.take(self.rows)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.001)


async def new_link(monkeypatch: pytest.MonkeyPatch) -> EngineLink:
    link = EngineLink()
    await link.listen()
    for name, value in link.environment.items():
        monkeypatch.setenv(name, value)
    return link


@pytest.fixture
async def linked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Linked]:
    link = await new_link(monkeypatch)
    engine = await asyncio.to_thread(LinkedService, link.environment[LINK], CONFIG)
    both = Linked(link, engine)
    await both.until(lambda: link._engine is not None)
    yield both
    engine.close()
    link.close()


async def test_commands_and_reports_cross(linked: Linked) -> None:
    row = linked.open(1)
    assert row.is_suspect
    linked.link.send([Credit(1, 9, 4), DraftTokens(1, 0, 3, (11, 12))])
    assert not await linked.take()
    assert (row.until, row.max_window) == (9, 4)
    assert row.cut_window(4).ids == (11, 12)

    report = StepReport(17, 0.002, StepTimings(2000, 3, 1), [Commit(1, 3, (11, 12, 13))], Load(1, 0, 5))
    linked.engine.committed(report)
    await linked.until(lambda: bool(linked.events))
    assert linked.events == [report]


async def test_what_comes_before_its_request_waits_for_it_and_is_news(linked: Linked) -> None:
    linked.link.send([Credit(1, 9, 4)])
    assert await linked.take()
    assert linked.open(1).until == 9

    linked.link.send([Credit(2, 9, 4), Close(2)])
    assert await linked.take()
    assert linked.open(2).until == 0  # it was closed before it came


async def test_a_dropped_chain_is_said_at_once(linked: Linked) -> None:
    linked.open(1)
    linked.link.send([DraftTokens(1, 7, 50, (11,))])
    await linked.take()
    await linked.until(lambda: bool(linked.events))
    assert linked.events == [Commit(1, 3, (), dropped=(7,))]


async def test_the_service_sees_for_how_long_a_step_runs(linked: Linked) -> None:
    assert linked.link.step_started == 0.0
    started = time.monotonic()
    linked.engine.stepping(started)
    assert linked.link.step_started == started
    linked.engine.committed(StepReport(17, 0.002, StepTimings(), [], Load()))
    assert linked.link.step_started == 0.0


async def test_the_service_never_waits_for_an_engine_that_reads_nothing(linked: Linked) -> None:
    row = linked.open(1)
    for until in range(1000):
        linked.link.send([Credit(1, until, 4), *[DraftTokens(1, 0, 3, (11,) * 200)] * 4])
    while row.until < 999:
        await linked.take()


async def test_both_ends_see_the_end(linked: Linked) -> None:
    linked.engine.close()
    await asyncio.wait_for(linked.has_ended.wait(), WAIT_S)
    with pytest.raises(OSError, match="not linked"):
        linked.link.send([Credit(1, 9, 4)])


async def test_without_a_service_the_engine_goes_on_and_its_waits_end_by_the_clock(linked: Linked) -> None:
    linked.link.close()
    await linked.take()
    before = time.monotonic()
    linked.engine.wait(0.01)
    assert time.monotonic() - before >= 0.01
    linked.engine.committed(StepReport(17, 0.002, StepTimings(), [], Load()))
    assert not linked.engine.take(linked.rows)


async def test_what_is_sent_to_a_service_that_is_gone_ends_the_link_and_nothing_else(linked: Linked) -> None:
    linked.link.close()

    def is_found_when_it_is_told() -> bool:
        linked.engine.committed(StepReport(17, 0.002, StepTimings(), [], Load()))
        return linked.engine._has_ended

    await linked.until(is_found_when_it_is_told)


async def test_who_has_no_key_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    link = await new_link(monkeypatch)
    monkeypatch.setenv("OUTRIDER_LINK_KEY", "00" * 32)
    stranger = await asyncio.to_thread(LinkedService, link.environment[LINK], CONFIG)
    events: list[Any] = []
    link.on_event, link.on_end = events.append, lambda: events.append(None)
    stranger.committed(StepReport(17, 0.002, StepTimings(), [], Load()))
    if not stranger._has_ended:  # by what it could not send any more
        await asyncio.to_thread(stranger.wait, WAIT_S)
        stranger.take({})
    assert stranger._has_ended
    assert not events
    with pytest.raises(OSError, match="not linked"):
        link.send([])
    stranger.close()
    link.close()


def test_messages_are_whole_wherever_the_socket_cuts_them() -> None:
    sent: list[list[Any]] = [[Credit(1, 9, 4)], [Close(1), DraftTokens(1, 0, 3, (11,) * 200)], []]
    stream = b"".join(map(framed, sent))
    for size in (1, 3, 7, 1000):
        received = Unframing()
        read = [one for at in range(0, len(stream), size) for one in received.feed(stream[at : at + size])]
        assert read == [one for messages in sent for one in messages]
