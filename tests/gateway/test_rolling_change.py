"""A rolling change of the model: targets that serve one model are replaced by targets that serve another.

Weights and arithmetic of targets: a sequence stays with its weights, and a change of arithmetic is marked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fakes import (
    PROMPT,
    QUICK,
    VOCAB,
    DraftServicer,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    arithmetic,
    draft_info,
    expected,
    generate,
    request,
    serving,
    target_info,
    until,
)
from support.gateways import gateway, toy_tokenizer
from support.models import train_byte_level

from outrider.gateway import engine as gateway_engine
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.serving import extension_shape, join
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.request_metrics import measure
from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.core import Emit, SpeculationCore
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import Policy, Round
from outrider.rpc.errors import OTHER_MODEL, FailedPrecondition, Unavailable
from outrider.rpc.generation_codec import encode_delta
from outrider.rpc.messages import Commit, DraftInfo, TargetInfo, to_failure
from outrider.rpc.pair import check_pair
from outrider.rpc.server import Server
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import SamplingParams


def new_rule(tokens: Sequence[int], prompt_len: int) -> int:
    return (tokens[-1] * 11 + len(tokens)) % (VOCAB - 10) + 5


RULES = {"old": arithmetic, "new": new_rule}


def old(step_s: float = 0.0, **fields: Any) -> TargetServicer:
    return TargetServicer(ToyTarget(step_s=step_s, info=target_info(name="old", digest="d1", **fields)))


def new(**fields: Any) -> TargetServicer:
    return TargetServicer(ToyTarget(rule=new_rule, info=target_info(name="new", digest="d2", **fields)))


class Fleet:
    """Targets at fixed addresses, each of which can be replaced."""

    def __init__(self, *servicers: TargetServicer) -> None:
        self.servicers = list(servicers)
        self.servers: list[Server] = []
        self._stacks = [AsyncExitStack() for _ in servicers]

    async def __aenter__(self) -> Fleet:
        for stack, servicer in zip(self._stacks, self.servicers, strict=True):
            self.servers.append(await stack.enter_async_context(serving(servicer)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for stack in self._stacks:
            await stack.aclose()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    async def replace(self, index: int, servicer: TargetServicer) -> None:
        address = self.servers[index].address
        await self._stacks[index].aclose()
        self.servicers[index] = servicer
        self.servers[index] = await self._stacks[index].enter_async_context(serving(servicer, address))


async def all_up(fleet: Fleet, targets: RemoteTargets) -> None:
    """Every target has been met as it is now, not as it was before it was replaced."""
    infos = [servicer.toy.info for servicer in fleet.servicers]
    await until(
        lambda: (
            all(replica.present for replica in targets.replicas)
            and infos == [replica.info for replica in targets.replicas]
        )
    )


async def test_new_requests_change_over_with_the_majority() -> None:
    async with Fleet(old(), old(), old()) as fleet, RemoteTargets(fleet.addresses, stream_config=QUICK) as targets:
        names = []
        for index in range(4):
            await all_up(fleet, targets)
            names.append(targets.info.model.name)
            assert await generate(None, targets, request(20)) == expected(PROMPT, 20, RULES[names[-1]])
            if index < 3:
                await fleet.replace(index, new())
    assert names == ["old", "old", "new", "new"]


async def test_what_a_target_says_of_itself_changes_with_its_restart() -> None:
    short = old(max_model_len=128)
    short.toy.info = replace(short.toy.info, max_window=3, step_costs=((1, 9),))
    changes: list[None] = []
    async with Fleet(old()) as fleet, RemoteTargets(fleet.addresses, stream_config=QUICK) as targets:
        await all_up(fleet, targets)
        targets.on_model = lambda: changes.append(None)
        await fleet.replace(0, short)
        await all_up(fleet, targets)
        assert targets.info == short.toy.info and not changes  # of the same weights


class Restarted(TargetServicer):
    """A target that took another one's place between that one's answer and the stream."""

    def __init__(self, toy: ToyTarget, before: TargetServicer) -> None:
        super().__init__(toy)
        self._before: TargetServicer | None = before

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:
        answering: Any = self._before or super()
        self._before = None
        return await answering.GetTargetInfo(request, context)


async def test_an_answer_is_not_taken_for_what_the_next_process_says() -> None:
    async with (
        serving(Restarted(new().toy, before=old())) as server,
        RemoteTargets([server.address], stream_config=QUICK) as targets,
    ):
        await targets.wait_usable()
        await until(lambda: targets.info.model.name == "new")
        assert await generate(None, targets, request(20)) == expected(PROMPT, 20, new_rule)
        assert targets.replicas[0].num_streams == 1


async def test_a_request_under_way_keeps_its_model_while_a_target_has_it() -> None:
    slow = [old(step_s=0.2), old(step_s=0.2)]
    async with (
        Fleet(*slow, old(), old()) as fleet,
        RemoteTargets(fleet.addresses, stream_config=QUICK) as targets,
    ):
        await all_up(fleet, targets)
        for replica in targets.replicas[2:]:
            replica.retired = True  # so that it begins at a slow one
        task = asyncio.create_task(generate(None, targets, request(150, model_digest="d1")))
        await until(lambda: slow[0].opens or slow[1].opens)
        for index in (2, 3):
            await fleet.replace(index, new())
            targets.replicas[index].retired = False
        await all_up(fleet, targets)
        assert targets.info.model.name == "old"  # half is not more than half
        busy = 0 if slow[0].opens else 1
        await fleet.replace(busy, new())
        await until(lambda: targets.info.model.name == "new")
        assert await generate(None, targets, request(20)) == expected(PROMPT, 20, new_rule)
        await until(lambda: slow[1 - busy].opens)
        slow[1 - busy].toy.step_s = 0.0
        assert await asyncio.wait_for(task, 30) == expected(PROMPT, 150)
        assert len(slow[1 - busy].opens) == 1  # the last one that has its model


async def test_a_request_whose_model_is_gone_ends() -> None:
    async with Fleet(old(step_s=0.004)) as fleet, RemoteTargets(fleet.addresses, stream_config=QUICK) as targets:
        await all_up(fleet, targets)
        rounds = speculate(None, targets, request(150, model_digest="d1"), Policy(0, reopen_s=0.3))
        await anext(rounds)
        await fleet.replace(0, new())
        with pytest.raises(Unavailable):
            async for _ in rounds:
                pass
        await until(lambda: targets.usable)
        assert targets.info.model.name == "new"


@pytest.mark.parametrize(("fleet", "name"), [("ONN", "new"), ("ONON", "old"), ("NO", "new"), ("ON", "old")])
async def test_at_the_start_the_most_common_model_is_served(fleet: str, name: str) -> None:
    servicers = [old() if letter == "O" else new() for letter in fleet]
    async with Fleet(*servicers) as up, RemoteTargets(up.addresses, stream_config=QUICK) as targets:
        assert await asyncio.wait_for(targets.wait_admitted(), 30) is None
        assert targets.info.model.name == name
        assert await asyncio.wait_for(targets.wait_attempted(), 30) is None and targets.info.model.name == name


async def test_a_model_of_another_tokenizer_counts_as_absent() -> None:
    def check(info: TargetInfo) -> None:
        if info.model.name == "new":
            raise FailedPrecondition("not this gateway's tokenizer")

    async with Fleet(new(), new(), old()) as fleet, RemoteTargets(fleet.addresses, check, QUICK) as targets:
        assert await asyncio.wait_for(targets.wait_admitted(), 30) is None
        assert await asyncio.wait_for(targets.wait_attempted(), 30) is None
        assert targets.info.model.name == "old"
        await until(lambda: [replica.usable for replica in targets.replicas] == [False, False, True])
        await fleet.replace(2, new())
        await until(lambda: targets.replicas[2].refusal is not None)
        assert not targets.usable and targets.info.model.name == "old"


async def test_drafts_are_judged_again_for_another_model() -> None:
    draft = DraftServicer(ToyDraft(info=draft_info(num_tokens=300)))
    async with (
        Fleet(old(num_tokens=300)) as fleet,
        serving(draft) as server,
        RemoteTargets(fleet.addresses, stream_config=QUICK) as targets,
    ):

        def check(info: DraftInfo) -> None:
            check_pair(targets.info.model, info.model)

        await targets.wait_usable()
        async with RemoteDrafts([server.address], check, QUICK) as drafts:
            targets.on_model = drafts.recheck
            await asyncio.wait_for(drafts.wait_usable(), 30)
            await fleet.replace(0, new(num_tokens=200))
            await until(lambda: targets.info.model.name == "new")
            assert not drafts.usable and drafts.info is None and "not a pair" in str(drafts.refusal)
            await until(lambda: fleet.servicers[0].streams)  # a server that stops before serves such a call for ever
            await fleet.replace(0, old(num_tokens=300))
            await until(lambda: targets.info.model.name == "old")
            assert drafts.usable  # at once: its stream was kept


async def test_a_draft_that_loads_other_weights_is_asked_again() -> None:
    """Its streams stay; one that does not fit any more gets nothing new."""
    draft = DraftServicer(ToyDraft(wrong_every=3, info=draft_info(num_tokens=300, digest="one")))
    toy, changes = draft.toy, list[str]()

    def check(info: DraftInfo) -> None:
        changes.append(info.model.digest)
        check_pair(target_info(num_tokens=300).model, info.model)

    target = TargetServicer(ToyTarget(step_s=0.005))
    async with (
        serving(draft) as server,
        serving(target) as other,
        RemoteDrafts([server.address], check, QUICK) as drafts,
        RemoteTargets([other.address], stream_config=QUICK) as targets,
    ):
        await asyncio.wait_for(asyncio.gather(drafts.wait_usable(), targets.wait_usable()), 30)
        engine = GenerationEngine(toy_tokenizer(), targets, drafts, EngineConfig(mode="auto"))
        await learned(engine, "one")
        rounds = speculate(drafts, targets, request(150), Policy(4, patience_ms=200, max_unread=8))
        tokens = list((await held(rounds)).commit.ids)  # it goes on when somebody reads on
        for digest, num_tokens in (("two", 300), ("three", 200), ("four", 300)):
            toy.info, draft.info_version = draft_info(num_tokens=num_tokens, digest=digest), draft.info_version + 1
            await until(lambda digest=digest: changes[-1] == digest)
            await until(lambda usable=num_tokens == 300: drafts.usable is usable)
            assert drafts.replicas[0].num_sequences == 1, "what is open there stays"
            if drafts.usable:
                await until(lambda digest=digest: drafts.info and drafts.info.model.digest == digest)
                await learned(engine, digest)
        async with asyncio.timeout(60):
            tokens += [token async for item in rounds if isinstance(item, Round) for token in item.commit.ids]
        assert tokens == expected(PROMPT, 150)
        assert changes == ["one", "two", "three", "four"] and drafts.replicas[0].num_streams == 1


async def held(rounds: AsyncGenerator[Any, None]) -> Round:
    """The first round of a stream."""
    item = await anext(rounds)
    assert isinstance(item, Round)
    return item


async def learned(engine: GenerationEngine, digest: str) -> None:
    """What is learned of a pair is no other pair's."""
    known = engine.learned
    asked = GenerationRequest(token_ids=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=30))
    for _ in range(2):
        async for _ in engine.generate(asked):
            pass
        assert engine.learned is not None and engine.learned is not known and engine.learned.pair[1] == digest
    assert engine.learned is not None
    assert engine.learned.of_default[0].acceptance.first(1) != SharedStats(VerifyCosts()).acceptance.first(1)


async def test_a_request_that_waits_for_admission_runs_on_what_is_served_then(tmp_path: Path) -> None:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    target = ToyTarget(step_s=0.002)
    engine = GenerationEngine(Tokenizer.load(tmp_path), target, config=EngineConfig(max_active=1))

    async def ask(max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        async for _ in engine.generate(GenerationRequest(token_ids=PROMPT, sampling=sampling)):
            pass

    running = [asyncio.create_task(ask(count)) for count in (50, 5)]
    await until(lambda: target.opens and engine.admission.num_waiting)
    target.info = target_info(digest="d2")
    await asyncio.wait_for(asyncio.gather(*running), 30)
    assert [opened.model_digest for opened in target.opens] == ["d1", "d2"]


async def test_what_was_measured_of_a_model_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    profiles: list[Any] = []

    def noted(costs: Any, experts: Any = None) -> VerifyCosts:
        profiles.append(costs)
        return VerifyCosts(costs)

    monkeypatch.setattr(gateway_engine, "VerifyCosts", noted)
    target = ToyTarget()
    engine = GenerationEngine(Tokenizer.load(tmp_path), target, ToyDraft(), EngineConfig(mode="auto"))
    asked = GenerationRequest(token_ids=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=5))
    for digest, cost in (("d1", 100), ("d1", 100), ("d2", 900)):
        target.info = replace(target_info(digest=digest), step_costs=((1, cost),))
        assert [delta async for delta in engine.generate(asked)]
    assert profiles == [((1, 100),), ((1, 900),)]


class ChangingTarget(ToyTarget):
    """Whose weights change as a sequence comes. It is refused, placed nowhere since the gateway knows of the change, or
    refused at the moment at which the gateway hears of it."""

    def __init__(self, way: str) -> None:
        super().__init__(rule=new_rule, info=target_info(digest="d1"))
        self.way, self.asked = way, list[str]()

    def open(self, request: Any, on_event: Any, *more: Any, **named: Any) -> Any:
        self.asked.append(request.model_digest)
        if request.model_digest == "d2":
            return super().open(request, on_event, *more, **named)
        loop, changed = asyncio.get_running_loop(), partial(setattr, self, "info", target_info(digest="d2"))
        if self.way == "known" or self.info.model.digest == "d2":
            changed()
            return None
        loop.call_later(0.1, changed) if self.way == "refused" else loop.call_soon(changed)
        loop.call_soon(on_event, to_failure(0, Unavailable("another model's", reason=OTHER_MODEL)))
        return super().open(replace(request, sequence_id=0), lambda event: None, *more, **named)


@pytest.mark.parametrize("way", ["refused", "known", "refused and known"])
async def test_what_a_change_meets_as_it_is_opened_begins_anew(way: str, tmp_path: Path) -> None:
    """At once, and with the new weights alone; who asked for the old ones is told."""
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    asked = GenerationRequest(token_ids=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=6))
    config = EngineConfig(num_draft_tokens=0, away_wait_s=60)
    target = ChangingTarget(way)
    async with asyncio.timeout(10):
        engine = GenerationEngine(Tokenizer.load(tmp_path), target, config=config)
        deltas = [delta async for delta in engine.generate(asked)]
    assert [token for delta in deltas for token in delta.token_ids] == expected(PROMPT, 6, new_rule)
    assert deltas[0].model_digest == "d2" and target.asked[0] == "d1" and target.asked[-1] == "d2"
    engine = GenerationEngine(Tokenizer.load(tmp_path), ChangingTarget(way), config=config)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(10):
            assert [delta async for delta in engine.generate(replace(asked, model_digest="d1"))]


async def test_what_the_gateway_says_of_itself_follows(tmp_path: Path) -> None:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    async with Fleet(old()) as fleet, RemoteTargets(fleet.addresses, stream_config=QUICK) as targets:
        await targets.wait_usable()
        engine = GenerationEngine(Tokenizer.load(tmp_path), targets, config=EngineConfig(num_draft_tokens=0))
        asked = GenerationRequest(token_ids=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=10))
        for name in ("old", "new"):
            assert engine.model_name == name
            ids = [token for delta in [delta async for delta in engine.generate(asked)] for token in delta.token_ids]
            assert ids == expected(PROMPT, 10, RULES[name])
            await fleet.replace(0, new())
            await until(lambda: targets.usable and targets.info.model.name == "new")


EXACT = {"engine": "outrider", "kernels": "c-avx512", "batch_invariant": True}


async def connected(stack: AsyncExitStack, *servicers: TargetServicer) -> RemoteTargets:
    addresses = [(await stack.enter_async_context(serving(servicer))).address for servicer in servicers]
    targets = await stack.enter_async_context(RemoteTargets(addresses, stream_config=QUICK))
    await until(lambda: all(replica.usable for replica in targets.replicas))
    return targets


async def test_a_sequence_is_opened_at_its_weights_alone() -> None:
    async with AsyncExitStack() as stack:
        targets = await connected(stack, TargetServicer(ToyTarget()))
        assert targets.open(request(model_digest="d1"), print) is not None
        assert targets.open(request(model_digest="d9"), print) is None


async def test_replicas_that_compute_alike_are_preferred() -> None:
    same, other = target_info(**EXACT), target_info(**EXACT | {"kernels": "c-avx2"})
    one, two = TargetServicer(ToyTarget(info=same)), TargetServicer(ToyTarget(info=other))
    async with AsyncExitStack() as stack:
        targets = await connected(stack, one, two)
        opens = [replace(request(), prompt_ids=(number, 5, 9)) for number in range(1, 17)]
        for opened in opens:
            assert targets.open(opened, print, like=same.model.arithmetic) is not None
        await until(lambda: len(one.opens) == len(opens))
        assert not two.opens
        like = replace(same.model.arithmetic, kernels="triton-sm90")
        for opened in opens:  # nobody computes so: the others take it
            assert targets.open(opened, print, like=like) is not None
        await until(lambda: len(one.opens) + len(two.opens) == 2 * len(opens))
        assert two.opens


@pytest.mark.parametrize(
    ("second", "near_ties"),
    [(EXACT, False), (EXACT | {"kernels": "c-avx2"}, True), (EXACT | {"batch_invariant": False}, True)],
    ids=["equal", "other kernels", "by batch"],
)
async def test_failover_to_other_arithmetic_is_marked(second: dict[str, Any], near_ties: bool) -> None:
    servicers = [TargetServicer(ToyTarget(step_s=0.002, info=target_info(**fields))) for fields in (EXACT, second)]
    async with AsyncExitStack() as stack:
        targets = await connected(stack, *servicers)
        rounds: list[Round] = []

        async def collect() -> None:
            async for item in speculate(None, targets, request(60, model_digest="d1"), Policy(0)):
                assert isinstance(item, Round)
                rounds.append(item)

        task = asyncio.create_task(collect())
        await until(lambda: len(rounds) > 3)
        (busy,) = (servicer for servicer in servicers if servicer.opens)
        await busy.streams[0].close()
        await asyncio.wait_for(task, 30)
        assert all(servicer.opens for servicer in servicers)
    assert [token for closed in rounds for token in closed.commit.ids] == expected(PROMPT, 60)
    (moved,) = (closed.index for closed in rounds if closed.moved)
    assert moved > 3 and [closed.near_ties for closed in rounds] == [
        near_ties and closed.index >= moved for closed in rounds
    ]


async def test_near_ties_are_told_and_counted() -> None:
    target = ToyTarget(info=target_info(**EXACT))
    engine = GenerationEngine(toy_tokenizer(), target)
    metrics = measure(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    deltas = []
    async for delta in engine.generate(GenerationRequest(token_ids=PROMPT, sampling=sampling)):
        deltas.append(delta)
        if len(deltas) == 3:
            target.info = target_info(**EXACT | {"kernels": "c-avx2"})
            target.links[0].lose()
    assert [token for delta in deltas for token in delta.token_ids] == expected(PROMPT, 20)
    marks = [delta.near_ties for delta in deltas]
    assert not any(marks[:3]) and marks[-1] and marks == sorted(marks)
    assert [delta.model_digest for delta in deltas if delta.model_digest] == ["d1"]
    text = metrics.render("")[0].decode()
    assert 'outrider_target_failovers_total{output="near_ties"} 1.0' in text
    assert encode_delta(deltas[-1]).near_ties and not encode_delta(deltas[0]).near_ties
    assert extension_shape(join(deltas), False, False) == {"near_ties": True}


async def test_a_fingerprint_that_comes_back_is_compared() -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    async with gateway() as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        again = await client.post("/v1/completions", json=body | {"system_fingerprint": answer["system_fingerprint"]})
        assert again.status_code == 200 and again.json()["system_fingerprint"] == "fp_d1"
        refused = await client.post("/v1/completions", json=body | {"system_fingerprint": "fp_d9"})
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == "other_model"
        assert "d9" in error["message"] and "d1" in error["message"]


def test_a_target_that_committed_nothing_marks_nothing() -> None:
    same, other = target_info(**EXACT).model, target_info(**EXACT | {"kernels": "c-avx2"}).model
    core = SpeculationCore(request(), Policy(0))
    core.start(0.0)
    core.on_target_open(same)
    core.on_target(Commit(0, 3, (5,)), 0.0)
    core.on_target(Lost("gone"), 0.0)
    core.on_target_open(other)
    core.on_target(Lost("gone, too"), 0.0)
    core.on_target_open(same)
    (closed,) = (effect.round for effect in core.on_target(Commit(0, 4, (6,)), 0.0) if isinstance(effect, Emit))
    assert closed.moved and not closed.near_ties
