"""When a call is made again, where and after how long: the rules alone, on a clock of their own."""

from __future__ import annotations

import pytest

from outrider.client.request import build_request
from outrider.client.resume import Resumption, Retry, Route, may_repeat
from outrider.client.types import Part
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
from outrider.v1 import generation_pb2 as pb

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
