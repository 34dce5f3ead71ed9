"""Goals for a request's times: how calls name them, what is foreseen of them, and what becomes of a request whose goals
cannot be met. The clocks are the tests' own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from support.fakes import ToyTarget, until
from support.gateways import PROMPT, Gateway, gateway, toy_tokenizer
from support.metrics import samples_of

from outrider.gateway.admission import Admission, AdmissionCost
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.goals import HEADERS, STRICT, ServiceTimes, goals_of, outcomes
from outrider.gateway.request_record import RequestRecord
from outrider.rpc.errors import InvalidArgument, ResourceExhausted
from outrider.rpc.messages import MAX_INT32, MOST_STEPS
from outrider.rpc.token_times import TokenTimes
from outrider.rpc.words.request import GenerationRequest, LatencyGoals
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

REQUEST = GenerationRequest(token_ids=tuple(PROMPT), sampling=SamplingParams(temperature=0.0, max_tokens=8))


def test_headers_name_goals_and_the_newer_name_counts() -> None:
    assert goals_of({}) == LatencyGoals() and not LatencyGoals().by_name
    assert goals_of({"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "12.5"}) == LatencyGoals(200.0, 12.5)
    both = {"x-llm-d-slo-ttft-ms": "100", "x-slo-ttft-ms": "no number", STRICT: "True"}
    assert goals_of(both) == LatencyGoals(100.0, None, strict=True)


@pytest.mark.parametrize("text", ["", "fast", "nan", "inf", "-1", "0", "1e12", "20ms"])
def test_every_header_that_says_something_else_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        goals_of({"x-slo-ttft-ms": text, "x-llm-d-slo-tpot-ms": text, STRICT: "maybe"})
    assert [one.field for one in raised.value.violations] == ["x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", STRICT]
    assert all("allowed: " in one.problem for one in raised.value.violations)


class Clock:
    """The test's time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


ONE = AdmissionCost(1, 10)


async def busy_admission(clock: Clock) -> Admission:
    """Two run, of which ten have left before, one a second."""
    admission = Admission(max_active=2, max_waiting=99, clock=clock)
    await admission.enter(ONE)
    for _ in range(10):
        await admission.enter(ONE)
        clock.now += 1.0
        admission.leave(ONE)
    await admission.enter(ONE)
    return admission


async def test_the_wait_is_that_for_what_is_not_less_urgent() -> None:
    clock = Clock()
    admission = await busy_admission(clock)
    assert Admission(1, 1).foreseen_wait_s(ONE, 0) == 0.0
    assert admission.foreseen_wait_s(ONE, 0) == pytest.approx(1.0, rel=0.05)
    waiting = [asyncio.create_task(admission.enter(ONE, priority)) for priority in (0, 0, 12)]
    await asyncio.sleep(0)
    assert admission.foreseen_wait_s(ONE, -1) == pytest.approx(1.0, rel=0.05)
    assert admission.foreseen_wait_s(ONE, 0) == pytest.approx(3.0, rel=0.05)  # those of goals out of reach are behind
    assert admission.foreseen_wait_s(ONE, 12) == pytest.approx(4.0, rel=0.05)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def finished(prompt_len: int, first_s: float, token_s: float, **request: Any) -> RequestRecord:
    """A request that arrived at 10 s, ran at once and gave 11 tokens."""
    record = RequestRecord(replace(REQUEST, **request), arrived=10.0, started=10.0)
    record.prepared = type("Known", (), {"prompt_ids": (1,) * prompt_len})()
    record.first_token = 10.0 + first_s
    record.completions[0] = TokenTimes(10.0 + first_s, 0.0, 1, 11, token_s, 10 * token_s)
    return record


def test_what_requests_took_is_foreseen_of_those_like_them() -> None:
    times = ServiceTimes()
    assert times.foreseen_ms(100, 4, before_s=0.25) == {"ttft": 250.0, "tpot": 0.0}  # nothing was seen
    for _ in range(8):
        times.add(finished(100, 0.1, 0.010), num_running=1)
        times.add(finished(1600, 0.8, 0.040), num_running=16)
    short, long = times.foreseen_ms(100, 1, 0.0), times.foreseen_ms(1600, 16, 0.5)
    assert short["ttft"] == pytest.approx(100, rel=0.1) and short["tpot"] == pytest.approx(10, rel=0.1)
    assert long["ttft"] == pytest.approx(1300, rel=0.1) and long["tpot"] == pytest.approx(40, rel=0.1)


@pytest.mark.parametrize(
    ("goals", "told"),
    [
        (LatencyGoals(), {}),
        (LatencyGoals(100.0, 10.0), {"ttft": "met", "tpot": "met"}),
        (LatencyGoals(99.0, 9.0), {"ttft": "missed", "tpot": "missed"}),
        (LatencyGoals(tpot_ms=50.0), {"tpot": "met"}),
    ],
)
def test_what_was_met(goals: LatencyGoals, told: dict[str, str]) -> None:
    record = finished(3, 0.1, 0.010, goals=goals)
    record.first_token = 10.0999
    assert outcomes(record) == told
    record.completions[1] = TokenTimes(10.1, 0.0, 1, 2, 0.06, 0.06)  # the slowest counts
    assert outcomes(record) == {**told, **({"tpot": "missed"} if goals.tpot_ms else {})}


def test_of_what_gave_nothing_nothing_is_told() -> None:
    assert outcomes(RequestRecord(replace(REQUEST, goals=LatencyGoals(1.0, 1.0)))) == {}


def slow_engine(target: ToyTarget, seconds: float = 1.0, **config: Any) -> GenerationEngine:
    """One that has seen requests take so long to their first token, and a tenth of that for each after it."""
    engine = GenerationEngine(toy_tokenizer(), target, config=EngineConfig(**config))
    for num_running in (1, 2):
        engine._service_times.add(finished(len(PROMPT), seconds, seconds / 10), num_running)
    return engine


async def told(engine: GenerationEngine, **request: Any) -> list[int]:
    return [token async for delta in engine.generate(replace(REQUEST, **request)) for token in delta.token_ids]


@pytest.mark.parametrize("goals", [LatencyGoals(ttft_ms=500.0), LatencyGoals(tpot_ms=50.0)])
async def test_a_goal_out_of_reach_is_served_behind_others(goals: LatencyGoals) -> None:
    target = ToyTarget()
    engine = slow_engine(target)
    tokens = await told(engine)
    for priority in (0, MAX_INT32 - 1):
        assert await told(engine, goals=goals, priority=priority) == tokens
        assert target.opens[-1].priority == min(priority + MOST_STEPS, MAX_INT32)
    assert await told(engine, goals=LatencyGoals(60_000.0, 60_000.0, strict=True)) == tokens
    assert target.opens[-1].priority == 0


async def test_whose_goal_is_out_of_reach_is_passed_by_who_comes_later() -> None:
    target = ToyTarget()
    engine = slow_engine(target, max_active=1)
    await engine.admission.enter(ONE)
    doomed = asyncio.create_task(told(engine, goals=LatencyGoals(ttft_ms=500.0), request_id="doomed"))
    await until(lambda: engine.admission.num_waiting == 1)
    others = asyncio.create_task(told(engine, request_id="other"))
    await until(lambda: engine.admission.num_waiting == 2)
    engine.admission.leave(ONE)
    await asyncio.gather(doomed, others)
    assert [opened.priority for opened in target.opens] == [0, MOST_STEPS]


async def test_a_strict_one_is_refused_with_a_time_to_come_back() -> None:
    target = ToyTarget()
    engine = slow_engine(target, seconds=5.0)
    with pytest.raises(ResourceExhausted, match=r"x-llm-d-slo-ttft-ms: is 500, and 5\d{3} ms are foreseen") as refused:
        await told(engine, goals=LatencyGoals(500.0, 10.0, strict=True))
    assert "x-llm-d-slo-tpot-ms: is 10, and 500 ms" in refused.value.message and STRICT in refused.value.message
    assert refused.value.reason == "GOAL_UNREACHABLE" and 4000 < refused.value.retry_after_ms < 6000
    assert not target.opens and engine.admission.num_tokens == 0


async def ask(served: Gateway, headers: Mapping[str, str]) -> Any:
    async with served.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        return await client.post("/v1/completions", json=body, headers=dict(headers))


async def test_over_http(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.gateway.request_log")
    async with gateway(ToyTarget(), log_requests="counts") as served:
        refused = await ask(served, {"X-SLO-TTFT-MS": "soon"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-slo-ttft-ms"
        met = await ask(served, {"x-llm-d-slo-ttft-ms": "80000000", "x-llm-d-slo-tpot-ms": "80000000"})
        assert met.status_code == 200
        served.engine._service_times.add(finished(len(PROMPT), 1e5, 1e4), num_running=1)
        lowered = await ask(served, {"x-llm-d-slo-ttft-ms": "0.001"})
        assert lowered.status_code == 200 and lowered.json()["choices"] == met.json()["choices"]
        strict = await ask(served, {"x-llm-d-slo-ttft-ms": "0.001", STRICT: "true"})
        assert strict.status_code == 429 and int(strict.headers["retry-after"]) >= 1
        async with served.client() as client:
            samples = samples_of((await client.get("/metrics")).text)
    counted = {name: value for name, value in samples.items() if "request_goals" in str(name) and value}
    assert sorted(counted.values()) == [1.0, 1.0, 1.0, 2.0], counted
    fields = [getattr(record, "outrider_fields", {}) for record in caplog.records]
    assert [said["goals"] for said in fields if "goals" in said] == [{"ttft": "met", "tpot": "met"}, {"ttft": "missed"}]


async def test_over_grpc_they_are_metadata() -> None:
    target = ToyTarget()
    async with gateway(target) as served, grpc.aio.insecure_channel(served.grpc_address) as channel:
        served.engine._service_times.add(finished(len(PROMPT), 1e5, 1e4), num_running=1)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        message.sampling.max_tokens = 4
        async for _ in stub.Generate(message, metadata=((HEADERS["ttft"][0], "500"),)):
            pass
        assert target.opens[-1].priority == MOST_STEPS
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(message, metadata=((HEADERS["tpot"][1], "soon"),)):
                pass
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert HEADERS["tpot"][1] in str(refused.value.details())
