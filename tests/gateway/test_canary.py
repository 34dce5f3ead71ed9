"""The canary: which of several targets is named, and which are not held against one another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fakes import QUICK, TargetServicer, ToyTarget, arithmetic, serving, target_info, until
from support.gateways import METRICS, announced, running, save_toy_tokenizer
from support.metrics import samples_of

from outrider.gateway.peers.canary import NUM_TOKENS, Canary, difference, right_answer
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.peers.replicas import Replica
from outrider.rpc.messages import Failure
from outrider.rpc.words.answer import TokenLogprob

INVARIANT = target_info(batch_invariant=True, kernels="c-avx2-123456")


def wrong_at(place: int) -> Any:
    """A rule that errs at one position behind the prompt."""

    def rule(tokens: Sequence[int], prompt_len: int) -> int:
        return arithmetic(tokens, prompt_len) ^ (len(tokens) - prompt_len == place)

    return rule


def toy(**fields: Any) -> ToyTarget:
    return ToyTarget(**{"info": INVARIANT, **fields})


@dataclass
class Fleet:
    """Targets over the loopback, and a canary that looks when it is told."""

    toys: list[ToyTarget]
    servicers: list[TargetServicer]
    pool: RemoteTargets
    canary: Canary

    async def odd(self) -> list[int]:
        """Looks; those that are marked then."""
        await self.canary.look()
        return [place for place, replica in enumerate(self.replicas) if replica.disagrees]

    @property
    def replicas(self) -> list[Replica[Any]]:
        return list(self.pool.replicas)


@asynccontextmanager
async def fleet(*toys: ToyTarget) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        servicers = [TargetServicer(toy) for toy in toys]
        servers = [await stack.enter_async_context(serving(servicer)) for servicer in servicers]
        pool = RemoteTargets([server.address for server in servers], stream_config=QUICK)
        await stack.enter_async_context(pool)
        await until(lambda: all(replica.usable for replica in pool.replicas))
        yield Fleet(list(toys), servicers, pool, Canary(pool, 60))


async def test_a_look_that_fails_is_told_and_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_looks = 0

    async def look(self: Canary) -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(Canary, "look", look)
    running = asyncio.create_task(Canary(RemoteTargets(["127.0.0.1:1"]), 0.01).run())
    await until(lambda: num_looks > 2)
    running.cancel()
    assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.exc_info and "what nobody thought of" in str(line.exc_info[1])


@pytest.mark.parametrize("place", [0, 7, NUM_TOKENS - 1])
async def test_the_one_that_disagrees_is_named(place: int, caplog: pytest.LogCaptureFixture) -> None:
    async with fleet(toy(), toy(rule=wrong_at(place)), toy()) as served:
        assert await served.odd() == [1] == await served.odd()
        (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert served.replicas[1].address in line.message and f"at position {place} token" in line.message
        served.toys[1].rule = arithmetic
        assert await served.odd() == []
        assert caplog.records[-1].message.endswith("agrees again with the others of its arithmetic")
        served.toys[0].rule = served.toys[2].rule = wrong_at(place)  # most of them, and not what they said before
        assert await served.odd() == [0, 2]
        opened = [request for servicer in served.servicers for request in servicer.opens]
        assert len({request.prompt_ids for request in opened}) == len({request.seed for request in opened}) == 1
        assert len({request.salt for request in opened}) == 4 and all(request.plain for request in opened)
        assert not any(replica.num_sequences for replica in served.replicas)


async def test_where_two_disagree_from_the_beginning_both_are_named() -> None:
    async with fleet(toy(), toy(rule=wrong_at(3))) as served:
        assert await served.odd() == [0, 1]
        served.toys[1].rule = arithmetic
        assert await served.odd() == []
        served.toys[0].rule = wrong_at(5)
        assert await served.odd() == [0]


async def test_what_differs_by_design_is_not_compared() -> None:
    """Not batch-invariant, of another type, of other kernels, of other weights; and one alone."""
    others: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"kernels": "c-avx512-123456"}, {"digest": "d9"}]
    changed = [replace(INVARIANT, model=replace(INVARIANT.model, **fields)) for fields in others]
    infos = [target_info(), target_info(), INVARIANT, *changed]
    toys = [ToyTarget(info=info, rule=wrong_at(place)) for place, info in enumerate(infos)]
    async with fleet(*toys) as served:
        assert await served.odd() == [] and not any(servicer.opens for servicer in served.servicers)


async def test_one_that_does_not_answer_is_not_named() -> None:
    async with fleet(toy(), toy(), toy(rule=wrong_at(0))) as served:
        served.servicers[2].refuse = Failure(0, 8, "full", retry_after_ms=50)
        assert await served.odd() == []
        served.servicers[2].refuse = None
        assert await served.odd() == [2]
        await served.servicers[0].streams[-1].close()
        assert await served.odd() == [2]


def test_what_is_right() -> None:
    one, other, third = (((TokenLogprob(token, -0.5, 1),),) for token in range(3))
    assert right_answer([one, other, one], None) == one
    assert right_answer([one], None) is right_answer([one, other], None) is right_answer([], None) is None
    assert right_answer([one, one, other, other], None) is None
    assert right_answer([other, other, third], one) == one
    nearly = ((TokenLogprob(0, -0.5000001, 1),),)
    assert difference(nearly, one).endswith("at position 0 the log probabilities differ")
    assert difference(one * 2, one).endswith("2 tokens, and 1 there")


async def test_a_gateway_has_one_where_it_is_asked_for(tmp_path: Path) -> None:
    folder = save_toy_tokenizer(tmp_path)
    toys = [toy(), toy(), toy(rule=wrong_at(2))]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(TargetServicer(one))) for one in toys]
        addresses = [server.address for server in servers]
        flags = ("--target", ",".join(addresses), "--canary-s", "0.2", "--metrics", "127.0.0.1:0")
        process = await stack.enter_async_context(running(folder, *flags))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        url = f"http://{await announced(process, METRICS)}/metrics"

        async def odd() -> list[str]:
            found = samples_of((await http.get(url)).text)
            labels = {address: (("address", address), ("role", "target")) for address in addresses}
            return [address for address in addresses if found.get(("replica_disagrees", labels[address])) == 1.0]

        async with asyncio.timeout(60):
            while await odd() != addresses[2:]:  # noqa: ASYNC110 (another process's)
                await asyncio.sleep(0.05)
