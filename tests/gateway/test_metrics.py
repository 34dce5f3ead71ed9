"""/metrics: the counts are those of the requests that were made, over gRPC or HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.fakes import (
    QUICK,
    DraftServicer,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    generate,
    request,
    serving,
    target_info,
    until,
)
from support.gateways import PROMPT, Gateway, gateway, toy_tokenizer
from support.metrics import Samples, samples_of, scraped

from outrider.client import Client, Part
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.metrics import PARTS, WINDOWS, GatewayMetrics
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.request_metrics import DEMAND_EVERY_S, DraftArrivals, DraftDemand, measure
from outrider.gateway.speculation.core import MAX_PIECES
from outrider.planner.estimates import Acceptance
from outrider.planner.policy import Round
from outrider.rpc.errors import DeadlineExceeded, InvalidArgument, NotFound
from outrider.rpc.messages import Commit, DraftTokens, Failure, Load, StepTimings
from outrider.rpc.telemetry import GEN_AI_VERSION
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import CAPABILITIES, SamplingParams
from outrider.rpc.words.structured import StructuredOutput


async def scrape(served: Gateway) -> Samples:
    async with served.client() as client:
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return samples_of(answer.text)


async def ask(served: Gateway, **fields: Any) -> Any:
    async with served.client() as client:
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "speculation": {}, **fields}
        return (await client.post("/v1/completions", json=body)).json()


def vars_of(part: Part) -> dict[str, int]:
    assert part.speculation is not None
    return {"num_rounds": part.speculation.num_rounds}


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
        for position, per_position in enumerate(zip(*(t["num_tested_per_position"] for t in tallies), strict=True)):
            count = sum(per_position) + last.speculation.num_tested_per_position[position]
            labels = (("position", str(position)),)
            assert found.get(("spec_decode_num_tested_tokens_per_pos_total", labels), 0) == count
        assert found["round_draft_tokens_sum", ()] == 4 * sum(t["num_rounds"] for t in [*tallies, vars_of(last)])
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


async def test_forced_tokens_are_those_of_the_answers() -> None:
    capabilities = (*CAPABILITIES, "sampling.structured_output")
    target = ToyTarget(info=replace(target_info(), capabilities=capabilities), num_forced=3)
    async with gateway(target, ToyDraft(wrong_every=7)) as served:
        did = (await ask(served, structured_outputs={"regex": "x"}))["choices"][0]["speculation"]
        async with Client(served.grpc_address) as client:
            constraint = StructuredOutput(regex="x")
            options: Any = {"temperature": 0.0, "max_tokens": 20, "structured_output": constraint}
            last = [part async for part in client.generate(token_ids=tuple(PROMPT), **options)][-1]
        await ask(served)
        found, stats = await scrape(served), last.speculation
        assert stats is not None and stats.num_accepted_forced_tokens > 0
        assert 0 < did["num_accepted_forced_tokens"] < did["num_forced_tokens"] == 3 * did["num_rounds"]
        for name, tallied in (("", "num_forced_tokens"), ("_accepted", "num_accepted_forced_tokens")):
            assert found[f"forced_tokens{name}_total", ()] == did[tallied] + getattr(stats, tallied)
        assert did["num_draft_tokens"] <= 4 * did["num_rounds"], "forced ones are none of the draft's"


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


async def test_errors_before_a_delivery_are_refusals_with_a_reason() -> None:
    async with gateway(ToyTarget(step_s=0.01), max_active=1, max_waiting=0) as served:
        deltas = served.engine.generate(
            GenerationRequest(token_ids=tuple(PROMPT), sampling=SamplingParams(max_tokens=250))
        )
        await anext(deltas)
        for fields in ({}, {"n": 2}, {"temperature": -1}):
            await ask(served, **fields)
        served.target.links[0].emit(Failure(0, 4, "the request's time ran out"))
        with suppress(DeadlineExceeded):
            while True:
                await anext(deltas)
        found = await scrape(served)
        refused = {labels[0][1]: count for (name, labels), count in found.items() if name == "request_refused_total"}
        assert refused == {"too_many_sequences": 3}
        assert found["request_failure_total", (("code", "deadline_exceeded"),)] == 1
        assert found["e2e_request_latency_seconds_count", ()] == 1


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_a_slow_reader_is_no_latency_between_tokens(
    stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stop strings the target stands still until the text was taken: that wait is the reader's, too. A read takes
    10 s of a clock that is put forward, so that no pause of this process looks like one."""
    ahead_s, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead_s)
    async with gateway(ToyTarget(), ToyDraft(wrong_every=3), draft_patience_ms=60_000) as served:
        sampling = SamplingParams(temperature=0.0, max_tokens=24, stop=stop)
        async for _ in served.engine.generate(GenerationRequest(token_ids=tuple(PROMPT), sampling=sampling)):
            await asyncio.sleep(0.02)  # in which the target does what it has credit for
            ahead_s += 10.0
        found = await scrape(served)
        rounds = found["inter_token_latency_seconds_count", ()]
        assert rounds > 4 and found["inter_token_latency_seconds_sum", ()] < rounds * 2.5
        assert found["request_time_per_output_token_seconds_sum", ()] < rounds * 2.5 / 24
        assert found["round_seconds_sum", ()] < rounds * 2.5


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
        began = time.thread_time()
        for index in range(1, 201):
            metrics.add_round(Round(index, commit, 4, 0.0, 0.001, 100))
        times.append((time.thread_time() - began) / 200)
    assert min(times) < 0.0003, f"{min(times) * 1e6:.0f} µs a round"


async def test_replicas_tell_what_computes_there() -> None:
    """Each of those that can be used; one that falls back to PyTorch shows."""
    named = [TargetServicer(ToyTarget(info=target_info(kernels=kernels))) for kernels in ("c-avx512", "torch-avx2")]
    async with AsyncExitStack() as stack:
        addresses = [(await stack.enter_async_context(serving(servicer))).address for servicer in named]
        targets = await stack.enter_async_context(RemoteTargets(addresses, stream_config=QUICK))
        await until(lambda: all(replica.usable for replica in targets.replicas))
        text = measure(GenerationEngine(toy_tokenizer(), targets)).render("")[0].decode()
    (family,) = (found for found in text_string_to_metric_families(text) if found.name == "outrider_replica_info")
    told = {sample.labels["address"]: sample.labels["kernels"] for sample in family.samples}
    assert told == dict(zip(addresses, ("c-avx512", "torch-avx2"), strict=True))
    assert {(sample.labels["role"], sample.value) for sample in family.samples} == {("target", 1.0)}


def piece(chain: int, position: int, *ids: int) -> DraftTokens:
    return DraftTokens(0, chain, position, ids)


def closed_round(
    index: int, position: int, num_drafted: int, chain: int | None, started: float, **fields: Any
) -> Round:
    commit = Commit(0, position, (1,) * (num_drafted + 1), (), chain, num_drafted, num_drafted)
    return Round(index, commit, 4, started, started + 1.0, 0, **{"mode": "sequential"} | fields)


def test_when_a_window_came() -> None:
    """By the arrival of the piece that the window begins in, against the beginning of the round."""
    now = time.monotonic()
    pieces = DraftArrivals()
    pieces.add(piece(0, 3, 1, 1))
    assert pieces.window_of(closed_round(0, 3, 2, 0, now - 9)) is None, "the prompt's round"
    assert not pieces._held, "what a round has passed is forgotten"
    pieces.add(piece(0, 6, 1, 1))
    pieces.add(piece(1, 6, 2, 2))
    assert pieces.window_of(closed_round(1, 6, 1, 0, time.monotonic() + 1)) == "hit"
    assert pieces.window_of(closed_round(2, 8, 0, None, time.monotonic())) == "miss", "the pieces ended before it"
    pieces.add(piece(2, 9, 1, 1, 1))
    assert pieces.window_of(closed_round(3, 9, 2, 2, now - 9)) == "late"
    pieces.add(piece(3, 11, 5, 5))
    assert pieces.window_of(closed_round(4, 12, 0, None, time.monotonic() + 1)) == "stale"
    assert pieces.window_of(closed_round(5, 13, 0, None, now, mode="off")) is None


def test_of_a_draft_s_pieces_a_bounded_number_is_noted() -> None:
    """They are noted before anything is judged: one may send beyond its credit, or what nobody asked for."""
    pieces = DraftArrivals()
    for position in range(10_000):
        pieces.add(piece(0, position, 1))
    assert len(pieces._held) == MAX_PIECES
    assert pieces.window_of(closed_round(1, 9_900, 1, 0, time.monotonic() + 1)) == "hit", "the last ones are there"
    for position in range(10_000):
        pieces.add(piece(0, 20_000 + position, 1))
    assert len(pieces._held) == MAX_PIECES


@pytest.mark.parametrize("n", [10**30, -1, "two"])
async def test_who_leaves_before_a_request_is_judged_counts_once(n: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judging = asyncio.Event()

    async def judge(request: GenerationRequest) -> None:
        judging.set()
        await asyncio.Event().wait()

    async with gateway() as served:
        monkeypatch.setattr(served.engine, "_prepare", judge)
        deltas = served.engine.generate(GenerationRequest(text="the fox", n=n))
        first = asyncio.ensure_future(anext(deltas))
        await judging.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        found = await scrape(served)
        assert found["request_success_total", (("finished_reason", "abort"),)] == 1


async def test_windows_are_those_of_the_rounds() -> None:
    async with gateway(ToyTarget(), ToyDraft(wrong_every=5)) as served:
        did = (await ask(served, max_tokens=40))["choices"][0]["speculation"]
        found = await scrape(served)
        windows = {window: found["spec_decode_windows_total", (("window", window),)] for window in WINDOWS}
        assert windows["late"] > 0, "in sequential mode each window is waited for"
        assert sum(windows.values()) == did["num_rounds"] - 1
        assert found["draft_wanted_rounds_total", ()] == did["num_rounds"]


async def test_a_slow_draft_is_still_wanted() -> None:
    """Speculation goes off, since the draft is busy; what it would be asked for without load goes on."""
    target = ToyTarget(step_s=0.005, info=target_info(max_model_len=2000))
    draft = ToyDraft()
    async with gateway(target, draft, mode="auto") as served:
        engine, demand = served.engine, DraftDemand(served.engine)
        await ask(served, max_tokens=100)
        assert engine.learned is not None
        (stats,) = engine.learned.of_default
        stats.draft_pass.value, stats.between.value = 100.0, 100.0
        stats.costs.add(5, 5000.0, False, 16.0)
        off = closed_round(1, 3, 0, None, 0.0, mode="off", chosen=True)
        demand._asked_at = -DEMAND_EVERY_S
        assert demand.wants(replace(off, mode="chains")), "it drafts, and is fast"
        stats.draft_pass.value, stats.between.value = 1e6, 1e6
        demand._asked_at = -DEMAND_EVERY_S
        assert demand.wants(off), "and it still would, without the load that it has now"
        assert not demand.wants(replace(off, chosen=False)), "this request wants none"
        stats.acceptance = Acceptance()
        for _ in range(100):
            stats.acceptance.add(4, 0)
        demand._asked_at = -DEMAND_EVERY_S
        assert not demand.wants(off), "a draft that is never right would not pay, however fast"


@asynccontextmanager
async def replicas() -> AsyncIterator[tuple[GenerationEngine, TargetServicer, GatewayMetrics]]:
    """An engine before a target and a draft over gRPC, as a gateway's process builds it."""
    metrics = GatewayMetrics()
    one, other = TargetServicer(ToyTarget()), DraftServicer(ToyDraft())
    quick = [replace(QUICK, wrap=metrics.stream_config(role).wrap) for role in ("target", "draft")]
    async with (
        serving(one) as target,
        serving(other) as draft,
        RemoteTargets([target.address], stream_config=quick[0]) as targets,
        RemoteDrafts([draft.address], stream_config=quick[1]) as drafts,
    ):
        await until(lambda: targets.usable and drafts.usable)
        engine = GenerationEngine(toy_tokenizer(), targets, drafts)
        yield engine, one, measure(engine, metrics, vllm_names=True)


async def test_replicas_and_their_wires() -> None:
    async with replicas() as (engine, servicer, metrics):
        targets, drafts = engine.verifier, engine.drafter
        assert isinstance(targets, RemoteTargets) and isinstance(drafts, RemoteDrafts)
        place = [(("address", pool.replicas[0].address), ("role", role)) for role, pool in
                 (("target", targets), ("draft", drafts))]  # fmt: skip
        found = scraped(metrics)
        assert [found["replica_up", labels] for labels in place] == [1, 1]
        assert [found["replica_reopens_total", labels] for labels in place] == [0, 0]
        before = {key: value for key, value in found.items() if key[0] == "wire_bytes_total"}
        assert len(before) == 4
        tokens = await generate(drafts, targets, request(60))
        found = scraped(metrics)
        after = {key: value for key, value in found.items() if key[0] == "wire_bytes_total"}
        assert all(10_000 > after[key] - before[key] > len(tokens) for key in before), "ids alone are a byte each"
        link = targets.open(request(200), lambda event: None)
        assert link is not None
        found = scraped(metrics)
        assert found["replica_sequences", place[0]] == found["replica_load", place[0]] == 1
        targets.replicas[0].breaker._open_s = 1.0
        assert scraped(metrics)["replica_breaker_open", place[0]] == 1
        targets.replicas[0].breaker.succeeded()
        assert scraped(metrics)["replica_breaker_open", place[0]] == 0
        await servicer.streams[0].close()
        await until(lambda: targets.replicas[0].num_streams == 2)
        found = scraped(metrics)
        assert found["replica_reopens_total", place[0]] == 1 and found["replica_reopens_total", place[1]] == 0


async def test_a_gateway_under_vllm_s_names() -> None:
    async with replicas() as (engine, _, metrics):
        labels = (("engine", "0"), ("model_name", "toy"))
        targets = engine.verifier
        assert isinstance(targets, RemoteTargets)
        (replica,) = targets.replicas
        assert replica.info is not None
        replica.info = replace(replica.info, model=replace(replica.info.model, num_blocks=40, block_size=16))
        found = scraped(metrics)
        assert found["vllm:num_requests_running", labels] == found["vllm:kv_cache_usage_perc", labels] == 0
        replica.reported = Load(1, 0, 30)
        assert scraped(metrics)["vllm:kv_cache_usage_perc", labels] == 0.25
        cache = next(dict(labels) for name, labels in scraped(metrics) if name == "vllm:cache_config_info")
        assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "40")


async def test_a_sampled_request_is_an_exemplar() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    engine = GenerationEngine(toy_tokenizer(), ToyTarget(), ToyDraft(), tracer=tracer)
    metrics = measure(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    async for _ in engine.generate(GenerationRequest(token_ids=tuple(PROMPT), sampling=sampling)):
        pass
    text = metrics.render("application/openmetrics-text")[0].decode()
    with_trace = {line.partition("_bucket")[0] for line in text.splitlines() if 'trace_id="' in line}
    wanted = (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "round_seconds",
        "e2e_request_latency_seconds",
    )
    assert {f"outrider_{name}" for name in wanted} <= with_trace


GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


def of_open_telemetry(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    """A sample under OpenTelemetry's names, of texts unless `labels` say otherwise."""
    values = {**dict(zip(GEN_AI, ("text_completion", "outrider", "toy"), strict=True)), **labels}
    return scraped(metrics).get((f"gen_ai_server_{name}", tuple(sorted(values.items()))), 0.0)


async def test_under_open_telemetry_s_names() -> None:
    target = ToyTarget()
    engine = GenerationEngine(toy_tokenizer(), target)
    metrics = measure(engine, gen_ai_names=True)
    asked = GenerationRequest(token_ids=tuple(PROMPT), sampling=SamplingParams(temperature=0.0, max_tokens=6), n=2)
    async for _ in engine.generate(asked):
        pass
    chat = replace(asked, token_ids=None, messages=({"role": "user", "content": "hello"},), n=1)
    async for _ in engine.generate(chat):
        pass
    with pytest.raises(NotFound):
        async for _ in engine.generate(replace(asked, adapter="whatever a stranger writes")):
            pass
    count = "request_duration_seconds_count"
    assert of_open_telemetry(metrics, count, error_type="") == 1
    assert of_open_telemetry(metrics, count, error_type="", gen_ai_operation_name="chat") == 1
    assert of_open_telemetry(metrics, count, error_type="NOT_FOUND") == 1
    assert of_open_telemetry(metrics, "time_to_first_token_seconds_count") == 1
    assert of_open_telemetry(metrics, "time_per_output_token_seconds_count") == 2  # one of each completion
    assert of_open_telemetry(metrics, "time_per_output_token_seconds_bucket", le="+Inf") == 2
    told = of_open_telemetry(metrics, "time_per_output_token_seconds_sum")
    assert 0 < told < of_open_telemetry(metrics, "request_duration_seconds_sum", error_type="")


def test_the_version_of_the_conventions_is_that_of_the_documentation(repository: Path) -> None:
    assert f"conventions' version {GEN_AI_VERSION}," in (repository / "docs/metrics.md").read_text(encoding="utf-8")
