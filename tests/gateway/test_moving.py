"""Sequences under way move to a draft that comes later, over real gRPC."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from support.fakes import (
    QUICK,
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

from outrider.gateway.peers import moving
from outrider.gateway.peers.moving import MovingDrafts
from outrider.gateway.peers.remote import RemoteTargets
from outrider.rpc.messages import DraftTokens
from outrider.rpc.stream import FrameStream

PROMPTS = [(number, 5, 9) for number in range(1, 17)]


class WatchedTarget(TargetServicer):
    """A target that knows the last chain of every prompt that has been drafted for."""

    def __init__(self, toy: ToyTarget) -> None:
        super().__init__(toy)
        self.chains: dict[tuple[int, ...], int] = {}

    def take(self, stream: FrameStream, sequences: dict[int, Any], message: Any) -> None:
        if isinstance(message, DraftTokens):
            self.chains[tuple(sequences[message.sequence_id].request.prompt_ids)] = message.chain
        super().take(stream, sequences, message)


async def test_a_draft_that_comes_later_takes_its_part_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MOVE_PAUSE_S", 0.001)
    target = WatchedTarget(ToyTarget(step_s=0.2))
    one, two = DraftServicer(ToyDraft(wrong_every=3)), DraftServicer(ToyDraft(wrong_every=3))
    async with AsyncExitStack() as stack:
        address = (await stack.enter_async_context(serving(target))).address
        targets = await stack.enter_async_context(RemoteTargets([address], stream_config=QUICK))
        first = (await stack.enter_async_context(serving(one))).address
        second = f"127.0.0.2:{first.rpartition(':')[2]}"
        drafts = await stack.enter_async_context(MovingDrafts([first, second], stream_config=QUICK))
        await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
        tasks = [
            asyncio.create_task(generate(drafts, targets, replace(request(150), prompt_ids=prompt)))
            for prompt in PROMPTS
        ]
        await until(lambda: len(target.chains) == len(PROMPTS))  # a sequence may move before its first draft, too
        seen = dict(target.chains)
        await stack.enter_async_context(serving(two, second))
        await until(lambda: len(two.opens) >= 4)
        assert len(one.opens) == len(PROMPTS), "what moves is opened once"
        loads = [replica.num_sequences for replica in drafts.replicas]
        assert sum(loads) == len(PROMPTS) and max(loads) <= 12, "each is at one draft, and neither has most"
        assert not any(replica.breaker.open for replica in drafts.replicas), "who gives some away has not failed"
        target.toy.step_s = 0.0
        assert await asyncio.gather(*tasks) == [expected(prompt, 150) for prompt in PROMPTS]
        for opened in two.opens:
            assert opened.first_chain > seen[tuple(opened.prompt_ids)], "its chains are new to the target"
