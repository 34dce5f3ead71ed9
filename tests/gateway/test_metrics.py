"""/metrics: the counts are those of the requests that were made, over gRPC or HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.fakes import QUICK, TargetServicer, ToyDraft, ToyTarget, serving, target_info, until
from support.gateways import PROMPT, Gateway, gateway, toy_tokenizer

from outrider.client import Client
from outrider.gateway.metrics import PARTS, GatewayMetrics, MeteredEngine
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.request import GenerationRequest
from outrider.planner.policy import Round
from outrider.rpc.errors import DeadlineExceeded, InvalidArgument
from outrider.rpc.messages import Commit, StepTimings
from outrider.rpc.sampling_params import SamplingParams

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(served: Gateway) -> Samples:
    async with served.client() as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name.removeprefix("outrider_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def ask(served: Gateway, **fields: Any) -> Any:
    async with served.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "speculation": {}, **fields}
        return (await client.post("/v1/completions", json=body)).json()


async def test_counts_are_those_of_the_answers() -> None:
    async with gateway(ToyTarget(num_cached=2), ToyDraft(wrong_every=4)) as served:
        tallies = [choice["speculation"] for choice in (await ask(served, n=2))["choices"]]
        async with Client(served.grpc_address) as client:
            last = [part async for part in client.generate(token_ids=tuple(PROMPT), temperature=0.0, max_tokens=9)][-1]
            assert last.speculation is not None
            try:
                async for _ in client.generate(token_ids=tuple(PROMPT), temperature=-1.0):
                    pass
            except InvalidArgument:
                pass
        await ask(served, speculation={"enabled": False}, max_tokens=5)
        found = await scrape(served)
        drafts = [tally["num_drafts"] for tally in tallies] + [last.speculation.num_drafts]
        drafted = [tally["num_draft_tokens"] for tally in tallies] + [last.speculation.num_draft_tokens]
        accepted = [tally["num_accepted_tokens"] for tally in tallies] + [last.speculation.num_accepted_tokens]
        assert found["spec_decode_num_drafts_total", ()] == sum(drafts) > 0
        assert found["spec_decode_num_draft_tokens_total", ()] == sum(drafted)
        assert found["spec_decode_num_accepted_tokens_total", ()] == sum(accepted) > 0
        for position, per_position in enumerate(zip(*(t["num_accepted_per_position"] for t in tallies), strict=True)):
            count = sum(per_position) + last.speculation.num_accepted_per_position[position]
            labels = (("position", str(position)),)
            assert found.get(("spec_decode_num_accepted_tokens_per_pos_total", labels), 0) == count
        assert found["request_success_total", (("finished_reason", "length"),)] == 4
        assert found["request_refused_total", (("reason", "invalid_argument"),)] == 1
        assert not any(name == "request_failure_total" for name, _ in found)
        assert found["prompt_tokens_total", ()] == 9 and found["prompt_tokens_cached_total", ()] == 6
        assert found["generation_tokens_total", ()] == 20 + 20 + 9 + 5 and found["plain_steps_total", ()] == 5
        assert found["time_to_first_token_seconds_count", ()] == 4
        assert found["e2e_request_latency_seconds_count", ()] == 3, "a refusal is no latency"
        assert found["request_queue_time_seconds_count", ()] == 3
        rounds = found["round_seconds_count", ()]
        assert (
            rounds == sum(t["num_rounds"] for t in tallies) + last.speculation.num_rounds + 5 - 4
        )  # without first ones
        assert all(found["round_part_seconds_count", (("part", part),)] == rounds for part in PARTS)
        assert found["round_overhead_seconds_count", ()] == rounds
        by_mode = [found["rounds_total", (("mode", mode),)] for mode in ("sequential", "off")]
        assert by_mode == [sum(t["num_rounds"] for t in tallies) + last.speculation.num_rounds, 5]
        assert found["draft_connected", ()] == 1


async def test_the_controller_s_mode_and_its_changes() -> None:
    """A fast target and a slow draft that is always wrong: speculation goes off by itself, and that is counted."""
    target, draft = ToyTarget(info=target_info(max_model_len=2000)), ToyDraft(wrong_every=1, delay_s=0.01)
    async with gateway(target, draft, mode="auto") as served:
        did = (await ask(served, max_tokens=120))["choices"][0]["speculation"]
        found = await scrape(served)
        counted = {labels[0][1]: count for (name, labels), count in found.items() if name == "rounds_total"}
        assert counted == did["num_rounds_by_mode"] and counted["off"] > 0 and len(counted) > 1
        changes = {labels[0][1]: count for (name, labels), count in found.items() if name == "mode_changes_total"}
        assert changes["off"] >= 1 and set(changes) <= set(counted)


async def test_running_and_waiting() -> None:
    async with gateway(ToyTarget(step_s=0.02), max_active=1) as served:
        tasks = [asyncio.create_task(ask(served, max_tokens=100)) for _ in range(3)]
        await until(lambda: served.engine.admission.num_waiting == 2)
        found = await scrape(served)
        assert (found["num_requests_running", ()], found["num_requests_waiting", ()]) == (1, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: served.engine.admission.num_active == 0)
        assert (await scrape(served))["num_requests_running", ()] == 0


async def test_the_documentation_names_every_series(repository: Path) -> None:
    text = (repository / "docs/http.md").read_text(encoding="utf-8")
    rows = text[text.index("## Metrics") : text.index("## The live page")]
    named = {name.partition("{")[0] for name in re.findall(r"`([a-z0-9_.{}]+)`", rows)}
    named |= {name.replace("...", "spec_decode") for name in named}
    async with gateway() as served:
        families = text_string_to_metric_families(served.engine.metrics.render("")[0].decode())
    names = {family.name.removeprefix("outrider_") for family in families if family.name.startswith("outrider_")}
    assert len(names) > 20 and {name for name in names if not {name, f"{name}_total"} & named} == set()


async def test_errors_before_a_delivery_are_refusals_with_a_reason() -> None:
    async with gateway(ToyTarget(step_s=0.01), max_active=1, max_waiting=0) as served:
        long = SamplingParams(max_tokens=250)  # beyond its deadline on any machine
        deltas = served.engine.generate(GenerationRequest(token_ids=tuple(PROMPT), sampling=long, timeout_s=0.2))
        await anext(deltas)
        for fields in ({}, {"n": 2}, {"temperature": -1}):
            await ask(served, **fields)
        with suppress(DeadlineExceeded):
            while True:
                await anext(deltas)
        found = await scrape(served)
        refused = {labels[0][1]: count for (name, labels), count in found.items() if name == "request_refused_total"}
        assert refused == {"too_many_sequences": 3}
        assert found["request_failure_total", (("code", "deadline_exceeded"),)] == 1
        assert found["e2e_request_latency_seconds_count", ()] == 1


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_slow_reader_is_no_latency_between_tokens(stop: tuple[str, ...]) -> None:
    """With stop strings the target stands still until the text was taken: that wait is the reader's, too."""
    async with gateway(ToyTarget(), ToyDraft(wrong_every=3)) as served:
        sampling = SamplingParams(temperature=0.0, max_tokens=24, stop=stop)
        async for _ in served.engine.generate(GenerationRequest(token_ids=tuple(PROMPT), sampling=sampling)):
            await asyncio.sleep(0.02)
        found = await scrape(served)
        rounds = found["inter_token_latency_seconds_count", ()]
        assert rounds > 4 and found["inter_token_latency_seconds_sum", ()] < rounds * 0.01
        assert found["request_time_per_output_token_seconds_sum", ()] < 0.005
        assert found["round_seconds_sum", ()] < rounds * 0.01


async def test_openmetrics_for_who_asks_for_it() -> None:
    async with gateway() as served, served.client() as client:
        accept = "application/openmetrics-text; version=1.0.0"
        answer = await client.get("/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(answer.text)}
        assert {"outrider_spec_decode_num_drafts", "outrider_inter_token_latency_seconds"} <= names


def test_a_round_costs_little() -> None:
    """Counting stays far below the millisecond that a round's control overhead may take."""
    metrics = GatewayMetrics()
    commit = Commit(0, 9, (1, 2, 3), (), 0, 4, 2, timings=StepTimings(10, 200, 30, 5, 1))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for index in range(1, 201):
            metrics.add_round(Round(index, commit, 4, 0.0, 0.001, 100))
        times.append((time.perf_counter() - began) / 200)
    assert min(times) < 0.0003, f"{min(times) * 1e6:.0f} µs a round"


async def test_replicas_tell_what_computes_there() -> None:
    """Each of those that can be used; one that falls back to PyTorch shows."""
    named = [TargetServicer(ToyTarget(info=target_info(kernels=kernels))) for kernels in ("c-avx512", "torch-avx2")]
    async with AsyncExitStack() as stack:
        addresses = [(await stack.enter_async_context(serving(servicer))).address for servicer in named]
        targets = await stack.enter_async_context(RemoteTargets(addresses, stream_config=QUICK))
        await until(lambda: all(replica.usable for replica in targets.replicas))
        text = MeteredEngine(toy_tokenizer(), targets).metrics.render("")[0].decode()
    (family,) = (found for found in text_string_to_metric_families(text) if found.name == "outrider_replica_info")
    told = {sample.labels["address"]: sample.labels["kernels"] for sample in family.samples}
    assert told == dict(zip(addresses, ("c-avx512", "torch-avx2"), strict=True))
    assert {(sample.labels["role"], sample.value) for sample in family.samples} == {("target", 1.0)}
