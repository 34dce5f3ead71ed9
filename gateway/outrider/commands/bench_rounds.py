"""Where a round's time goes: the gateway's own loop driven in this process, so that every round is at hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median

from outrider.commands.bench_fleet import Addresses
from outrider.commands.bench_run import Cell
from outrider.gateway.loop import speculate
from outrider.gateway.policy import Policy
from outrider.gateway.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.rounds import Round
from outrider.wire.messages import Open
from outrider.wire.sampling import AcceptanceRule, SamplingParams

POLL_S = 0.02
START_S = 30.0


async def measure_rounds(
    addresses: Addresses,
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    acceptance: AcceptanceRule,
    max_tokens: int,
    seeds: Sequence[int],
) -> dict[str, float]:
    """Medians of a round's parts, in milliseconds, and of the rows of its step: a batch for each seed. `gateway` is
    this process's computing time a round, and is taken from the wire's."""
    rounds: list[Round] = []
    computing_s = 0.0
    sampling = SamplingParams(temperature=cell.temperature, max_tokens=max_tokens, ignore_eos=True)
    for seed in seeds:
        opens = [
            Open(0, tuple(ids), sampling, acceptance=acceptance, seed=seed * 1000 + index)
            for index, ids in enumerate(prompts)
        ]
        found, seconds = await _drive(addresses, opens, policy)
        rounds += found
        computing_s += seconds
    return summarise(rounds, computing_s * 1e3 / max(1, len(rounds)))


def summarise(rounds: Sequence[Round], gateway_ms: float) -> dict[str, float]:
    """Medians over rounds with a draft that are not a stream's first (or over all of plain decoding)."""
    later = [closed for closed in rounds if closed.index > 0]
    counted = [closed for closed in later if closed.commit.num_drafted] or later
    if not counted:
        return {}
    microseconds = {
        "total": median(closed.total_us for closed in counted),
        "draft": median(closed.draft_us for closed in counted),
        "wire": median(closed.wire_us for closed in counted),
        "queue": median(closed.commit.timings.queue_us for closed in counted),
        "verify": median(closed.commit.timings.verify_us for closed in counted),
        "sample": median(closed.commit.timings.sample_us for closed in counted),
    }
    parts = {name: value / 1e3 for name, value in microseconds.items()}
    parts["gateway"] = gateway_ms
    parts["wire"] = max(0.0, parts["wire"] - gateway_ms)
    parts["rows"] = median(closed.commit.timings.num_rows for closed in counted)
    return parts


async def _drive(addresses: Addresses, opens: Sequence[Open], policy: Policy) -> tuple[list[Round], float]:
    """All rounds of all streams, and this process's computing time in seconds."""
    async with RemoteTargets([addresses.target]) as targets, RemoteDrafts([addresses.draft]) as drafts:
        end = time.monotonic() + START_S
        while not (targets.usable and drafts.usable):
            if time.monotonic() > end:
                raise TimeoutError("the services could not be reached")
            await asyncio.sleep(POLL_S)
        started = time.process_time()
        streams = await asyncio.gather(*(_rounds(drafts, targets, request, policy) for request in opens))
        rounds = [closed for stream in streams for closed in stream]
        return rounds, time.process_time() - started


async def _rounds(drafts: RemoteDrafts, targets: RemoteTargets, request: Open, policy: Policy) -> list[Round]:
    return [item async for item in speculate(drafts, targets, request, policy) if isinstance(item, Round)]
