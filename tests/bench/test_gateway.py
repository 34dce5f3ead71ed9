"""The bench of a gateway's own cost: a small run of every mode, and its peers under the gateway's real loop. Nothing
here judges a speed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.bench import run_bench

from outrider.bench.gateway import lag_ms
from outrider.bench.gateway_peers import draft_of, model_of, serving, target_of, true_id
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.pairs import pair_path
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams


def test_every_cell_is_measured(tmp_path: Path) -> None:
    flags: tuple[str, ...] = ("--streams", "4", "--modes", "plain,branches", "--processes", "2", "--connections", "4")
    text, result = run_bench(
        tmp_path, "gateway", *flags, "--seconds", "1", "--warmup", "0", "--repeats", "1", "--no-store"
    )
    assert [(cell["mode"], cell["streams"]) for cell in result["cells"]] == [("plain", 4), ("branches", 4)]
    for cell in result["cells"]:
        assert cell["us_per_round"]["median"] >= 0 and cell["rounds_per_s"]["median"] > 0
        assert len(cell["busy_by_process"][0]) == 2 and cell["mode"] in text


def test_lag_is_read_from_buckets() -> None:
    inf = float("inf")
    before, after = ((0.01, 5.0), (0.02, 5.0), (inf, 5.0)), ((0.01, 15.0), (0.02, 95.0), (inf, 105.0))
    assert lag_ms(before, after, 10) == pytest.approx(10.0)
    assert lag_ms(before, after, 50) == pytest.approx(15.0)
    assert lag_ms(before, after, 99) == pytest.approx(20.0)  # all that is known of the last bucket
    assert lag_ms(before, before, 50) is None


@pytest.mark.parametrize(
    "policy",
    [Policy(0), Policy(4), Policy(4, windows_ahead=1), Policy(4, windows_ahead=1, max_branches=12)],
    ids=lambda policy: policy.mode,
)
async def test_the_planners_services_follow_the_protocol(policy: Policy) -> None:
    model = model_of(pair_path("python").target)
    sampling = SamplingParams(temperature=0.0, max_tokens=120)
    async with AsyncExitStack() as stack:
        at = await stack.enter_async_context(serving([target_of(model, 200.0)], [draft_of(model)]))
        verifier = await stack.enter_async_context(RemoteTargets(at[0]))
        drafter = await stack.enter_async_context(RemoteDrafts(at[1]))
        await asyncio.gather(verifier.wait_usable(), drafter.wait_usable())
        opened = Open(0, (20, 21, 22), sampling, acceptance=AcceptanceRule.COUPLED)
        rounds = [item async for item in speculate(drafter, verifier, opened, policy) if isinstance(item, Round)]
    ids = [token for closed in rounds for token in closed.commit.ids]
    assert ids == [true_id(position) for position in range(3, 3 + 120)]
    drafted = sum(closed.commit.num_drafted for closed in rounds)
    accepted = sum(closed.commit.num_accepted for closed in rounds)
    assert (drafted > 0) == (policy.num_draft_tokens > 0)
    assert not drafted or 0 < accepted < drafted  # how many of either depends on the clock, too
