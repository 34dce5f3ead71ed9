"""Very many requests at a target, a draft and a gateway in this process: real services with tiny random models, over
the loopback. They are of every kind, given up at random points, and their streams break. In between all rests, and what
lives then is counted: what the services hold, the project's own objects by class, Python's memory, tasks, descriptors,
threads. Where one request in a hundred keeps an object, that shows."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
from chaos.proxy import FaultProxy
from chaos.resources import descriptors_of, threads_of
from support.deployment import Deployment, deployed

from outrider.rpc.messages import Open
from outrider.rpc.servicer import Deliver, Detach
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

NUM_AT_ONCE, ROUNDS = 24, 12
BREAKS_EVERY = 150  # requests, on average, until a connection between two services is cut
METHODS = "ngram,draft_model"
# Caches of the services are full after the first rounds: prefixes, compiled constraints, the controller's windows.
WARM_ROUNDS = 3
SPARE_OBJECTS = 16  # of a class: a stream that opens again brings some of its own
# What a gateway measures is kept by kinds of requests, methods, choices and number of sequences: bounded
# (tests/gateway/test_learning.py). These requests had 4,451 objects of them after 1,200, 3,032 after 300. Before
# kinds were apart there were 5,202 after 100,000; so many have not been asked since.
MEASURED = ("outrider.planner.", "outrider.gateway.speculation.contest.")
MOST_MEASURED, MEASURED_BLOCKS = 8000, 4  # objects, and what of Python's memory one is
SPARE_TASKS, SPARE_DESCRIPTORS, SPARE_THREADS = 8, 8, 16
# Allocated blocks of Python's memory: a list, a tuple or an int above 256 is one, so that a kept request is hundreds.
KEPT_BLOCKS = 1.0  # a request
NOISE_BLOCKS = 4000
QUIET_S, ENDS_S = 30.0, 120.0
REGEX = "([a-e]{1,3} ){2,6}"


@dataclass(frozen=True)
class Census:
    """What lives while nothing is asked."""

    num_requests: int
    objects: Counter[str]  # instances of the project's own classes
    blocks: int
    tasks: int
    descriptors: int
    threads: int

    @classmethod
    async def take(cls, num_requests: int) -> Census:
        """Of now, without what only the collector has to find; generators that it finds end in a turn of the loop."""
        gc.collect()
        await asyncio.sleep(0.05)
        gc.collect()
        kinds = (type(one) for one in gc.get_objects())
        objects = Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if _is_ours(kind))
        pid = os.getpid()
        living = len(asyncio.all_tasks()), descriptors_of(pid), threads_of(pid)
        return cls(num_requests, objects, sys.getallocatedblocks(), *living)

    @property
    def num_measured(self) -> int:
        """Objects of what a gateway measures."""
        return sum(count for name, count in self.objects.items() if name.startswith(MEASURED))

    def problems(self, before: Census) -> list[str]:
        """What there is more of than before."""
        since = f"after {self.num_requests - before.num_requests} requests"
        found = [
            f"{count} of {name} live {since}, and {before.objects[name]} did"
            for name, count in self.objects.items()
            if count > before.objects[name] + SPARE_OBJECTS and not name.startswith(MEASURED)
        ]
        measured = self.num_measured
        found += [f"{measured} objects of measurements live"] if measured > MOST_MEASURED else []
        for what, spare in (
            ("tasks", SPARE_TASKS),
            ("descriptors", SPARE_DESCRIPTORS),
            ("threads", SPARE_THREADS),
        ):
            if getattr(self, what) > getattr(before, what) + spare:
                found.append(f"{getattr(self, what)} {what} {since}, and {getattr(before, what)} before")
        more = self.blocks - before.blocks - MEASURED_BLOCKS * (measured - before.num_measured)
        if more > NOISE_BLOCKS and more > KEPT_BLOCKS * (self.num_requests - before.num_requests):
            found.append(f"{more} more blocks of Python's memory {since}")
        return found


def _is_ours(kind: type[Any]) -> bool:
    module = getattr(kind, "__module__", "")
    return isinstance(module, str) and module.startswith("outrider.")


@dataclass
class Outcome:
    """Of very many requests."""

    ends: Counter[str] = field(default_factory=Counter)
    censuses: list[Census] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_breaks: int = 0
    seconds: float = 0.0

    def figures(self) -> str:
        """One line."""
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        asked = f"{self.ends.total()} requests in {self.seconds:.0f} s ({ends}); {self.num_breaks} connections cut"
        if not self.censuses:
            return f"{asked}; {len(self.problems)} problems"
        first, last = self.censuses[:WARM_ROUNDS][-1], self.censuses[-1]
        return (
            f"{asked}; objects {first.objects.total()} to {last.objects.total()}, blocks {first.blocks} to "
            f"{last.blocks}, tasks {first.tasks} to {last.tasks}, descriptors {first.descriptors} to "
            f"{last.descriptors}, threads {first.threads} to {last.threads}; {len(self.problems)} problems"
        )


async def ask_many(
    folder: Path,
    num_requests: int,
    seed: int,
    told: Callable[[str], None] = lambda line: None,
    rounds: int = ROUNDS,
) -> Outcome:
    """Asks in rounds, and takes a census after each; the third is the baseline. Ends at the first round after which
    something is held."""
    outcome, dice = Outcome(), random.Random(f"objects {seed}")
    began = time.monotonic()
    async with _behind_proxies(folder) as (deployment, proxies):
        per_round = max(1, num_requests // rounds)
        ids = [SequenceIds(service.engine) for service in (deployment.target, deployment.draft)]
        for number in range(rounds):
            callers = Callers(deployment, proxies, dice, outcome)
            try:
                await callers.ask(per_round)
            except TimeoutError:
                outcome.problems.append(f"a request never ended, after {outcome.ends.total()} requests")
                break
            if held := await _quiet(deployment):
                outcome.problems += [f"{what} after {outcome.ends.total()} requests" for what in held]
                break
            outcome.censuses.append(await Census.take(outcome.ends.total()))
            outcome.seconds = time.monotonic() - began
            told(f"{number + 1} of {rounds}: {outcome.figures()}")
        outcome.problems += deployment.errors.lines[:10]
        for seen in ids:
            outcome.problems += seen.problems[:10] + ([] if seen.num_opened else ["no sequence was seen to open"])
    if len(outcome.censuses) > WARM_ROUNDS:
        outcome.problems += outcome.censuses[-1].problems(outcome.censuses[WARM_ROUNDS - 1])
    return outcome


class SequenceIds:
    """Sees the ids that a service gets on each stream; they have to count up, so that none comes twice."""

    def __init__(self, engine: Any) -> None:
        self.num_opened, self.problems = 0, list[str]()
        self._last: dict[int, int] = {}  # by stream
        self._handle = engine.handle
        engine.handle = self._see

    def _see(self, command: Any) -> None:
        if isinstance(command, Detach):
            self._last.pop(command.stream, None)
        elif isinstance(command, Deliver):
            for message in command.messages:
                if isinstance(message, Open):
                    self._count(command.stream, message.sequence_id)
        self._handle(command)

    def _count(self, stream: int, sequence_id: int) -> None:
        self.num_opened += 1
        if sequence_id <= self._last.get(stream, 0):
            self.problems.append(f"sequence {sequence_id} came after {self._last[stream]} on stream {stream}")
        self._last[stream] = sequence_id


@asynccontextmanager
async def _behind_proxies(folder: Path) -> AsyncIterator[tuple[Deployment, list[FaultProxy]]]:
    proxies: list[FaultProxy] = []

    async def through(role: str, address: str) -> str:
        proxy = FaultProxy(role, reads=False)
        proxy.upstream = address
        await proxy.start()
        proxies.append(proxy)
        return proxy.address

    async with deployed(folder, through, method=METHODS) as deployment:
        try:
            yield deployment, proxies
        finally:
            for proxy in proxies:
                await proxy.stop()


async def _quiet(deployment: Deployment) -> list[str]:
    """What is still held after a while in which it could have been let go."""
    end = time.monotonic() + QUIET_S
    while (held := _held(deployment)) and time.monotonic() < end:  # noqa: ASYNC110 (three services' state)
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # what ends with a call ends in the next turns of the loop
    return held


def _held(deployment: Deployment) -> list[str]:
    """Blocks of cached prefixes that no sequence uses are free."""
    target, draft, gateway = deployment.target.engine, deployment.draft.engine, deployment.gateway.engine
    used = {name: pool.num_blocks - pool.num_free for name, pool in
            (("target", target.cache.pool), ("draft", draft.cache.pool))}  # fmt: skip
    counts = {
        "blocks in use at the target": used["target"],
        "blocks in use at the draft": used["draft"],
        "sequences at the target": len(target.scheduler.sequences),
        "sequences at the draft": len(draft.sequences),
        "requests that run at the gateway": gateway.admission.num_active,
        "requests that wait at the gateway": gateway.admission.num_waiting,
        "tokens admitted at the gateway": gateway.admission.num_tokens,
    }
    for role, service in (("target", gateway.verifier), ("draft", gateway.drafter)):
        for replica in getattr(service, "replicas", ()):
            counts[f"sequences of the gateway at the {role}"] = replica.num_sequences
    return [f"{count} {what}" for what, count in counts.items() if count]


class Callers:
    """Some at a time, each with one request after another."""

    def __init__(
        self, deployment: Deployment, proxies: list[FaultProxy], dice: random.Random, outcome: Outcome
    ) -> None:
        self._deployment, self._proxies, self._dice, self._outcome = deployment, proxies, dice, outcome
        self._left = 0

    async def ask(self, count: int) -> None:
        """Returns when so many have ended."""
        self._left = count
        async with asyncio.timeout(ENDS_S + count), asyncio.TaskGroup() as group:
            for _ in range(NUM_AT_ONCE):
                group.create_task(self._ask_on())

    async def _ask_on(self) -> None:
        while self._left > 0:
            self._left -= 1
            if self._dice.random() < 1 / BREAKS_EVERY:
                self._dice.choice(self._proxies).reset()
                self._outcome.num_breaks += 1
            asks = self._over_http if self._dice.random() < 0.1 else self._over_grpc
            end = await asks()
            self._outcome.ends[end] += 1

    async def _over_grpc(self) -> str:
        """How it ended; a request that is read to its end has to have one for each completion."""
        dice, stub = self._dice, generation_pb2_grpc.GenerationServiceStub(self._deployment.to_gateway)
        request = a_request(dice)
        leaves_after = dice.randrange(8) if dice.random() < 0.35 else None
        timeout_s = dice.uniform(0.001, 0.3) if dice.random() < 0.1 else ENDS_S
        call: Any = stub.Generate(request, timeout=timeout_s)
        finished, number = set(), 0
        try:
            async for response in call:
                if number == leaves_after:
                    return "closed"
                number += 1
                finished |= {response.index} if response.finish_reason else set()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s < 1:
                return "deadline"
            self._outcome.problems.append(f"{error.code()}: {error.details()}")
            return "error"
        finally:
            call.cancel()
        if len(finished) != max(1, request.n):
            self._outcome.problems.append(f"{len(finished)} of {request.n} completions ended: {request}")
        return "whole"

    async def _over_http(self) -> str:
        dice, client = self._dice, self._deployment.http
        body = {"prompt": prompt(dice), "max_tokens": dice.randint(1, 12), "seed": dice.randrange(1 << 30)}
        body |= {"stream": True, "temperature": dice.choice((0, 1)), "return_token_ids": True}
        leaves_after = dice.randrange(4) if dice.random() < 0.5 else None
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                last, number = "", 0
                async with aclosing(cast(AsyncGenerator[str, None], response.aiter_lines())) as lines:
                    async for line in lines:
                        if number == leaves_after:
                            return "http closed"
                        last, number = line or last, number + 1
        except httpx.HTTPError as error:
            self._outcome.problems.append(f"over HTTP: {error!r}")
            return "error"
        if response.status_code != 200 or last != "data: [DONE]":
            self._outcome.problems.append(f"over HTTP: status {response.status_code}, ends with {last!r}")
        return "http"


def prompt(dice: random.Random) -> list[int]:
    """Random ids; one in twelve has many, so that it travels and is computed in slices; half begin like others."""
    length = dice.randint(100, 180) if dice.random() < 0.04 else dice.randint(1, 30)
    ids = [dice.randrange(5, 390) for _ in range(length)]
    return [*range(20, 52), *ids] if dice.random() < 0.5 else ids


def a_request(dice: random.Random) -> pb.GenerateRequest:
    """Of any rule, mode and method, for one completion or several."""
    sampling: dict[str, Any] = {
        "temperature": dice.choice((0, 0, 1, 0.7)),
        "max_tokens": dice.randint(1, 12),
        "seed": dice.randrange(1 << 30),
        "ignore_eos": dice.random() < 0.5,
    }
    sampling |= dice.choice(({}, {}, {}, {"logprobs": 2}, {"presence_penalty": 0.5}, {"stop": ["a"]}, {"top_k": 20}))
    if dice.random() < 0.03:
        sampling["structured_output"] = {"regex": REGEX}
    speculation: dict[str, Any] = {"enabled": dice.random() < 0.9, "acceptance": dice.randrange(4)}
    speculation["mode"] = dice.choice(("", "sequential", "chains", "branches", "auto"))
    speculation["method"] = dice.choice(("", "", "ngram", "draft_model"))
    salt = f"caller {dice.randrange(10)}"
    return pb.GenerateRequest(
        token_ids={"ids": prompt(dice)},
        sampling=sampling,
        speculation=speculation,
        n=dice.choice((1, 1, 1, 1, 1, 2, 3)),
        salt=salt,
        priority=dice.randrange(3),
    )
