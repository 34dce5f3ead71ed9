"""Adapters as a gateway has them: by name for who asks, by content wherever a sequence is opened."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import gateways
from support.fakes import (
    PROMPT,
    QUICK,
    VOCAB,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    arithmetic,
    expected,
    request,
    serving,
    target_info,
    until,
    with_adapters,
)
from support.gateways import Gateway, gateway, ids_of, toy_tokenizer

from outrider.client import Client
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.learning import RequestKind
from outrider.gateway.metrics import MAX_ADAPTERS as MAX_SERIES
from outrider.gateway.metrics import OTHER_ADAPTERS, GatewayMetrics
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.peers.routing import affinity_key, choose_adapters
from outrider.gateway.speculation.loop import speculate
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import Policy, Round
from outrider.rpc.errors import FailedPrecondition, NotFound, Unavailable
from outrider.rpc.logs import JsonFormatter
from outrider.rpc.messages import Adapter, Commit, Failure
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}


def sql(tokens: Sequence[int], prompt_len: int) -> int:
    return (tokens[-1] * 11 + len(tokens)) % (VOCAB - 10) + 5


def other_sql(tokens: Sequence[int], prompt_len: int) -> int:
    return (tokens[-1] * 13 + len(tokens)) % (VOCAB - 10) + 5


RULES = {"": arithmetic, "a1": sql, "a2": other_sql}  # by digest


def toy(adapter: str = "", step_s: float = 0.0, **fields: Any) -> ToyTarget:
    """A target that has an adapter of this digest by the name "sql"."""
    info = target_info(**fields)
    if not adapter:
        return ToyTarget(step_s=step_s, info=info)
    return ToyTarget(step_s=step_s, info=with_adapters(info, sql=adapter), adapter_rules={"sql": RULES[adapter]})


def put(servicer: TargetServicer, digest: str) -> None:
    """Loads the adapter "sql" while the target serves; empty: unloads it."""
    changed = toy(digest)
    servicer.toy.info, servicer.toy.adapter_rules = changed.info, changed.adapter_rules
    servicer.info_version += 1


async def ask(served: Gateway, **options: Any) -> list[Any]:
    async with Client(served.grpc_address, retry=gateways.QUICK) as client:
        return [part async for part in client.generate(token_ids=PROMPT, **GREEDY, **options)]


def asking(max_tokens: int = 20, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return GenerationRequest(token_ids=PROMPT, sampling=sampling, **fields)


async def answer(engine: GenerationEngine, asked: GenerationRequest) -> list[int]:
    return [token async for delta in engine.generate(asked) for token in delta.token_ids]


class Targets:
    """Target services behind one Verifier."""

    def __init__(self, *toys: ToyTarget) -> None:
        self.servicers = [TargetServicer(one) for one in toys]
        self._stack = AsyncExitStack()
        self.stops: list[AsyncExitStack] = []

    async def __aenter__(self) -> Targets:
        addresses = []
        for servicer in self.servicers:
            one = AsyncExitStack()
            self.stops.append(one)
            await self._stack.enter_async_context(one)
            addresses.append((await one.enter_async_context(serving(servicer))).address)
        self.remote = await self._stack.enter_async_context(RemoteTargets(addresses, stream_config=QUICK))
        await until(lambda: all(replica.usable for replica in self.remote.replicas))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def adapters(self) -> list[tuple[str, str]]:
        return [(one.name, one.digest) for one in self.remote.info.adapters]

    @property
    def opens(self) -> list[list[str]]:
        """The adapters that were asked for, by target."""
        return [[opened.adapter for opened in servicer.opens] for servicer in self.servicers]

    def engine(self, **config: Any) -> GenerationEngine:
        return GenerationEngine(toy_tokenizer(), self.remote, config=EngineConfig(**config))


async def test_a_request_names_an_adapter() -> None:
    target, draft = toy("a1"), ToyDraft(rule=sql, wrong_every=3)
    async with gateway(target, draft) as served:
        parts = await ask(served, adapter="sql", n=2)
        assert ids_of(parts) == ids_of(parts, 1) == expected(PROMPT, 20, sql)
        assert {part.model_digest for part in parts if part.model_digest} == {"a1"}
        assert ids_of(await ask(served)) == expected(PROMPT, 20)
        async with Client(served.grpc_address) as client:
            assert (await client.info()).adapters == (Adapter("sql", "a1", 8),)
    assert [(opened.adapter, opened.model_digest) for opened in target.opens] == [("sql", "a1")] * 2 + [("", "d1")]
    assert [(opened.adapter, opened.model_digest) for opened in draft.opens] == [("sql", "a1")] * 2 + [("", "d1")]


@pytest.mark.parametrize(("has", "listed"), [("a1", "'sql'"), ("", "none"), ("many", r"'n0', .*'n19', and 5 more")])
async def test_a_name_that_is_not_there_is_refused_with_those_that_are(has: str, listed: str) -> None:
    target = toy(has if has != "many" else "")
    if has == "many":
        target.info = with_adapters(target.info, **{f"n{number}": f"a{number}" for number in range(25)})
    async with gateway(target) as served:
        with pytest.raises(NotFound, match=rf"adapter: is 'sqll', which does not exist; served here: {listed}$") as no:
            await ask(served, adapter="sqll")
        assert no.value.reason == "ADAPTER_NOT_FOUND"
        with pytest.raises(NotFound, match=r"the model 'sql' does not exist"):
            await ask(served, model="sql")  # over gRPC it has a field of its own
    assert not target.opens


async def test_what_is_resumed_goes_on_with_the_weights_of_its_adapter_alone() -> None:
    target = toy("a1")
    async with gateway(target) as served:
        half = expected(PROMPT, 10, sql)
        rest = await ask(served, adapter="sql", output_ids=[half], model_digest="a1")
        assert ids_of(rest) == expected(PROMPT, 20, sql)[10:]
        for adapter, digest in (("sql", "a2"), ("sql", "d1"), ("", "a1")):
            with pytest.raises(FailedPrecondition, match=f"model_digest: is {digest}, another model's") as no:
                await ask(served, adapter=adapter, output_ids=[half], model_digest=digest)
            assert no.value.reason == "OTHER_MODEL"
        with pytest.raises(FailedPrecondition, match="adapter: is 'gone', which does not exist") as no:
            await ask(served, adapter="gone", output_ids=[half], model_digest="a1")
        assert no.value.reason == "OTHER_MODEL"


async def test_a_request_goes_where_its_adapter_is() -> None:
    """Of a name with two contents most targets' is served; one of none gets no Open that names any."""
    async with Targets(toy(), toy("a1"), toy("a2"), toy("a1")) as targets:
        assert targets.adapters == [("sql", "a1")]
        engine = targets.engine()
        for first in range(24):
            prompt = (first, *PROMPT)
            asked = replace(asking(2, adapter="sql"), token_ids=prompt)
            assert await answer(engine, asked) == expected(prompt, 2, sql)
        none, one, other, two = targets.opens
        assert not none and not other and one and two
        for first in range(24):
            await answer(engine, replace(asking(2), token_ids=(first, *PROMPT)))
        assert all("" in opens for opens in targets.opens), "the model alone is everywhere"


async def test_what_is_loaded_or_unloaded_is_known_without_a_restart() -> None:
    async with Targets(toy(), toy()) as targets:
        engine, (first, second) = targets.engine(), targets.servicers
        with pytest.raises(NotFound):
            await answer(engine, asking(adapter="sql"))
        put(second, "a1")
        await until(lambda: targets.adapters == [("sql", "a1")])
        assert await answer(engine, asking(adapter="sql")) == expected(PROMPT, 20, sql)
        assert targets.opens == [[], ["sql"]]
        put(second, "")
        await until(lambda: not targets.adapters)
        with pytest.raises(NotFound, match="'sql', which does not exist; served here: none"):
            await answer(engine, asking(adapter="sql"))
        assert targets.opens == [[], ["sql"]] and not first.opens


async def test_an_adapter_that_is_unloaded_while_requests_wait_is_named() -> None:
    target = toy("a1", step_s=0.002)
    engine = GenerationEngine(toy_tokenizer(), target, config=EngineConfig(max_active=1))
    runs = asyncio.create_task(answer(engine, asking(60, adapter="sql")))
    waits = asyncio.create_task(answer(engine, asking(adapter="sql")))
    await until(lambda: target.opens and engine.admission.num_waiting)
    target.info = replace(target.info, adapters=())
    assert await asyncio.wait_for(runs, 30) == expected(PROMPT, 60, sql), "what runs goes on"
    with pytest.raises(NotFound, match="adapter: is 'sql', which does not exist"):
        await asyncio.wait_for(waits, 30)
    assert len(target.opens) == 1


async def test_one_that_waits_gets_what_the_name_stands_for_then() -> None:
    target = toy("a1", step_s=0.002)
    engine = GenerationEngine(toy_tokenizer(), target, config=EngineConfig(max_active=1))
    deltas: list[GenerationDelta] = []

    async def collect() -> None:
        async for delta in engine.generate(asking(adapter="sql")):
            deltas.append(delta)

    tasks = [asyncio.create_task(answer(engine, asking(50))), asyncio.create_task(collect())]
    await until(lambda: target.opens and engine.admission.num_waiting)
    target.info, target.adapter_rules = toy("a2").info, {"sql": other_sql}
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert deltas[0].model_digest == target.opens[1].model_digest == "a2"
    assert [token for delta in deltas for token in delta.token_ids] == expected(PROMPT, 20, other_sql)


async def lost(targets: Targets, rounds: list[Round], policy: Policy) -> asyncio.Task[None]:
    """A sequence of the adapter that has lost its target, the second one, after some rounds."""

    async def collect() -> None:
        opened = request(60, adapter="sql", model_digest="a1")
        async for item in speculate(None, targets.remote, opened, policy):
            assert isinstance(item, Round)
            rounds.append(item)

    task = asyncio.create_task(collect())
    await until(lambda: len(rounds) > 3)
    assert targets.opens[1]
    return task


async def test_a_sequence_goes_on_at_a_target_of_the_same_adapter() -> None:
    slow = toy("a1", step_s=0.002)
    async with Targets(toy(), slow, toy("a2"), toy()) as targets:
        rounds: list[Round] = []
        task = await lost(targets, rounds, Policy(0, reopen_s=30.0))
        put(targets.servicers[1], "a2")  # the same name, other weights: the sequence that runs stays
        await until(lambda: targets.adapters == [("sql", "a2")])
        await targets.servicers[1].streams[0].close()
        await asyncio.sleep(0.1)
        assert targets.opens == [[], ["sql"], [], []], "neither at other weights nor at none"
        put(targets.servicers[3], "a1")
        await asyncio.wait_for(task, 30)
        assert targets.opens == [[], ["sql"], [], ["sql"]]
    assert [token for closed in rounds for token in closed.commit.ids] == expected(PROMPT, 60, sql)


async def test_a_sequence_whose_adapter_is_nowhere_says_so() -> None:
    async with Targets(toy(), toy("a1", step_s=0.004)) as targets:
        task = await lost(targets, [], Policy(0, reopen_s=0.2))
        put(targets.servicers[1], "")
        await targets.servicers[1].streams[0].close()
        with pytest.raises(Unavailable, match="no target that has the adapter 'sql' can take the request"):
            await asyncio.wait_for(task, 30)


async def test_an_adapter_whose_target_is_away_is_not_gone() -> None:
    """As while it starts again: clients that ask again then are served."""
    async with Targets(toy(), toy("a1")) as targets:
        await targets.stops[1].aclose()
        await until(lambda: not targets.remote.replicas[1].usable)
        assert targets.adapters == [("sql", "a1")]
        with pytest.raises(Unavailable, match="no target that has the adapter 'sql'"):
            await answer(targets.engine(), asking(adapter="sql"))
        assert targets.opens == [[], []]


NONE_HERE = Failure(0, 5, "adapter: is 'sql'; this target has none", "NO_ADAPTER")


async def test_a_target_that_has_just_lost_it_costs_no_request() -> None:
    """Before the gateway hears of it: another target is asked, and where none has it, the refusal is the answer."""
    async with Targets(toy("a1"), toy("a1")) as targets:
        engine = targets.engine(room_wait_s=30.0)
        first, second = targets.servicers
        for refusing in targets.servicers:
            first.refuse = second.refuse = None
            refusing.refuse = NONE_HERE
            assert await answer(engine, asking(adapter="sql")) == expected(PROMPT, 20, sql)
        first.refuse = second.refuse = NONE_HERE
        with pytest.raises(NotFound, match="this target has none"):
            await asyncio.wait_for(answer(engine, asking(adapter="sql")), 20)
        assert sorted(len(opens) for opens in targets.opens) == [2, 3]
        assert not any(replica.breaker.open for replica in targets.remote.replicas)


def test_which_of_several_a_name_stands_for() -> None:
    one, two, three = Adapter("sql", "a1", 8), Adapter("sql", "a2", 8), Adapter("law", "b1", 4)
    assert choose_adapters([]) == ()
    assert choose_adapters([(one,), (two,)]) == (one,) and choose_adapters([(two,), (one,)]) == (two,)
    assert choose_adapters([(one, three), (two,), (two,)]) == (two, three)
    assert choose_adapters([(two,), ()], away=[(one, three)]) == (two, three)


def test_an_adapter_parts_prompts_that_begin_alike() -> None:
    keys = {affinity_key(PROMPT), affinity_key(PROMPT, adapter="sql"), affinity_key(PROMPT, adapter="law")}
    assert len({*keys, affinity_key(PROMPT, "sql")}) == 4
    assert affinity_key(PROMPT, "s", "sql") == affinity_key([*PROMPT], "s", "sql")


async def test_a_draft_is_judged_for_each_adapter_by_itself() -> None:
    target = toy("a1", step_s=0.001)
    engine = GenerationEngine(toy_tokenizer(), target, ToyDraft(), EngineConfig(mode="sequential"))
    engine.config = replace(engine.config, mode="auto")
    for adapter in ("", "sql"):  # the draft knows the model's rule alone
        for _ in range(3):
            await answer(engine, asking(60, adapter=adapter))
    known = engine.learned
    assert known is not None
    base, own = known.of(())[0], known.of((), kind=RequestKind("a1"))[0]
    assert base.acceptance.at(0) > SharedStats(VerifyCosts()).acceptance.at(0) > own.acceptance.at(0)
    assert base.costs is own.costs and base.draft_pass is own.draft_pass


async def test_metrics_tell_how_often_drafts_hold_for_an_adapter() -> None:
    async with gateway(toy("a1"), ToyDraft(rule=sql, wrong_every=4)) as served:
        parts = await ask(served, adapter="sql", num_draft_tokens=3)
        await ask(served)
        text = served.metrics.render("")[0].decode()
    stats = parts[-1].speculation
    for name, number in (
        ("rounds", stats.num_rounds),
        ("draft_tokens", stats.num_draft_tokens),
        ("accepted_tokens", stats.num_accepted_tokens),
        ("generation_tokens", 20),
    ):
        assert f'outrider_adapter_{name}_total{{adapter="sql"}} {float(number)}' in text
    assert 'adapter=""' not in text


def test_adapters_have_a_bounded_number_of_series() -> None:
    metrics = GatewayMetrics()
    commit = Commit(0, 3, (1,), ())
    closed = Round(index=1, commit=commit, num_draft_tokens=0, started=0.0, ended=1.0, draft_us=0)
    for number in range(MAX_SERIES + 3):
        metrics.add_round(closed, adapter=f"a{number}")
    metrics.add_round(closed, adapter="a0")
    assert len(metrics.adapters) == MAX_SERIES + 1
    assert metrics.adapters["a0"].num_rounds == 2 and metrics.adapters[OTHER_ADAPTERS].num_rounds == 3


async def test_openai_s_model_names_an_adapter() -> None:
    target = toy("a1")
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "sql", "max_tokens": 4, "temperature": 0}
    async with gateway(target, model_name="base") as served, served.client() as client:
        body: dict[str, Any]
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT, "model": "sql", "max_tokens": 4, "temperature": 0}),
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": "hi", "model": "sql", "max_output_tokens": 16, "temperature": 0}),
        ):
            answer = (await client.post(path, json=body)).json()
            assert answer["model"] == "sql", answer
            assert (target.opens[-1].adapter, target.opens[-1].model_digest) == ("sql", "a1")
            assert answer.get("system_fingerprint", "fp_a1") == "fp_a1"
        events = [event async for event in _events(client, "/v1/responses", {**body, "stream": True})]
        assert events and all('"model":"sql"' in event.replace(" ", "") for event in events if '"model"' in event)
        await client.post("/v1/completions", json={"prompt": PROMPT, "model": "base", "max_tokens": 2})
        assert target.opens[-1].adapter == ""
        for name in ("sql", "base", None):
            ids = (await client.post("/tokenize", json={"prompt": "the fox", "model": name})).json()["tokens"]
            assert (await client.post("/detokenize", json={"tokens": ids, "model": name})).json() == {
                "prompt": "the fox"
            }
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/tokenize", {"prompt": "x"}),
            ("/v1/responses", {"input": "x"}),
        ):
            wrong = await client.post(path, json={**body, "model": "law"})
            assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"
            assert "'law' does not exist; served here: 'base', 'sql'" in wrong.json()["error"]["message"]


async def _events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


async def test_adapters_are_models_in_the_list() -> None:
    async with gateway(toy("a1"), model_name="base") as served, served.client() as client:
        base, adapter = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], base["root"], base["parent"]) == ("base", "base", None) and "rank" not in base
        assert (adapter["id"], adapter["root"], adapter["parent"], adapter["rank"]) == ("sql", "sql", "base", 8)
        assert adapter["max_model_len"] == base["max_model_len"] and adapter["object"] == "model"
        assert (await client.get("/v1/models/sql")).json() == adapter
        assert (await client.get("/v1/models/law")).status_code == 404
        served.target.info = replace(served.target.info, adapters=())
        assert len((await client.get("/v1/models")).json()["data"]) == 1


async def test_what_was_cut_over_http_goes_on_with_its_adapter() -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "model": "sql", "return_token_ids": True}
    async with gateway(toy("a1")) as served, served.client() as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        ids, mark = whole["choices"][0]["token_ids"], whole["system_fingerprint"]
        again = {**body, "output_ids": ids[:5], "system_fingerprint": mark}
        rest = (await client.post("/v1/completions", json=again)).json()
        assert rest["choices"][0]["token_ids"] == ids[5:] == expected(PROMPT, 12, sql)[5:]
        refused = await client.post("/v1/completions", json={**again, "model": "toy"})
        assert refused.json()["error"]["code"] == "other_model"


async def test_traces_and_the_log_tell_of_the_adapter(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = EngineConfig(log_requests="counts")
    engine = GenerationEngine(toy_tokenizer(), toy("a1"), None, config, provider.get_tracer("test"))
    await answer(engine, asking(5, adapter="sql"))
    await answer(engine, asking(5))
    with pytest.raises(NotFound):
        await answer(engine, asking(5, adapter="law"))
    roots = [span for span in exporter.get_finished_spans() if span.name == "text_completion toy"]
    told = [span.attributes.get("outrider.request.adapter") for span in roots if span.attributes is not None]
    lines = [json.loads(JsonFormatter("gateway").format(one)) for one in caplog.records if "request gen" in one.message]
    assert told == ["sql", None, "law"] and [line.get("adapter") for line in lines] == ["sql", None]
