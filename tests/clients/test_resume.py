"""A stream that breaks goes on from the tokens received, at the same gateway or another one: what the caller gets is
what one whole stream would have brought. Both clients, over gRPC on the loopback."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from clients.cutting import AT_THE_END, KINDS, PROMPT, Kind, ask, ids_of, serving, text_of
from gateway.toys import ToyTarget, expected, target_info, until

from outrider.client import NO_RETRY, Client, Retry, SyncClient
from outrider.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)
from outrider.rpc.sampling_params import FinishReason

both = pytest.mark.parametrize("kind", KINDS)


@both
async def test_it_goes_on_as_if_unbroken(kind: Kind) -> None:
    """Text, ids, log probabilities, seed and usage of a text prompt, over four streams."""
    options: dict[str, Any] = {"prompt": "the quick", "max_tokens": 30, "logprobs": 0, "prompt_logprobs": 0}
    async with serving() as whole, serving(1, 0, 3) as broken:
        wanted, parts = await ask(kind, whole, **options), await ask(kind, broken, **options)
    assert len(broken.requests) == 4 and len(whole.requests) == 1
    assert ids_of(parts) == ids_of(wanted) and len(ids_of(parts)) == 30
    assert text_of(parts) == text_of(wanted) and text_of(parts)
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
        text = text_of(await ask(kind, whole, prompt="the quick", max_tokens=30))
        stop = text[8:14]
        wanted = await ask(kind, whole, prompt="the quick", max_tokens=30, stop=stop)
    async with serving(1, 1, 1, 1, 1, 1) as broken:
        parts = await ask(kind, broken, prompt="the quick", max_tokens=30, stop=stop)
    assert text_of(parts) == text_of(wanted) == text[: text.index(stop)]
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
            await ask(kind, gateway, token_ids=PROMPT, retry=Retry(99, 0.1, 0.1), timeout=0.3)
        assert asyncio.get_running_loop().time() - began < 0.4


@both
async def test_progress_gives_new_tries(kind: Kind) -> None:
    """Breaks with tokens between them do not add up to those that end the tries."""
    async with serving(*[1] * 5) as gateway:
        parts = await ask(kind, gateway, token_ids=PROMPT, max_tokens=40, retry=Retry(2, 0.001, 0.001))
    assert ids_of(parts) == expected(PROMPT, 40) and len(gateway.requests) == 6


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
            task = asyncio.create_task(ask(kind, first, second, token_ids=PROMPT, max_tokens=60))
            await until(lambda: slow.links and len(slow.links[0].sequence.tokens) > 10)
        parts = await task
    assert ids_of(parts) == expected(PROMPT, 60) and len(second.requests) == 1
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

        assert await asyncio.to_thread(leave) < 1.5
        assert len(gateway.requests) == 1


@pytest.mark.parametrize("make", [Client, SyncClient])
async def test_an_address_is_needed(make: type) -> None:
    with pytest.raises(InvalidArgument, match="address"):
        make([])
