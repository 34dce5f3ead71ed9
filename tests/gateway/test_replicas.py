"""The circuit breaker, on a clock of the test's own.

What the addresses of a command line stand for, with a resolver of the test's own.

Replicas that come and go by name, over real gRPC on addresses of the loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import (
    PROMPT,
    QUICK,
    VOCAB,
    DraftServicer,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    expected,
    generate,
    request,
    serving,
    until,
)

from outrider.gateway.peers import replicas
from outrider.gateway.peers.addresses import Addresses, look_up
from outrider.gateway.peers.remote import TARGET_SERVICE, RemoteDrafts, RemoteTargets
from outrider.gateway.peers.replicas import (
    EVENTS_S,
    FIRST_OPEN_S,
    LOSSES_S,
    MAX_FAILURES,
    MAX_OPEN_S,
    Breaker,
    Replica,
    ReplicaLink,
)
from outrider.gateway.speculation.backends import Lost
from outrider.rpc.errors import Internal, InvalidArgument, Unavailable
from outrider.rpc.messages import Commit, Failure, ModelInfo, Open
from outrider.rpc.words.answer import TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason


def test_a_breaker_trips_rests_longer_each_time_and_closes() -> None:
    breaker = Breaker()
    breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert breaker.open and not breaker.allows(0.9 * FIRST_OPEN_S) and breaker.allows(FIRST_OPEN_S)
    breaker.started(FIRST_OPEN_S)
    assert not breaker.allows(1.5 * FIRST_OPEN_S)  # one trial at a time
    breaker.failed(1.5 * FIRST_OPEN_S)
    assert not breaker.allows(3.4 * FIRST_OPEN_S) and breaker.allows(3.5 * FIRST_OPEN_S)
    for _ in range(20):
        breaker.failed(100.0)
    assert breaker.allows(100.0 + MAX_OPEN_S)
    breaker.started(200.0)
    breaker.succeeded()
    assert breaker.allows(200.0) and not breaker.open


def test_a_trial_that_shows_nothing_is_followed_by_another() -> None:
    breaker = Breaker()
    for _ in range(MAX_FAILURES):
        breaker.failed(0.0)
    breaker.started(5.0)
    assert not breaker.allows(5.5) and breaker.allows(5.0 + FIRST_OPEN_S)


def test_one_break_of_many_sequences_is_one_rest_and_only_a_trial_doubles_it() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.started(0.0)
    for _ in range(10):
        breaker.failed(0.0)
    assert breaker.open and not breaker.allows(0.9 * FIRST_OPEN_S) and breaker.allows(FIRST_OPEN_S)
    breaker.started(FIRST_OPEN_S)
    for _ in range(10):  # the trial, and what else was still there
        breaker.failed(2 * FIRST_OPEN_S)
    assert not breaker.allows(3.9 * FIRST_OPEN_S) and breaker.allows(4 * FIRST_OPEN_S)


class Resolver:
    """Names and what they stand for; another name has no address."""

    def __init__(self, **hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if host not in self.hosts:
            raise OSError(f"no address for {host}")
        return self.hosts[host]


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (["127.0.0.1:5", ":6", "localhost:7"], ("127.0.0.1:5", ":6", "localhost:7")),
        (["10.0.0.1:5, 10.0.0.2:5", "10.0.0.1:5"], ("10.0.0.1:5", "10.0.0.2:5")),
        (["ipv4:10.0.0.1:5,10.0.0.2:6"], ("10.0.0.1:5", "10.0.0.2:6")),
        (["ipv6:[::1]:5,[fe80::2]:6", "unix:/run/x"], ("[::1]:5", "[fe80::2]:6", "unix:/run/x")),
        (["dns:///10.0.0.9:5"], ("10.0.0.9:5",)),
    ],
)
def test_addresses_stand_for_themselves(given: list[str], known: tuple[str, ...]) -> None:
    addresses = Addresses(given)
    assert addresses.complete and not addresses.names and addresses.known == known


@pytest.mark.parametrize("name", ["dns:///targets:50051", "dns:targets:50051", "targets:50051"])
async def test_every_address_of_a_name_is_one(name: str) -> None:
    resolver = Resolver(targets=["10.0.0.1", "fd00::2"])
    addresses = Addresses([f"10.0.0.7:5,{name}"], resolver)
    assert not addresses.complete and addresses.known == ("10.0.0.7:5",)
    await addresses.refresh(name)
    assert addresses.complete
    assert addresses.known == ("10.0.0.7:5", "10.0.0.1:50051", "[fd00::2]:50051")
    resolver.hosts["targets"] = ["10.0.0.3"]
    await addresses.refresh(name)
    assert addresses.known == ("10.0.0.7:5", "10.0.0.3:50051") and resolver.asked == [("targets", 50051)] * 2


async def test_a_name_without_an_answer_stands_for_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver(targets=["10.0.0.1"])
    addresses = Addresses(["dns:///targets:5", "dns:///drafts:6"], resolver)
    with caplog.at_level(logging.WARNING, "outrider.gateway"):
        for _ in range(3):
            for name in addresses.names:
                await addresses.refresh(name)
            assert addresses.known == ("10.0.0.1:5",) and addresses.complete
    assert [record.getMessage().split()[0] for record in caplog.records] == ["dns:///drafts:6"]  # said once
    del resolver.hosts["targets"]
    resolver.hosts["drafts"] = ["10.0.0.2"]
    for name in addresses.names:
        await addresses.refresh(name)
    assert addresses.known == ("10.0.0.1:5", "10.0.0.2:6")


@pytest.mark.parametrize(
    "given",
    [
        "targets",
        "dns:///targets",
        "dns:///targets:0",
        "dns://8.8.8.8/targets:5",
        "dns:///:5",
        "ipv4:targets:5",
        "a:1,,b:2",
    ],
)
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match="allowed: "):
        Addresses([given])


async def test_this_machines_resolver_knows_localhost() -> None:
    assert list(await look_up("localhost", 5)) == ["127.0.0.1"]


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
        assert made.replicas == []
        yield await stack.enter_async_context(made), resolver


async def test_every_address_of_a_name_is_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TargetServicer(ToyTarget()), TargetServicer(ToyTarget())
    async with two_behind_a_name(monkeypatch, one, two) as (targets, _):
        assert await asyncio.wait_for(targets.wait_attempted(), 30) is None
        assert [replica.address.rpartition(":")[0] for replica in targets.replicas if replica.usable] == HOSTS
        for _ in range(4):
            assert targets.open(request(), print) is not None
        await until(lambda: len(one.opens) + len(two.opens) == 4)
        assert one.opens and two.opens


async def test_a_gone_address_keeps_its_sequences_and_a_new_one_gets_some(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TargetServicer(ToyTarget(step_s=0.2)), TargetServicer(ToyTarget())
    async with two_behind_a_name(monkeypatch, one, two) as (targets, resolver):
        resolver.hosts["targets"] = HOSTS[:1]
        await asyncio.wait_for(targets.wait_usable(), 30)
        task = asyncio.create_task(generate(None, targets, request(120)))
        await until(lambda: one.opens)
        resolver.hosts["targets"] = HOSTS[1:]
        await until(lambda: len(targets.replicas) == 2 and targets.replicas[0].usable)  # in the order of the addresses
        assert [replica.retired for replica in targets.replicas] == [False, True]
        assert await generate(None, targets, request(20)) == expected(PROMPT, 20) and len(two.opens) == 1
        one.toy.step_s = 0.0
        assert await asyncio.wait_for(task, 30) == expected(PROMPT, 120) and len(one.opens) == 1
        await until(lambda: len(targets.replicas) == 1 and one.streams[0].closed)
        assert targets.usable and not two.streams[0].closed


async def test_an_address_that_returns_before_its_last_sequence_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = TargetServicer(ToyTarget(step_s=0.2)), TargetServicer(ToyTarget())
    async with two_behind_a_name(monkeypatch, one, two) as (targets, resolver):
        resolver.hosts["targets"] = HOSTS[:1]
        await asyncio.wait_for(targets.wait_usable(), 30)
        task = asyncio.create_task(generate(None, targets, request(120)))
        await until(lambda: one.opens)
        (replica,) = targets.replicas
        resolver.hosts["targets"] = []
        await until(lambda: not targets.usable)
        del resolver.hosts["targets"]  # no answer changes nothing
        await asyncio.sleep(0.05)
        assert targets.replicas == [replica] and replica.retired
        resolver.hosts["targets"] = HOSTS[:1]
        await until(lambda: targets.usable)
        one.toy.step_s = 0.0
        assert await asyncio.wait_for(task, 30) == expected(PROMPT, 120) and len(one.streams) == 1


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
            await asyncio.wait_for(targets.wait_usable(), 30)
            assert await asyncio.wait_for(targets.wait_attempted(), 30) is None
            resolver.hosts["targets"] = HOSTS[1:]
            await until(lambda: [replica.address for replica in targets.replicas] == [f"{HOSTS[1]}:{port}"])
            resolver.hosts["targets"] = []
            await until(lambda: not targets.replicas)
            resolver.let.set()
            await until(lambda: targets.replicas)


async def test_targets_may_be_met_before_the_last_name_is_looked_up() -> None:
    resolver = SlowResolver()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(TargetServicer(ToyTarget())))
        given = [server.address, "slow:5"]
        targets = await stack.enter_async_context(RemoteTargets(given, stream_config=QUICK, lookup=resolver))
        await until(lambda: targets.replicas[0].usable)
        assert not targets.usable  # the name may stand for more targets of another model
        resolver.let.set()
        await until(lambda: targets.usable)


async def test_nobody_waits_for_an_attempt_at_an_address_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RESOLVE_S", 0.02)
    resolver = Resolver(targets=HOSTS[:1])
    with socket.create_server((HOSTS[0], 0)) as mute:
        name = f"targets:{mute.getsockname()[1]}"
        async with RemoteTargets([name], stream_config=QUICK, lookup=resolver) as targets:
            waiting = asyncio.create_task(targets.wait_attempted())
            await until(lambda: targets.replicas)
            await asyncio.sleep(0.01)
            resolver.hosts["targets"] = []
            assert await asyncio.wait_for(waiting, 30) is None and not targets.replicas


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
        await until(lambda: all(replica.usable for replica in targets.replicas))
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
        await until(lambda: sum(replica.usable for replica in targets.replicas) == 1)
        bad.refuse = None
        assert await generate(None, targets, request(5)) == expected(PROMPT, 5)  # better than none


NO_COMMITS: dict[str, Callable[[Commit], Commit]] = {
    "an id of no token": lambda commit: replace(commit, ids=(VOCAB,)),
    "more ids than any window": lambda commit: replace(commit, ids=(7,) * 2000, origins=()),
    "more ids than may come": lambda commit: replace(commit, ids=(7,) * 60, origins=()),
    "at another position": lambda commit: replace(commit, position=commit.position + 1),
    "origins of others": lambda commit: replace(commit, origins=commit.origins * 3),
    "log probabilities of others": lambda commit: replace(commit, logprobs=((TokenLogprob(7, -1.0, 1),),) * 3),
    "more accepted than drafted": lambda commit: replace(commit, num_drafted=3, num_accepted=4),
    "drafted without end": lambda commit: replace(commit, num_drafted=2**32 - 1, num_accepted=2**32 - 1),
    "forced without end": lambda commit: replace(commit, num_forced=2**32 - 1),
    "an origin that there is not": lambda commit: replace(commit, origins=(99,)),  # type: ignore[arg-type]
    "an end, with an id of no token": lambda commit: replace(commit, ids=(VOCAB,), finish_reason=FinishReason.STOP),
}


class BrokenTarget(TargetServicer):
    """Its third commit, and every one behind it, is none."""

    def __init__(self, spoil: Callable[[Commit], Commit]) -> None:
        super().__init__(ToyTarget())
        self._spoil, self._num_commits = spoil, 0

    def start(self, request: Open, sequences: dict[int, Any], emit: Callable[[Any], None]) -> Any:
        def spoilt(event: Any) -> None:
            self._num_commits += isinstance(event, Commit)
            emit(self._spoil(event) if isinstance(event, Commit) and self._num_commits > 2 else event)

        return super().start(request, sequences, spoilt)


@pytest.mark.parametrize("name", NO_COMMITS)
async def test_what_is_no_commit_ends_its_sequence_there_and_no_other(name: str) -> None:
    """It goes on at another target as if nothing had been, and so does what shares the stream."""
    broken, sound = BrokenTarget(NO_COMMITS[name]), TargetServicer(ToyTarget())
    async with serving(broken) as one, serving(sound) as other, RemoteTargets([one.address, other.address]) as targets:
        await until(lambda: all(replica.usable for replica in targets.replicas))
        prompts = [(number + 5, 9, 7) for number in range(24)]
        asked = [generate(None, targets, replace(request(40), prompt_ids=prompt), 0) for prompt in prompts]
        assert await asyncio.gather(*asked) == [expected(prompt, 40) for prompt in prompts]
        assert broken.opens, "nothing was asked of it"
        replica = next(replica for replica in targets.replicas if replica.address == one.address)
        await until(lambda: not replica.num_sequences)


async def test_what_is_no_commit_counts_against_the_target() -> None:
    """Alone it is asked as often as a target that dies, and then the request ends with its name."""
    broken = BrokenTarget(NO_COMMITS["an id of no token"])
    async with serving(broken) as one, RemoteTargets([one.address]) as targets:
        await until(lambda: targets.usable)
        with pytest.raises(Unavailable, match=r"target 127.0.0.1:\d+: commit.ids\[0\]: is 400"):
            await generate(None, targets, request(40), 0)
        assert targets.replicas[0].breaker.open
        await until(lambda: len(broken.closes) == len(broken.opens) > 1)
        assert len(broken.streams) == 1 and not broken.streams[0].closed, "others' sequences go on there"


async def test_what_a_step_says_of_many_sequences_is_told_in_turns_and_all_of_it_before_a_loss() -> None:
    replica = Replica("a:1", TARGET_SERVICE, lambda info: None, lambda: None)
    stream: Any = SimpleNamespace(error=None, send=lambda *messages: None)
    told: list[tuple[int, Any]] = []
    for number in range(8):

        def on_event(event: Any, number: int = number) -> None:
            end = time.monotonic() + EVENTS_S
            while time.monotonic() < end:
                pass
            told.append((number, event))

        ReplicaLink(replica.links, stream, number, on_event, ModelInfo("m", "d", 9, 9), request())
    commits: list[Any] = [Commit(number, position, (1,)) for position in (3, 4) for number in range(8)]
    replica._on_messages(commits[:8])
    replica._on_messages(commits[8:])
    for count in range(1, 13):
        assert told == [(commit.sequence_id, commit) for commit in commits[:count]]
        await asyncio.sleep(0)
    replica._lose("gone")
    assert told[:16] == [(commit.sequence_id, commit) for commit in commits] and isinstance(told[16][1], Lost)


async def test_losses_are_told_in_turns_and_prompts_that_begin_alike_together() -> None:
    """What goes on at other replicas does not wait until hundreds of sequences were opened again."""
    replica = Replica("a:1", TARGET_SERVICE, lambda info: None, lambda: None)
    stream: Any = SimpleNamespace(error=None, send=lambda *messages: None)
    told: list[Open] = []
    for number in range(24):
        opened = replace(request(), prompt_ids=(number % 3, 7, number))

        def on_event(event: Lost, opened: Open = opened) -> None:
            end = time.monotonic() + LOSSES_S
            while time.monotonic() < end:
                pass
            told.append(opened)

        ReplicaLink(replica.links, stream, number, on_event, ModelInfo("m", "d", 9, 9), opened)
    replica._tell_lost("gone")
    assert not replica.num_sequences, "nothing is sent to any of them any more"
    for count in range(1, 25):
        assert len(told) == count
        await asyncio.sleep(0)
    assert [opened.prompt_ids[0] for opened in told] == [0] * 8 + [1] * 8 + [2] * 8


async def test_who_has_closed_a_link_is_not_told_that_it_is_lost() -> None:
    """The replica is lost, others are told so first, and meanwhile the sequence goes on without it."""
    replica = Replica("a:1", TARGET_SERVICE, lambda info: None, lambda: None)
    stream: Any = SimpleNamespace(error=None, send=lambda *messages: None)
    told: list[int] = []
    links: list[ReplicaLink] = []
    for number in range(3):

        def on_event(event: Lost, number: int = number) -> None:
            end = time.monotonic() + LOSSES_S
            while time.monotonic() < end:
                pass
            told.append(number)

        links.append(ReplicaLink(replica.links, stream, number, on_event, ModelInfo("m", "d", 9, 9), request()))
    replica._tell_lost("gone")
    links[1].close()
    await until(lambda: 2 in told)
    assert told == [0, 2]
