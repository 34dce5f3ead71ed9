"""How much work runs and waits: what is refused and when to come back, who comes first, what one caller may have, and
that who gives up waiting leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from support.fakes import ToyTarget, target_info, until
from support.gateways import PROMPT, gateway, toy_tokenizer

from outrider.client import Client
from outrider.gateway.admission import Admission, AdmissionCost
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http.serving import AdmissionGroup
from outrider.gateway.settings import GatewaySettings
from outrider.rpc.errors import InvalidArgument, OutriderError, ResourceExhausted
from outrider.rpc.words.request import GenerationRequest

ONE = AdmissionCost(1, 10)


async def test_cancelled_waits_leave_nothing_and_the_one_that_stays_gets_its_place() -> None:
    admission = Admission(max_active=1, max_waiting=10)
    await admission.enter(ONE)
    stays = asyncio.create_task(admission.enter(ONE))
    for _ in range(1000):
        waits = asyncio.create_task(admission.enter(ONE, priority=1))
        await asyncio.sleep(0)
        waits.cancel()
        with suppress(asyncio.CancelledError):
            await waits
    assert admission._queue.num_waiting == 1 and (admission.num_waiting, admission.num_tokens) == (1, 20)
    admission.leave(ONE)
    await asyncio.wait_for(stays, 30)
    admission.leave(ONE)
    assert admission.num_active == admission.num_tokens == 0 and not admission._queue.num_waiting


async def test_sequences_are_counted_not_requests() -> None:
    admission = Admission(max_active=4, max_waiting=4)
    await admission.enter(AdmissionCost(3, 30))
    large = asyncio.create_task(admission.enter(AdmissionCost(2, 20)))
    small = asyncio.create_task(admission.enter(ONE))
    await asyncio.sleep(0)
    assert (admission.num_active, admission.num_waiting) == (3, 3), "who came later has overtaken"
    admission.leave(ONE)  # one of three completions has ended
    await large
    assert (admission.num_active, admission.num_waiting) == (4, 1)
    with pytest.raises(ResourceExhausted, match=r"9 sequences .* at most 8 sequences \(max_active and max_") as busy:
        admission.require_room(AdmissionCost(4, 1))
    assert busy.value.retry_after_ms > 0 and busy.value.reason == "TOO_MANY_SEQUENCES"
    with pytest.raises(InvalidArgument, match="n: asks for 9 completions; allowed: at most 8"):
        admission.require_room(AdmissionCost(9, 1))
    small.cancel()


async def test_a_request_of_more_sequences_than_may_run_runs_alone() -> None:
    admission = Admission(max_active=2, max_waiting=6)
    await admission.enter(ONE)
    large = asyncio.create_task(admission.enter(AdmissionCost(5, 5)))
    await asyncio.sleep(0)
    assert admission.num_active == 1
    admission.leave(ONE)
    await asyncio.wait_for(large, 30)
    assert admission.num_active == 5


async def test_tokens_are_counted() -> None:
    admission = Admission(max_active=8, max_waiting=8, max_tokens=lambda: 100)
    await admission.enter(AdmissionCost(1, 60))
    with pytest.raises(ResourceExhausted, match=r"110 tokens running.*100 tokens \(max_admitted_tokens\)") as busy:
        await admission.enter(AdmissionCost(1, 50))
    assert busy.value.retry_after_ms > 0 and busy.value.reason == "TOO_MANY_TOKENS"
    with pytest.raises(InvalidArgument, match=r"sampling\.max_tokens: asks for 101 tokens in all"):
        await admission.enter(AdmissionCost(1, 101))
    admission.leave(AdmissionCost(1, 60))
    await admission.enter(AdmissionCost(1, 100))


async def together(admission: Admission, works: Sequence[AdmissionCost]) -> list[OutriderError | None]:
    group = AdmissionGroup(admission, len(works))
    return await asyncio.gather(*map(group.enter, works), return_exceptions=True)  # type: ignore[return-value]


async def test_a_party_is_admitted_or_refused_as_one() -> None:
    admission = Admission(max_active=4, max_waiting=2, max_tokens=lambda: 100)
    assert await together(admission, [ONE] * 3) == [None] * 3
    refusals = await together(admission, [AdmissionCost(1, 1)] * 4)
    assert all(isinstance(refusal, ResourceExhausted) for refusal in refusals) and admission.num_waiting == 0
    refusals = await together(admission, [AdmissionCost(1, 40)] * 3)
    assert all(isinstance(refusal, InvalidArgument) for refusal in refusals) and admission.num_tokens == 30


async def test_who_leaves_a_party_before_its_decision_is_not_reserved_for() -> None:
    admission = Admission(max_active=4, max_waiting=4)
    group = AdmissionGroup(admission, 2)
    leaves = asyncio.create_task(group.enter(ONE))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    await asyncio.wait_for(group.enter(AdmissionCost(1, 5)), 30)
    assert (admission.num_active, admission.num_waiting, admission.num_tokens) == (1, 0, 5)


async def test_who_leaves_a_party_gives_its_place_back() -> None:
    for turns in range(4):
        admission = Admission(max_active=1, max_waiting=2)
        group = AdmissionGroup(admission, 3)
        tasks = [asyncio.create_task(group.enter(ONE)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if end is None:
                admission.leave(ONE)
        assert (admission.num_active, admission.num_waiting, admission.num_tokens) == (0, 0, 0), turns


class Crowd:
    """Callers of one Admission: each waits beside the test, and notes its turn."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.turns, self.tasks = admission, list[str](), list[asyncio.Task[None]]()

    async def come(self, caller: str, num_tokens: int = 10, priority: int = 0) -> AdmissionCost:
        work = AdmissionCost(1, num_tokens, caller)
        self.admission.reserve(work)
        self.tasks.append(asyncio.create_task(self._wait(work, priority)))
        await asyncio.sleep(0)
        return work

    async def _wait(self, work: AdmissionCost, priority: int) -> None:
        await self.admission.wait_turn(work, priority)
        self.turns.append(work.caller)

    async def leave(self, *works: AdmissionCost) -> None:
        for work in works:
            self.admission.leave(work)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def go(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_caller_has_a_share_of_what_others_leave() -> None:
    """So that who comes next finds room, whoever came before."""
    admission = Admission(max_active=8, max_waiting=8, share=0.75)
    crowd = Crowd(admission)
    for _ in range(12):
        await crowd.come("a")
    with pytest.raises(
        ResourceExhausted, match=r"caller would have 13 sequences .* at most 12 sequences, its share"
    ) as no:
        await crowd.come("a")
    assert no.value.reason == "CALLER_SHARE" and no.value.retry_after_ms > 0
    ways = ("tokens", "cache_salt", "caller_share", "max_waiting", "max_admitted_tokens")
    assert all(way in no.value.message.partition(". For more: ")[2] for way in ways)
    for _ in range(3):
        await crowd.come("b")
    with pytest.raises(ResourceExhausted, match=r"caller would have 4 sequences .* at most 3 sequences"):
        await crowd.come("b")
    await crowd.come("c")  # who has none may have the last place
    with pytest.raises(ResourceExhausted, match="there would be 17 sequences"):
        await crowd.come("d")
    assert admission.num_active == 8 and admission.num_waiting == 8
    await crowd.go()
    assert admission.num_waiting == 0


async def test_a_backend_is_one_host_and_its_users_chats_wait() -> None:
    """By default 300 of them, each of a whole context; who comes next has the next place."""
    target = ToyTarget(info=target_info(max_model_len=1024))
    share = GatewaySettings.model_fields["caller_share"].default
    engine = GenerationEngine(toy_tokenizer(), target, config=EngineConfig(caller_share=share))
    admission, chat = engine.admission, AdmissionCost(1, 1024, "backend")
    chats = [asyncio.create_task(admission.enter(chat)) for _ in range(300)]
    other = asyncio.create_task(admission.enter(AdmissionCost(1, 1024, "other")))
    await asyncio.sleep(0)
    assert (admission.num_active, admission.num_waiting) == (64, 237)
    with pytest.raises(ResourceExhausted, match="caller would have"):
        admission.require_room(AdmissionCost(100, 100 * 1024, "backend"))
    admission.leave(chat)
    await asyncio.wait_for(other, 30)
    assert sum(task.done() for task in chats) == 64
    for task in chats:
        task.cancel()
    await asyncio.gather(*chats, return_exceptions=True)


async def test_a_share_is_of_tokens_too() -> None:
    admission = Admission(max_active=8, max_waiting=8, max_tokens=lambda: 100, share=0.5)
    crowd = Crowd(admission)
    first = await crowd.come("a", 80)  # alone it may be larger than its share
    with pytest.raises(ResourceExhausted, match=r"caller would have 81 tokens .* at most 50 tokens"):
        await crowd.come("a", 1)
    await crowd.come("b", 20)
    await crowd.leave(first)
    await crowd.come("a", 40)
    with pytest.raises(ResourceExhausted, match=r"caller would have 41 tokens .* at most 40 tokens"):
        await crowd.come("a", 1)


async def test_who_comes_later_is_let_in_before_the_backlog_of_another() -> None:
    admission = Admission(max_active=1, max_waiting=20)
    crowd = Crowd(admission)
    for caller in ["heavy"] * 6 + ["light"] * 2:
        await crowd.come(caller)
    for _ in range(5):
        await crowd.leave(AdmissionCost(1, 10, crowd.turns[-1]))
    assert crowd.turns == ["heavy", "heavy", "light", "heavy", "light", "heavy"]
    await crowd.go()


async def test_who_runs_more_than_its_share_is_let_in_behind_all_others() -> None:
    """However it came by that, as when nobody else was there: its places are others' as they come free. A place that
    nobody else waits for is still its own."""
    admission = Admission(max_active=8, max_waiting=40, share=0.75)
    crowd = Crowd(admission)
    mine = [await crowd.come("a", priority=-5) for _ in range(12)]
    assert admission.num_active == 8 and crowd.turns == ["a"] * 8
    for caller in ("b", "c", "b"):
        await crowd.come(caller, 1000)
    await crowd.leave(*mine[:2])
    assert crowd.turns[8:] == ["b", "c"]
    await crowd.leave(mine[2])  # 5 of it run: the next is within its share
    assert crowd.turns[10:] == ["a"]
    await crowd.leave(mine[3])
    assert crowd.turns[11:] == ["a"]
    await crowd.come("d", 1000)
    await crowd.leave(mine[4])
    assert crowd.turns[12:] == ["a"], "6 of 8 are its share"
    await crowd.go()


async def test_who_is_alone_has_all_that_may_run() -> None:
    admission = Admission(max_active=4, max_waiting=20, share=0.5)
    crowd = Crowd(admission)
    works = [await crowd.come("a") for _ in range(12)]
    assert admission.num_active == 4
    for work in works[:8]:
        await crowd.leave(work)
        assert admission.num_active == 4
    await crowd.leave(*works[8:])
    assert not admission._num_running and not admission._of_callers


async def test_what_runs_is_bounded_by_tokens_and_no_small_one_starves_a_large_one() -> None:
    admission = Admission(max_active=8, max_waiting=8, max_running_tokens=lambda: 100)
    crowd = Crowd(admission)
    first = [await crowd.come("a", 40), await crowd.come("a", 40)]
    await crowd.come("large", 70)
    await crowd.come("small", 5)  # there would be room for it
    assert crowd.turns == ["a", "a"] and admission.num_waiting == 2
    await crowd.leave(first[0])
    assert crowd.turns == ["a", "a"]
    await crowd.leave(first[1])
    assert crowd.turns == ["a", "a", "large", "small"]
    huge = Admission(max_active=8, max_waiting=8, max_running_tokens=lambda: 100)
    await asyncio.wait_for(huge.enter(AdmissionCost(1, 500)), 30)  # alone it runs


async def test_who_is_refused_is_told_a_time_by_the_measured_rate() -> None:
    now = [0.0]
    admission = Admission(max_active=4, max_waiting=0, max_tokens=lambda: 100, clock=lambda: now[0])
    waits_ms = []

    def refused(work: AdmissionCost) -> int:
        with pytest.raises(ResourceExhausted) as raised:
            admission.require_room(work)
        return raised.value.retry_after_ms

    for _ in range(4):
        await admission.enter(ONE)
    assert refused(ONE) == 1000, "nothing is known yet"
    for _ in range(8):  # one of 10 tokens leaves every 3 s
        now[0] += 3
        admission.leave(ONE)
        await admission.enter(ONE)
    waits_ms = [refused(ONE) for _ in range(3)]
    assert waits_ms == [3000, 6000, 9000], "each has a time of its own"
    for _ in range(4):
        now[0] += 3
        admission.leave(ONE)
    now[0] += 1000  # nobody is there: that says nothing of how long work takes
    await admission.enter(AdmissionCost(1, 80))
    assert refused(AdmissionCost(1, 40)) == 6000, "20 tokens are to leave first"
    now[0] += 1e6
    assert refused(AdmissionCost(1, 40)) == 60_000


def test_a_credential_comes_before_a_salt_and_that_before_the_host() -> None:
    """And nobody takes another's share by its name in another field."""
    accounts = [
        GenerationRequest(caller="x", salt="y", peer="z").account,
        GenerationRequest(salt="x", peer="z").account,
        GenerationRequest(peer="x").account,
        GenerationRequest().account,
    ]
    assert accounts == ["caller x", "salt x", "peer x", ""]


async def test_requests_of_both_interfaces_share_by_salt_or_host() -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "cache_salt": "heavy"}
    async with gateway(ToyTarget(step_s=0.02), max_active=1) as served, served.client() as http:
        heavy = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(4)]
        await until(lambda: served.engine.admission.num_waiting == 3)
        async with Client(served.grpc_address) as grpc:
            async for _ in grpc.generate(token_ids=PROMPT, max_tokens=2, salt="light"):
                pass
            assert [opened.salt for opened in served.target.opens].index("light") <= 2
            assert all(answer.status_code == 200 for answer in await asyncio.gather(*heavy))
            nameless = asyncio.create_task(http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 20}))
            await until(lambda: served.engine.admission.num_active == 1)
            async for _ in grpc.generate(token_ids=PROMPT, max_tokens=2):
                assert not served.engine.admission._of_callers.keys() - {"peer 127.0.0.1"}
            await nameless
