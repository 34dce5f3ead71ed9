"""Random losses, delays and silence on both sides: the output stays the target's, token for token."""

from __future__ import annotations

import asyncio
import random

import pytest
from gateway.toys import ToyDraft, ToyTarget, draft_info, expected, until

from outrider.gateway.speculation import loop
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Failure, Open
from outrider.rpc.sampling_params import SamplingParams

NUM_TOKENS = 60


def disturb(dice: random.Random, draft: ToyDraft, target: ToyTarget) -> None:
    """One thing that goes wrong, or nothing."""
    draft_link, target_link = (links[-1] if links else None for links in (draft.links, target.links))
    match dice.randrange(14):
        case 0 if draft_link is not None and draft_link.open:
            draft_link.lose()
        case 1 if draft_link is not None and draft_link.open:
            draft_link.emit(Failure(0, dice.choice((3, 14)), "out of sorts"))
        case 2 if target_link is not None and target_link.open and len(target.opens) < 8:
            target_link.lose()
        case 3:
            draft.mute = not draft.mute
        case 4:
            draft.available = not draft.available
            draft.info = draft_info() if draft.available else None
        case 5:
            draft.delay_s = dice.choice((0.0, 0.001, 0.003))
        case _:
            pass


@pytest.mark.parametrize("seed", range(60))
async def test_the_output_is_the_targets_whatever_goes_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.002)
    dice = random.Random(seed)
    draft, target = ToyDraft(wrong_every=dice.choice((0, 2, 3, 7))), ToyTarget()
    prompt = tuple(dice.randrange(400) for _ in range(dice.randrange(1, 9)))
    opened = Open(0, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    policy = Policy(dice.randrange(9), patience_ms=3, max_target_opens=10, max_unread=dice.choice((1, 8, 256)))
    tokens: list[int] = []
    indices: list[int] = []
    async with asyncio.timeout(10):
        async for item in speculate(draft, target, opened, policy, examines_text=dice.random() < 0.5):
            assert isinstance(item, Round)
            assert item.commit.position == len(prompt) + len(tokens)
            tokens.extend(item.commit.ids)
            indices.append(item.index)
            disturb(dice, draft, target)
    assert tokens == expected(prompt, NUM_TOKENS) and indices == list(range(len(indices)))
    assert not any(link.open and not link.sequence.over for link in (*draft.links, *target.links))


async def test_a_draft_that_returns_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "DRAFT_RETRY_S", 0.0)
    draft, target = ToyDraft(), ToyTarget(step_s=0.001)
    rounds: list[Round] = []

    async def run() -> None:
        opened = Open(0, (1, 2), SamplingParams(temperature=0.0, max_tokens=200))
        async for item in speculate(draft, target, opened, Policy(4, patience_ms=50)):
            assert isinstance(item, Round)
            rounds.append(item)

    task = asyncio.create_task(run())
    await until(lambda: len(rounds) == 3)
    draft.available, draft.info = False, None
    draft.links[0].lose()
    await until(lambda: rounds[-1].commit.num_drafted == 0)
    draft.available, draft.info = True, draft_info()
    await task
    assert len(draft.opens) == 2 and rounds[-1].commit.num_drafted > 0
    assert draft.opens[1].first_chain > draft.opens[0].first_chain
    assert [token for closed in rounds for token in closed.commit.ids] == expected((1, 2), 200)
