"""The soak's short form, on six processes, with kills."""

from __future__ import annotations

import pytest
from chaos.fleet import Fleet
from chaos.soak import figures, soak
from support.environment import SEED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


async def test_nothing_is_kept_lost_or_changed() -> None:
    async with Fleet() as fleet:
        outcome = await soak(fleet, seed=SEED, seconds=90, round_s=20, kills_every_s=5, told=print)
    print(*figures(outcome), sep="\n")
    assert outcome.problems == []
    assert outcome.blows.total() > 0 and outcome.num_requests > 0
    assert len(outcome.readings) >= 2 * 6
