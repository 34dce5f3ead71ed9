"""The gateway's flags for how much is drafted by the number of running requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.fakes import ToyDraft, ToyTarget, expected

from outrider.gateway.settings import GatewaySettings
from outrider.gateway.speculation.loop import speculate
from outrider.gateway.speculation.schedule import BatchSchedule, ScheduledDrafter
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import SamplingParams


def test_ranges_are_read() -> None:
    schedule = BatchSchedule.parse("1-4:8, 5-16:4,17:2", 8, None)
    assert [schedule.num_draft_tokens(size) for size in (1, 4, 5, 16, 17, 99)] == [8, 8, 4, 4, 2, 2]
    assert BatchSchedule.parse("", 4, None).constant
    off = BatchSchedule.parse("", 4, 8)
    assert [off.num_draft_tokens(size) for size in (8, 9)] == [4, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "'8' is no range"),
        ("1-4:8,", "'' is no range"),
        ("2-4:1", "must start at a batch size of 1"),
        ("1-4:2,3-8:1", "overlaps"),
        ("1-4:9999", "k is 9999; allowed: 0 to"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSchedule.parse(text, 16, None)
    with pytest.raises(ValidationError, match="draft_tokens_by_batch"):
        GatewaySettings(target=["a:1"], tokenizer=Path(), draft_tokens_by_batch=text)


async def test_running_requests_decide() -> None:
    running, draft, target = 1, ToyDraft(), ToyTarget(step_s=0.001)
    drafter = ScheduledDrafter(draft, BatchSchedule.parse("1-2:4,3:0", 4, None), lambda: running)
    opened = Open(0, (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=80))
    drafted: list[int] = []
    async with asyncio.timeout(30):
        async for item in speculate(drafter, target, opened, Policy(4, patience_ms=100)):
            assert isinstance(item, Round)
            drafted.append(item.commit.num_drafted)
            running = 1 if len(drafted) < 6 else 3
    assert max(drafted[:6]) == 4 and drafted[-1] == 0
    assert target.links[0].sequence.tokens[3:] == expected((5, 6, 7), 80)
