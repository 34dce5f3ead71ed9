"""vLLM that drafts for itself as the servicer, metrics and traces see it, without vLLM: its answers are a script's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import opened
from support.fakes import until
from support.metrics import MODEL, scraped

from outrider.rpc.messages import Commit, Credit
from outrider.rpc.servicer import Deliver
from outrider.target_service.metrics import TargetMetrics
from outrider.target_service.observed import ObservedStep
from outrider.target_service.sequence import TargetLimits
from outrider.vllm.target import engine as engine_module
from outrider.vllm.target.self_drafting import SelfDraftingEngine, Unlinked

STREAM = 1
K = 3
HEADER = f"00-{'a' * 32}-{'b' * 16}-01"


def answer(*ids: int, cached: int = 0, end: str | None = None) -> Any:
    """What AsyncLLM says of a request's step."""
    output = SimpleNamespace(
        token_ids=ids, logprobs=None, finish_reason=end, stop_reason=None, spec_decode_metrics=None
    )
    return SimpleNamespace(outputs=[output], prompt_logprobs=None, num_cached_tokens=cached)


class ScriptedLlm:
    """Each step's answers come in one turn of the loop, behind vLLM's count of it."""

    errored = False

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.unlinked = Unlinked()

    async def generate(
        self, prompt: Any, params: Any, name: str, lora_request: Any = None, priority: int = 0
    ) -> AsyncIterator[Any]:
        self.queues[name] = asyncio.Queue()
        while True:
            yield (found := await self.queues[name].get())
            if found.outputs[0].finish_reason is not None:
                return

    def step(self, *answers: Any, running: int, usage: float, preempted: int = 0) -> None:
        for number, found in enumerate(answers, start=1):
            self.queues[f"outrider-{number}"].put_nowait(found)
        count = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=0, kv_cache_usage=usage)
        self.unlinked.on_count(count, SimpleNamespace(num_preempted_reqs=preempted))


async def test_steps_are_counted_as_an_engines_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "sampling_of", lambda *args: None)
    ahead_s, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead_s)
    llm, events, steps, metrics = ScriptedLlm(), list[Any](), list[ObservedStep](), TargetMetrics()

    def watch(step: ObservedStep) -> None:
        steps.append(step)
        metrics.add_step(step)

    limits = TargetLimits(97, 512, (2,), num_blocks=8, block_size=16)
    engine = SelfDraftingEngine(llm, llm.unlinked, limits, K, on_step=watch)
    metrics.attach(engine.stats, engine, MODEL)
    for number, length in ((7, 40), (8, 5)):
        request = replace(opened(number, range(10, 10 + length)), traceparent=HEADER)
        engine.submit(Deliver(STREAM, (request, Credit(number, 100, K)), events.append))
    await until(lambda: len(llm.queues) == 2)

    llm.step(answer(11, cached=32), answer(12), running=2, usage=0.25)
    await until(lambda: len(steps) == 1)
    ahead_s += 200.0
    llm.step(answer(13, 14), answer(15, 16, 17, 18), running=2, usage=0.5, preempted=2)
    await until(lambda: len(steps) == 2)
    await asyncio.sleep(0.05)

    first, second = steps
    assert (first.timings.num_rows, first.num_verify_rows, first.num_drafted) == (8 + 5, 2, 0)
    assert (second.timings.num_rows, second.num_verify_rows) == (2 * (K + 1), 2 * (K + 1))
    assert (second.num_drafted, second.num_accepted, second.timings.num_sequences) == (2 * K, 1 + 3, 2)
    assert second.seconds >= 200 and second.timings.verify_us == round(second.seconds * 1e6)
    assert list(second.traceparents) == [HEADER] * 2
    assert (len(first.waits), len(second.waits)) == (2, 0)
    assert all(isinstance(event, Commit) for event in events) and len(events) == 4
    read = scraped(metrics)
    assert read["target_step_rows_total", (("kind", "prompt"),)] == 13 - 2
    assert read["target_step_rows_total", (("kind", "verify"),)] == 2 + 2 * (K + 1)
    assert read["target_step_seconds_count", (("rows", "8"),)] == 1
    assert read["target_num_requests_running", ()] == 2
    assert read["target_kv_cache_usage_perc", ()] == 0.5
    assert read["target_num_preemptions_total", ()] == 2

    llm.step(answer(19, end="length"), answer(20, end="length"), running=0, usage=0.0)
    await until(lambda: engine.stats().num_open == 0)
    ahead_s += 100.0  # which the machine rests
    engine.submit(Deliver(STREAM, (opened(9, range(5)), Credit(9, 100, K)), events.append))
    await until(lambda: len(llm.queues) == 3)
    llm.queues["outrider-3"].put_nowait(answer(11))
    await until(lambda: len(steps) == 4)
    assert steps[-1].seconds < 100, "an engine that rests is in no step"
