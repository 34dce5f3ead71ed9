"""Replicas that come and go by name, over real gRPC on addresses of the loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from gateway.test_addresses import Resolver
from gateway.test_remote import PROMPT, generate, request
from gateway.toys import QUICK, DraftServicer, TargetServicer, ToyDraft, ToyTarget, expected, serving, until

from outrider.gateway.peers import replicas
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.peers.replicas import MAX_FAILURES
from outrider.rpc.errors import Internal, InvalidArgument
from outrider.rpc.messages import Failure

HOSTS = ["127.0.0.1", "127.0.0.2"]


@asynccontextmanager
async def two_behind_a_name(
    monkeypatch: pytest.MonkeyPatch, one: Any, two: Any
) -> AsyncIterator[tuple[RemoteTargets, Resolver]]:
    monkeypatch.setattr(replicas, "RESOLVE_S", 0.02)
    resolver = Resolver(targets=HOSTS)
    async with AsyncExitStack() as stack:
        address = (await stack.enter_async_context(serving(one))).address
        port = address.rpartition(":")[2]
        await stack.enter_async_context(serving(two, f"{HOSTS[1]}:{port}"))
        made = RemoteTargets([f"dns:///targets:{port}"], stream_config=QUICK, lookup=resolver)
        assert made.peers == []
        yield await stack.enter_async_context(made), resolver


async def test_every_address_of_a_name_is_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    async with two_behind_a_name(monkeypatch, one, two) as (targets, _):
        assert await asyncio.wait_for(targets.wait_attempted(), 5) is None
        assert [peer.address.rpartition(":")[0] for peer in targets.peers if peer.usable] == HOSTS
        for _ in range(4):
            assert targets.open(request(), print) is not None
        await until(lambda: len(one.opens) + len(two.opens) == 4)
        assert one.opens and two.opens


async def test_a_gone_address_keeps_its_sequences_and_a_new_one_gets_some(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TargetServicer(ToyTarget(step_s=0.003)), TargetServicer(ToyTarget(step_s=0.003))
    async with two_behind_a_name(monkeypatch, one, two) as (targets, resolver):
        resolver.hosts["targets"] = HOSTS[:1]
        await asyncio.wait_for(targets.wait_usable(), 5)
        task = asyncio.create_task(generate(None, targets, request(120)))
        await until(lambda: one.opens)
        resolver.hosts["targets"] = HOSTS[1:]
        await until(lambda: len(targets.peers) == 2 and targets.peers[0].usable)  # in the order of the addresses
        assert [peer.retired for peer in targets.peers] == [False, True]
        assert await generate(None, targets, request(20)) == expected(PROMPT, 20) and len(two.opens) == 1
        assert await asyncio.wait_for(task, 5) == expected(PROMPT, 120) and len(one.opens) == 1
        await until(lambda: len(targets.peers) == 1 and one.streams[0].closed)
        assert targets.usable and not two.streams[0].closed


async def test_an_address_that_returns_before_its_last_sequence_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TargetServicer(ToyTarget(step_s=0.003)), TargetServicer(ToyTarget())
    async with two_behind_a_name(monkeypatch, one, two) as (targets, resolver):
        resolver.hosts["targets"] = HOSTS[:1]
        await asyncio.wait_for(targets.wait_usable(), 5)
        task = asyncio.create_task(generate(None, targets, request(120)))
        await until(lambda: one.opens)
        (peer,) = targets.peers
        resolver.hosts["targets"] = []
        await until(lambda: not targets.usable)
        del resolver.hosts["targets"]  # no answer changes nothing
        await asyncio.sleep(0.05)
        assert targets.peers == [peer] and peer.retired
        resolver.hosts["targets"] = HOSTS[:1]
        await until(lambda: targets.usable)
        assert await asyncio.wait_for(task, 5) == expected(PROMPT, 120) and len(one.streams) == 1


class SlowResolver(Resolver):
    """Answers for "slow" when it is let."""

    def __init__(self, **hosts: Sequence[str]) -> None:
        super().__init__(**hosts)
        self.let = asyncio.Event()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        if host == "slow":
            await self.let.wait()
        return await super().__call__(host, port)


async def test_a_name_with_a_slow_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESOLVE_S", 0.02)
    monkeypatch.setattr(replicas, "START_S", 0.05)
    resolver = SlowResolver(targets=HOSTS[:1], slow=HOSTS[1:])
    async with serving(TargetServicer(ToyTarget())) as server:
        port = server.address.rpartition(":")[2]
        names = [f"targets:{port}", f"slow:{port}"]
        async with RemoteTargets(names, stream_config=QUICK, lookup=resolver) as targets:
            await asyncio.wait_for(targets.wait_usable(), 2)
            assert await asyncio.wait_for(targets.wait_attempted(), 2) is None
            resolver.hosts["targets"] = HOSTS[1:]
            await until(lambda: [peer.address for peer in targets.peers] == [f"{HOSTS[1]}:{port}"], 2)
            resolver.hosts["targets"] = []
            await until(lambda: not targets.peers, 2)
            resolver.let.set()
            await until(lambda: targets.peers, 2)


async def test_targets_may_be_met_before_the_last_name_is_looked_up() -> None:
    resolver = SlowResolver()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(TargetServicer(ToyTarget())))
        given = [server.address, "slow:5"]
        targets = await stack.enter_async_context(RemoteTargets(given, stream_config=QUICK, lookup=resolver))
        await until(lambda: targets.peers[0].usable)
        assert not targets.usable  # the name may stand for more targets of another model
        resolver.let.set()
        await until(lambda: targets.usable, 1)


async def test_nobody_waits_for_an_attempt_at_an_address_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESOLVE_S", 0.02)
    resolver = Resolver(targets=HOSTS[:1])
    with socket.create_server((HOSTS[0], 0)) as mute:
        name = f"targets:{mute.getsockname()[1]}"
        async with RemoteTargets([name], stream_config=QUICK, lookup=resolver) as targets:
            waiting = asyncio.create_task(targets.wait_attempted())
            await until(lambda: targets.peers)
            await asyncio.sleep(0.01)
            resolver.hosts["targets"] = []
            assert await asyncio.wait_for(waiting, 2) is None and not targets.peers


async def test_drafts_have_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DraftServicer(ToyDraft())
    async with serving(draft) as server:
        port = server.address.rpartition(":")[2]
        async with RemoteDrafts([f"drafts:{port}"], stream_config=QUICK, lookup=Resolver(drafts=HOSTS[:1])) as drafts:
            assert await drafts.wait_attempted() is None and drafts.usable
    with pytest.raises(InvalidArgument, match="'nonsense'"):
        RemoteDrafts(["nonsense"])


async def test_a_target_that_fails_again_and_again_is_passed_over_while_there_is_another() -> None:
    servicers = [TargetServicer(ToyTarget()), TargetServicer(ToyTarget())]
    async with AsyncExitStack() as stack:
        places = [(await stack.enter_async_context(serving(servicer))).address for servicer in servicers]
        targets = await stack.enter_async_context(RemoteTargets(places, stream_config=QUICK))
        await until(lambda: all(peer.usable for peer in targets.peers))
        await generate(None, targets, request(5))
        bad, good = servicers if servicers[0].opens else servicers[::-1]  # where the prompt sends it
        bad.refuse = Failure(0, 13, "NaN in a row")
        for _ in range(MAX_FAILURES):
            with pytest.raises(Internal, match="NaN"):
                await generate(None, targets, request(5))
        for _ in range(3):
            assert await generate(None, targets, request(5)) == expected(PROMPT, 5)
        assert len(good.opens) == 3
        good.streams[0].drain()
        await until(lambda: sum(peer.usable for peer in targets.peers) == 1)
        bad.refuse = None
        assert await generate(None, targets, request(5)) == expected(PROMPT, 5)  # better than none
