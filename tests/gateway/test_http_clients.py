"""Clients that go away, read slowly, or ask from another page."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from statistics import median
from typing import Any

import pytest
from gateway.http_harness import PROMPT, gateway
from gateway.toys import ToyDraft, ToyTarget, target_info, until

from outrider.gateway.http_app import build_app

LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 240, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_goes_away_ends_its_sequences(stream: bool, n: int) -> None:
    target, draft = ToyTarget(step_s=0.02), ToyDraft()
    async with gateway(target, draft) as served, served.client() as client:
        request = client.build_request("POST", "/v1/completions", json={**LONG, "stream": stream, "n": n})
        sending = asyncio.create_task(client.send(request, stream=True))
        if stream:
            response = await sending
            async with aclosing(response.aiter_lines()) as lines:
                await anext(lines)
            await response.aclose()
        else:
            await until(lambda: len(target.opens) == n)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await until(lambda: target.num_closed == draft.num_closed == n)
        assert served.engine.admission.num_active == 0
        metrics = served.engine.metrics.render("")[0].decode()
        assert f'request_success_total{{finished_reason="abort"}} {n}.0' in metrics


async def test_a_client_that_goes_away_while_it_waits_leaves_the_queue() -> None:
    async with gateway(ToyTarget(step_s=0.02), max_active=1) as served, served.client() as client:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}):
            waiting = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await until(lambda: served.engine.admission.num_waiting == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: served.engine.admission.num_waiting == 0)
            assert served.engine.admission.num_active == 1 and len(served.target.opens) == 1
        await until(lambda: served.engine.admission.num_active == 0)


async def test_a_client_that_never_reads_is_granted_no_credit() -> None:
    """Straight to the application, whose third send never returns, as with a full socket."""
    target = ToyTarget(info=target_info(max_model_len=100_000))
    async with gateway(target) as served:
        stuck, never = asyncio.Event(), asyncio.Event()
        body = [{"type": "http.request", "body": b'{"prompt": [11], "max_tokens": 90000, "stream": true}'}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await never.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                stuck.set()
                await never.wait()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        task = asyncio.create_task(build_app(served.engine)({**scope, "root_path": ""}, receive, send))  # type: ignore[arg-type]
        await stuck.wait()
        sequence = target.links[0].sequence
        before = -1
        while before != len(sequence.tokens):
            before = len(sequence.tokens)
            await asyncio.sleep(0.1)
        assert before < 600, "the target went on although nobody reads"
        never.set()
        await task
        await until(lambda: target.num_closed == 1)


async def test_an_answer_s_body_does_not_wait_for_its_head() -> None:
    """They are two writes: with Nagle's algorithm the second waits for the first's acknowledgement, 40 ms."""
    async with gateway() as served, served.client() as client:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            await client.get("/version")
            times.append(time.perf_counter() - began)
        assert median(times) < 0.025, times


async def test_another_site_s_page_cannot_ask() -> None:
    async with gateway() as served, served.client() as client:
        foreign = await client.get("/live", params={"prompt": "x"}, headers={"sec-fetch-site": "cross-site"})
        assert foreign.status_code == 403 and not served.target.opens
        form = await client.post("/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert form.status_code == 400 and not served.target.opens
