"""Requests of every kind, most of them given up at some point, and services killed under them, for minutes; then quiet,
in which every service has to hold no more than it did at first: python tests/chaos/soak.py --minutes 10 --seed 7

With `--requests N` so many at three services in one process, which takes a hundredth of the time, and sees every object
that is kept (see objects.py). Ends with 0 if nothing was kept, lost or changed."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.asks import Answer, Ask, all_asks, expectations
from chaos.crowd import Crowd
from chaos.faults import BLOWS
from chaos.fleet import Drafting, Fleet, Member
from chaos.resources import (
    MIB,
    Reading,
    descriptors_of,
    growth,
    held_by,
    problems,
    resident_bytes_of,
    threads_of,
)

from outrider.cli.local_services import leave_on_signals

NUM_TOKENS = 64  # of a request: sequences come and go faster than a fault runner's
KINDS = ("kill", "kill", "restart", "reset")
KILLS_EVERY_S = 15.0  # on average
QUIET_S, WHOLE_S = 60.0, 120.0  # until nothing is held, until all services are there
POLL_S = 0.2


@dataclass
class Outcome:
    """Of a soak."""

    readings: list[Reading] = field(default_factory=list)
    blows: Counter[str] = field(default_factory=Counter)  # that took place
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        """That ended."""
        return self.ends.total()


async def soak(
    fleet: Fleet,
    *,
    seed: int,
    seconds: float,
    round_s: float = 60.0,
    num_readers: int = 6,
    kills_every_s: float = KILLS_EVERY_S,
    asks: Sequence[Ask] | None = None,
    known: Mapping[str, Answer] | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Rounds of traffic, each with a rest behind it, until so many seconds are over; the first has no kills, and what
    is held after it is the baseline, with which one other at least is compared however slow the machine."""
    outcome, asks = Outcome(), all_asks(seed, NUM_TOKENS, fleet.drafting) if asks is None else asks
    crowd = Crowd(fleet, asks, await expectations(asks, fleet, known), seed, num_readers)
    dice = random.Random(f"kills {seed}")
    began = time.monotonic()
    while len(outcome.readings) < 2 * len(fleet.members) or time.monotonic() < began + seconds:
        crowd.go()
        end = time.monotonic() + round_s
        if outcome.readings and kills_every_s:
            await _strike(fleet, dice, end, kills_every_s, outcome.blows)
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        await crowd.rest()
        if not await fleet.whole(WHOLE_S):
            outcome.problems.append(f"not all services were there again after {WHOLE_S:g} s")
            break
        outcome.readings += await _quiet(fleet, crowd.num_requests)
        told(f"{time.monotonic() - began:.0f} s, {crowd.num_requests} requests, {outcome.blows.total()} blows")
    outcome.ends = crowd.ends
    outcome.problems += problems(outcome.readings)
    for stream in crowd.wrong:
        outcome.problems.append(f"{stream.ask.name} ({stream.reader}): {stream.error or stream.change}")
    return outcome


async def _strike(fleet: Fleet, dice: random.Random, end: float, every_s: float, done: Counter[str]) -> None:
    """One service after another, until the time is over."""
    while (wait_s := dice.expovariate(1 / every_s)) < end - time.monotonic():
        await asyncio.sleep(wait_s)
        kind, member = dice.choice(KINDS), dice.choice(list(fleet.members.values()))
        blow = BLOWS[kind](member)
        await blow.strike()
        await asyncio.sleep(blow.lasts_s)
        done[f"{kind} of a {member.role}"] += await blow.heal()
        await fleet.whole(WHOLE_S)


async def _quiet(fleet: Fleet, num_requests: int) -> list[Reading]:
    """A reading of every service, once none holds anything, or has had the time to let go. The callers live in this
    process: of a call that failed, gRPC keeps the connection until Python finds the cycle that holds it."""
    end = time.monotonic() + QUIET_S
    gc.collect()
    await asyncio.sleep(POLL_S)  # in which connections end
    while True:
        readings = [await _reading(fleet, member, num_requests) for member in fleet.members.values()]
        if not any(reading.held for reading in readings) or time.monotonic() > end:
            return readings
        await asyncio.sleep(POLL_S)


async def _reading(fleet: Fleet, member: Member, num_requests: int) -> Reading:
    text = await fleet.metrics_of(member)
    held = held_by(member.role, text) if text else {"its metrics back": 1.0}
    pid = member.pid
    sizes = descriptors_of(pid), threads_of(pid), resident_bytes_of(pid)
    return Reading(member.name, member.num_starts, held, *sizes, num_requests)


def figures(outcome: Outcome) -> list[str]:
    """What there is to say of it."""
    lines = []
    for name in dict.fromkeys(reading.member for reading in outcome.readings):
        mine = [reading for reading in outcome.readings if reading.member == name]
        mine = [reading for reading in mine if reading.process == mine[-1].process]
        first, last = mine[0], mine[-1]
        lines.append(
            f"{name}: process {last.process}, {len(mine)} readings, descriptors {first.descriptors} to "
            f"{last.descriptors}, threads {first.threads} to {last.threads}, resident "
            f"{first.resident_bytes / MIB:.1f} to {last.resident_bytes / MIB:.1f} MiB, "
            f"{growth(mine)[0]:.0f} bytes a request over the later half"
        )
    ends = ", ".join(f"{count} {end}" for end, count in sorted(outcome.ends.items()))
    blows = ", ".join(f"{count} {blow}" for blow, count in sorted(outcome.blows.items())) or "none"
    return [*lines, f"{outcome.num_requests} requests ({ends}); blows: {blows}; {len(outcome.problems)} problems"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing was kept, lost or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic and kills")
    parser.add_argument("--seed", type=int, default=0, help="of requests, of where they end, and of kills")
    parser.add_argument("--readers", type=int, default=6, help="requests at a time")
    parser.add_argument("--requests", type=int, help="so many, at services in one process")
    options = parser.parse_args(arguments)
    began = time.monotonic()

    def told(line: str) -> None:
        print(line, flush=True)

    async def in_processes() -> tuple[list[str], list[str]]:
        async with Fleet(drafting=Drafting.of(options.seed)) as fleet:
            outcome = await soak(
                fleet, seed=options.seed, seconds=60 * options.minutes, num_readers=options.readers, told=told
            )
        return figures(outcome), outcome.problems

    async def in_one_process() -> tuple[list[str], list[str]]:
        from chaos.objects import ask_many

        with tempfile.TemporaryDirectory() as folder:
            outcome = await ask_many(Path(folder), options.requests, options.seed, told=told)
        return [outcome.figures()], outcome.problems

    lines, found = asyncio.run(in_one_process() if options.requests else in_processes())
    for line in (*lines, *found):
        told(line)
    told(f"seed {options.seed}, {time.monotonic() - began:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    leave_on_signals()
    sys.exit(main())
