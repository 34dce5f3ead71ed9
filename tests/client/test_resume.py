"""A stream that breaks goes on from the tokens received, at the same gateway or another one: what the caller gets is
what one whole stream would have brought. Both clients, over gRPC on the loopback.

When a call is made again, where and after how long: the rules alone, on a clock of their own."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from support.fakes import ToyTarget, expected, target_info, until
from support.gateways import AT_THE_END, KINDS, PROMPT, Kind, ask, ids_of, serving, text_of_parts

from outrider.client import NO_RETRY, Client, Retry, SyncClient
from outrider.client import client as client_module
from outrider.client.request import build_request
from outrider.client.resume import Resumption, Route, may_repeat
from outrider.client.types import Part
from outrider.rpc import retry_budget
from outrider.rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutriderError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from outrider.rpc.retry_budget import RetryBudget
from outrider.rpc.words.sampling_params import FinishReason
from outrider.v1 import generation_pb2 as pb

both = pytest.mark.parametrize("kind", KINDS)


@both
async def test_it_goes_on_as_if_unbroken(kind: Kind) -> None:
    """Text, ids, log probabilities, seed and usage of a text prompt, over four streams."""
    options: dict[str, Any] = {"prompt": "the quick", "max_tokens": 30, "logprobs": 0, "prompt_logprobs": 0}
    async with serving() as whole, serving(1, 0, 3) as broken:
        wanted, parts = await ask(kind, whole, **options), await ask(kind, broken, **options)
    assert len(broken.requests) == 4 and len(whole.requests) == 1
    assert ids_of(parts) == ids_of(wanted) and len(ids_of(parts)) == 30
    assert text_of_parts(parts) == text_of_parts(wanted) and text_of_parts(parts)
    for name in ("logprobs", "prompt_logprobs", "prompt_token_ids", "origins"):
        lengths = [sum(len(getattr(part, name)) for part in answer) for answer in (parts, wanted)]
        assert lengths[0] == lengths[1] > 0, name
    assert [part.seed is not None for part in parts].count(True) == 1
    assert [part.finish_reason for part in parts if part.finish_reason] == [FinishReason.LENGTH]
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 30
    assert len({part.request_id for part in parts}) == 1


@both
async def test_what_the_next_stream_asks_for(kind: Kind) -> None:
    """The same seed, request and prompt by its ids, and what has arrived."""
    async with serving(2) as first, serving() as second:
        parts = await ask(kind, first, second, prompt="the quick", max_tokens=20)
    (again,) = second.requests
    assert len(first.requests) == 1
    arrived = [*parts[0].token_ids, *parts[1].token_ids]
    assert list(again.output_ids[0].ids) == arrived and 0 < len(arrived) < 20
    assert again.sampling.seed == parts[0].seed and again.request_id == parts[0].request_id
    assert tuple(again.token_ids.ids) == parts[0].prompt_token_ids and not again.text
    assert again.sampling.max_tokens == 20 and again.model_digest == "d1"
    assert [part.model_digest for part in parts if part.model_digest] == ["d1"]


@both
async def test_nothing_is_remembered_of_a_stream_that_brought_nothing(kind: Kind) -> None:
    async with serving(0) as first, serving() as second:
        parts = await ask(kind, first, second, token_ids=PROMPT, max_tokens=5)
    assert second.requests == first.requests and not second.requests[0].output_ids
    assert ids_of(parts) == expected(PROMPT, 5)


@both
async def test_several_completions(kind: Kind) -> None:
    """Those that have ended are not returned again."""
    async with serving(5, 7) as gateway:
        parts = await ask(kind, gateway, token_ids=PROMPT, n=3, max_tokens=12)
    assert len(gateway.requests) == 3
    assert all(ids_of(parts, index) == expected(PROMPT, 12) for index in range(3))
    assert sorted(part.index for part in parts if part.finish_reason) == [0, 1, 2]
    assert all(part.usage.completion_tokens == 12 for part in parts if part.usage)


@both
async def test_what_the_caller_had_before_counts(kind: Kind) -> None:
    """A caller resumes by itself, and that stream breaks, too."""
    wanted = expected(PROMPT, 20)
    async with serving(2) as first, serving() as second:
        parts = await ask(kind, first, second, token_ids=PROMPT, max_tokens=20, output_ids=[wanted[:6]])
    assert wanted[:6] + ids_of(parts) == wanted
    assert len(second.requests[0].output_ids[0].ids) > 6
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 14


@both
async def test_a_stop_string_over_the_break(kind: Kind) -> None:
    """The text before the break and after it together hold the stop."""
    async with serving() as whole:
        text = text_of_parts(await ask(kind, whole, prompt="the quick", max_tokens=30))
        stop = text[8:14]
        wanted = await ask(kind, whole, prompt="the quick", max_tokens=30, stop=stop)
    async with serving(1, 1, 1, 1, 1, 1) as broken:
        parts = await ask(kind, broken, prompt="the quick", max_tokens=30, stop=stop)
    assert text_of_parts(parts) == text_of_parts(wanted) == text[: text.index(stop)]
    assert parts[-1].stop_reason == stop and parts[-1].finish_reason is FinishReason.STOP
    assert ids_of(parts) == ids_of(wanted) and len(broken.requests) > 2


@both
async def test_a_break_after_the_end_is_none(kind: Kind) -> None:
    async with serving(AT_THE_END, error=Internal("late")) as gateway:
        parts = await ask(kind, gateway, token_ids=PROMPT, max_tokens=9)
        assert ids_of(parts) == expected(PROMPT, 9) and len(gateway.requests) == 1


@both
async def test_another_model_does_not_go_on(kind: Kind) -> None:
    """It is left out, and its error told where nobody else is there."""
    other = ToyTarget(info=target_info(digest="another"))
    async with serving(2) as first, serving(target=other) as second:
        parts = await ask(kind, first, second, token_ids=PROMPT, max_tokens=20)
        assert ids_of(parts) == expected(PROMPT, 20)
        assert len(first.requests) == 2 and len(second.requests) == 1
    async with serving(2, *[0] * 99) as first, serving(target=other) as second:
        with pytest.raises(FailedPrecondition, match="another model"):
            await ask(kind, first, second, token_ids=PROMPT, max_tokens=20, retry=Retry(2, 0.001, 0.001))
    async with serving(target=other) as gateway:  # a caller resumes by itself
        with pytest.raises(FailedPrecondition, match=r"model_digest: is d1, .*allowed: another") as caught:
            await ask(kind, gateway, token_ids=PROMPT, output_ids=[[1]], model_digest="d1")
        assert caught.value.reason == "OTHER_MODEL"


@both
@pytest.mark.parametrize("error", [Internal("x"), InvalidArgument("x"), DeadlineExceeded("x"), ResourceExhausted("x")])
async def test_what_no_repetition_mends_is_raised(kind: Kind, error: OutriderError) -> None:
    async with serving(1, error=error) as gateway:
        with pytest.raises(type(error)):
            await ask(kind, gateway, token_ids=PROMPT, max_tokens=20)
        assert len(gateway.requests) == 1


@both
async def test_no_room_is_asked_again_when_told_so(kind: Kind) -> None:
    async with serving(0, error=ResourceExhausted("full", retry_after_ms=80)) as gateway:
        began = asyncio.get_running_loop().time()
        assert ids_of(await ask(kind, gateway, token_ids=PROMPT, max_tokens=5)) == expected(PROMPT, 5)
        assert asyncio.get_running_loop().time() - began > 0.08 and len(gateway.requests) == 2


@both
async def test_tries_and_time_are_bounded(kind: Kind) -> None:
    async with serving(*[0] * 99) as gateway:
        with pytest.raises(Unavailable):
            await ask(kind, gateway, token_ids=PROMPT, retry=Retry(3, 0.001, 0.001))
        assert len(gateway.requests) == 3
        with pytest.raises(Unavailable):
            await ask(kind, gateway, token_ids=PROMPT, retry=NO_RETRY)
        assert len(gateway.requests) == 4
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):  # the next try would be after the deadline
            await ask(kind, gateway, token_ids=PROMPT, retry=Retry(99, 200.0, 200.0), timeout=50.0)
        assert len(gateway.requests) == 5 and asyncio.get_running_loop().time() - began < 50.0


@both
async def test_progress_gives_new_tries(kind: Kind) -> None:
    """Breaks with tokens between them do not add up to those that end the tries."""
    async with serving(*[1] * 5) as gateway:
        parts = await ask(kind, gateway, token_ids=PROMPT, max_tokens=40, retry=Retry(2, 0.001, 0.001))
    assert ids_of(parts) == expected(PROMPT, 40) and len(gateway.requests) == 6


@both
async def test_a_clients_requests_share_their_tries(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails for all is not asked for by each so many times; a stream that broke takes nothing of it."""
    monkeypatch.setattr(client_module, "MOST_RETRIES", 2)
    monkeypatch.setattr(retry_budget, "REFILL_S", 1e9)
    async with serving(*[0] * 99) as gateway:
        with pytest.raises(Unavailable):  # the next try would be after the deadline
            await ask(kind, gateway, token_ids=PROMPT, retry=Retry(99, 0.001, 0.001), timeout=50.0)
        assert len(gateway.requests) == 3
    async with serving(*[1] * 5) as gateway:
        parts = await ask(kind, gateway, token_ids=PROMPT, max_tokens=40, retry=Retry(2, 0.001, 0.001), timeout=50.0)
        assert ids_of(parts) == expected(PROMPT, 40)


def test_what_is_not_tried_again_takes_no_try() -> None:
    """Those whose time is over leave no debt behind, that others had to wait for after an outage."""
    budget = RetryBudget(2)
    for timeout in (50.0, 50.0, 0.5, 0.5, 0.5):
        pace = partial(budget.reserve, 0, 0.0)
        route = Route(Retry(99, 0.001, 0.001), 1, 0, timeout, lambda: 0.0, lambda: 0.0, pace)
        with suppress(Unavailable):
            route.failed(Unavailable("gone"))
    each = retry_budget.REFILL_S / 2
    assert budget.reserve(0, 0.0, 50.0) == each, "two were taken, and no more"


@both
async def test_a_gateway_that_is_not_there(kind: Kind) -> None:
    async with serving() as gone:
        pass
    async with serving() as here:
        parts = await ask(kind, gone, here, token_ids=PROMPT, max_tokens=5, retry=Retry(2, 0.01, 0.01))
    assert ids_of(parts) == expected(PROMPT, 5)


@both
async def test_a_server_that_stops_in_mid_stream(kind: Kind) -> None:
    """As after SIGTERM, when the grace is over."""
    slow = ToyTarget(step_s=0.02)
    async with serving() as second:
        async with serving(target=slow) as first:
            task = asyncio.create_task(ask(kind, first, second, token_ids=PROMPT, max_tokens=200))
            await until(lambda: slow.links and len(slow.links[0].sequence.tokens) > 60)
        parts = await task
    assert ids_of(parts) == expected(PROMPT, 200) and len(second.requests) == 1
    assert len(second.requests[0].output_ids[0].ids) >= 7


async def test_info_is_of_the_first_that_answers() -> None:
    async with serving() as gone:
        pass
    async with serving(model_name="mine") as here:
        async with Client([gone.address, here.address]) as client:
            assert (await client.info(5)).target.name == "mine"
        with SyncClient([gone.address, here.address]) as sync_client:
            info = await asyncio.to_thread(sync_client.info, 5)
            assert info.target.name == "mine"


async def test_leaving_ends_the_waits() -> None:
    """A caller that leaves while the synchronous client waits for its next try is not held up."""
    async with serving(1, *[0] * 99) as gateway:

        def leave() -> float:
            with SyncClient(gateway.address, retry=Retry(9, 30.0, 30.0)) as client:
                parts = client.generate(token_ids=PROMPT, max_tokens=40)
                next(parts)
                time.sleep(0.1)  # the stream has broken, and the next try is half a minute away
                began = time.monotonic()
                parts.close()
                return time.monotonic() - began

        assert await asyncio.to_thread(leave) < 15
        assert len(gateway.requests) == 1


@pytest.mark.parametrize("make", [Client, SyncClient])
async def test_an_address_is_needed(make: type) -> None:
    with pytest.raises(InvalidArgument, match="address"):
        make([])


GONE = Unavailable("gone")


class Clock:
    """Time that moves by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def route(num_addresses: int = 1, timeout: float | None = None, chance: float = 0.0, **retry: float) -> Route:
    settings = Retry(**{"attempts": 99, "first_wait_s": 1.0, "most_wait_s": 8.0, **retry})  # type: ignore[arg-type]
    return Route(settings, num_addresses, 0, timeout, Clock(), lambda: chance)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Unavailable("x"), True), (ProtocolError("x"), True), (ResourceExhausted("x", retry_after_ms=5), True),
        (ResourceExhausted("x"), False), (Internal("x"), False), (InvalidArgument("x"), False),
        (FailedPrecondition("x"), False), (FailedPrecondition("x", reason="OTHER_MODEL"), True),
        (DeadlineExceeded("x"), False), (Cancelled("x"), False), (NotFound("x"), False),
    ],
)  # fmt: skip
def test_what_is_repeated(error: OutriderError, again: bool) -> None:
    assert may_repeat(error) is again


def test_waits_double_up_to_a_bound() -> None:
    way = route()
    assert [way.failed(GONE) for _ in range(6)] == [1, 2, 4, 8, 8, 8]


def test_chance_takes_up_to_a_half() -> None:
    way = route(chance=1.0)
    assert [way.failed(GONE) for _ in range(3)] == [0.5, 1, 2]


def test_another_address_is_asked_at_once() -> None:
    way = route(num_addresses=3)
    seen = [(way.failed(GONE), way.index) for _ in range(7)]
    assert seen == [(0, 1), (0, 2), (1, 0), (0, 1), (0, 2), (2, 0), (0, 1)]


def test_what_the_gateway_says_of_the_time_holds() -> None:
    assert route().failed(ResourceExhausted("full", retry_after_ms=2500)) == 2.5


def test_tries_end() -> None:
    way = route(attempts=3)
    assert [way.failed(GONE) for _ in range(2)] == [1, 2]
    with pytest.raises(Unavailable):
        way.failed(GONE)
    way = route(num_addresses=2, attempts=1)
    assert way.failed(GONE) == 0  # each address once
    with pytest.raises(Unavailable):
        way.failed(GONE)


def test_progress_starts_anew() -> None:
    way = route(attempts=2)
    for _ in range(5):
        assert way.failed(GONE) == 1
        way.progressed()


def test_a_try_waits_for_its_turn_among_the_clients() -> None:
    turns = iter([0.0, 3.0, 5.0])
    way = Route(Retry(99, 1.0, 8.0), 2, 0, None, Clock(), lambda: 0.0, pace=lambda within_s: next(turns))
    assert [way.failed(GONE) for _ in range(2)] == [0, 3] and way.failed(GONE) == 5
    way.progressed()
    assert way.failed(GONE) == 0, "a stream that broke goes on at once"


def test_no_try_after_the_deadline() -> None:
    way = route(timeout=2.5)
    assert way.remaining == 2.5 and way.failed(GONE) == 1
    way.clock.now = 1.0  # type: ignore[attr-defined]
    assert way.remaining == 1.5
    with pytest.raises(Unavailable):
        way.failed(GONE)  # it would be at 3.0


def part(**fields: object) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id="r", **fields)  # type: ignore[arg-type]


def took(resumption: Resumption, **fields: object) -> Part | None:
    return resumption.take(part(**fields))


def test_a_stranger_among_the_completions() -> None:
    with pytest.raises(Internal, match="completion 2 of 2"):
        took(Resumption(build_request("x", n=2)), index=2, token_ids=[1])


def test_the_callers_request_stays_as_it_is() -> None:
    request = build_request("x", max_tokens=9)
    resumption = Resumption(request)
    resumption.begin()
    assert took(resumption, token_ids=[5], seed=8, prompt_token_ids=[1, 2]) is not None
    again = resumption.begin()
    assert list(again.output_ids[0].ids) == [5] and again.sampling.seed == 8 and list(again.token_ids.ids) == [1, 2]
    assert request == build_request("x", max_tokens=9)


def test_an_answer_of_old_news_is_none() -> None:
    """A resumed stream says the seed and the prompt again; and of a completion that has ended, all."""
    resumption = Resumption(build_request("x", n=2))
    resumption.begin()
    assert took(resumption, seed=8, prompt_token_ids=[1], token_ids=[5], finish_reason=2) is not None
    assert not resumption.finished
    resumption.begin()
    assert took(resumption, seed=8, finish_reason=2) is None
    first = took(resumption, index=1, seed=8, token_ids=[6])
    assert first is not None and first.seed == 8
    resumption.begin()
    assert took(resumption, index=1, seed=8) is None
    assert took(resumption, index=1, finish_reason=1) is not None and resumption.finished
