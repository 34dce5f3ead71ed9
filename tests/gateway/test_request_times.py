"""The times of a request, in an answer's words: of commits, whole and as a stream, from each endpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fakes import ToyDraft
from support.gateways import gateway

from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.request_record import RequestRecord
from outrider.gateway.spec_decode_metrics import times_shape
from outrider.planner.policy import Round
from outrider.rpc.messages import Commit, StepTimings
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the quick brown fox", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}
NAMES = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"]


def commit(started: float, ended: float, num_tokens: int, queue_us: int = 0) -> GenerationDelta:
    ids = (5,) * num_tokens
    closed = Round(1, Commit(0, 0, ids, (), timings=StepTimings(queue_us, 0, 0)), 4, started, ended, 0)
    return GenerationDelta("r", 0, token_ids=ids, round=closed)


def test_they_are_those_of_commits() -> None:
    record = RequestRecord(GenerationRequest(), arrived=10.0)
    assert times_shape(record) == dict.fromkeys(NAMES)
    for delta in (
        GenerationDelta("r", 0),  # the prompt's log probabilities
        commit(11.0, 13.5, 1, queue_us=500_000),
        commit(13.5, 14.0, 3),
        commit(14.0, 15.5, 1),
        commit(15.5, 90.0, 0),
    ):
        record.add(delta)
    assert (record.scheduled, record.first_token, record.last_token, record.num_tokens) == (11.5, 13.5, 15.5, 5)
    assert times_shape(record) == dict(zip(NAMES, (2000.0, 2000.0, 1500.0, 500.0, 1.25), strict=True))


def test_one_token_has_no_time_between_tokens() -> None:
    record = RequestRecord(GenerationRequest(), arrived=10.0)
    record.add(commit(11.0, 13.0, 1))
    assert times_shape(record) == dict(zip(NAMES, (2000.0, 0.0, 1000.0, None, 0.5), strict=True))


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_says_them_where_they_are_its_own(path: str) -> None:
    """By the flag, and of one completion; beside them what became of drafts, by its flag."""
    options = HttpOptions(request_metrics=True, spec_decode_metrics="summary")
    async with gateway(draft=ToyDraft(), options=options) as served, served.client() as client:
        metrics = (await client.post(path, json=BODIES[path])).json()["metrics"]
        assert [*metrics] == [*NAMES, "speculative_decoding"]
        assert metrics["time_to_first_token_ms"] > 0 and metrics["tokens_per_second"] > 0
        stream = (await client.post(path, json={**BODIES[path], "stream": True})).text
        events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        told = [event.get("response", event).get("metrics") for event in events]
        assert [*told[-1]] == [*NAMES, "speculative_decoding"] and not any(told[:-1])
        if path != "/v1/responses":
            assert [*(await client.post(path, json={**BODIES[path], "n": 2})).json()["metrics"]] == [
                "speculative_decoding"
            ]
    async with gateway() as served, served.client() as client:
        assert "metrics" not in (await client.post(path, json=BODIES[path])).json()
