"""One block of the network bench (a number of streams, a temperature and a draft's cost, over every mode and network,
all cells in random order in every repeat), and the result as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from outrider.bench.command import Note
from outrider.bench.machine import ForeignLoad
from outrider.bench.network.backends import (
    BRANCHES,
    CHAINS,
    COLOCATED,
    COLOCATED_ALL,
    PLAIN,
    SEQUENTIAL,
    NetworkBatch,
    RoundSummary,
)
from outrider.bench.network.fleet import NetworkFleet
from outrider.bench.network.proxy import Network
from outrider.bench.results import Json, align, bracketed, number, other_programs, spread, title, where
from outrider.planner.formulas import Costs, branches, chains, floor, sequential


def render(result: Json) -> Iterator[str]:
    """All blocks and the aims. Numbers are medians, with least and greatest in brackets."""
    yield where(result)
    for block in result["blocks"]:
        yield ""
        yield (
            f"{title(block)}, draft cost {block['cost']:g}: verification {block['verify_ms']:.1f} ms, draft pass "
            f"{block['pass_ms']:.1f} ms; {other_programs(block['foreign_cpus'])}"
        )
        yield from align([HEAD, *map(_row, block["cells"])])
    if result.get("kills"):
        yield ""
        yield from _kills(result["kills"])
    if result["aims"]:
        yield ""
        yield from align([("aims", "reached (95 % interval)", "aim", ""), *map(_aim, result["aims"])])


HEAD = ("mode, network", "round trip ms", "ms a token", "closed form", "floor", "tokens/round", "accepted", "hits")


def _row(cell: Json) -> tuple[str, ...]:
    costs = Costs(**cell["costs"])
    return (
        f"{cell['mode']}, {cell['network']}",
        f"{cell['round_trip_ms']:.1f}",
        bracketed(cell["ms_per_token"]),
        number(cell["form_ms"]),
        number(floor(costs) if costs.acceptance else None),
        f"{costs.tokens_per_round:.2f}",
        number(costs.acceptance or None),
        number(cell["hits"]),
    )


def _kills(kills: Json) -> Iterator[str]:
    yield "the draft killed at a random moment, ms a token"
    for name in ("plain_ms", "after_ms", "kept"):
        yield f"  {name.removesuffix('_ms'):<6} {bracketed(kills[name])}"


def _aim(aim: Json) -> tuple[str, str, str, str]:
    reached = f"{aim['value']:.3f} ({aim['low']:.3f}..{aim['high']:.3f})"
    bound = f"{'never below ' * aim['never_below']}{aim['aim']:.2f}"
    return aim["name"], reached, bound, "met" if aim["met"] else "missed"


SETTLING = 3  # runs before a block

NetworkCell = tuple[str, Network]
LOOPBACK = Network.parse("0")
ON_NO_NETWORK = (PLAIN, COLOCATED, COLOCATED_ALL)  # what a network changes nothing about, or hides in credit


@dataclass(frozen=True, slots=True)
class Block:
    """What is alike for all cells."""

    temperature: float
    streams: int
    cost: float  # a draft pass over a verification
    modes: tuple[str, ...]
    networks: tuple[Network, ...]
    num_draft_tokens: int
    max_tokens: int

    def cells(self) -> Iterator[NetworkCell]:
        """Every mode over every network that matters to it."""
        for mode in self.modes:
            yield from ((mode, network) for network in ((LOOPBACK,) if mode in ON_NO_NETWORK else self.networks))

    def batch(self, prompts: Sequence[Sequence[int]], seed: int) -> NetworkBatch:
        """The runs of one repeat."""
        length, k = self.max_tokens, self.num_draft_tokens
        return NetworkBatch.of(prompts, self.streams, self.temperature, length, k, seed)


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """What a verification took before the block, and how long that makes a draft's pass."""

    verify_ms: float
    pass_ms: float


async def measure_block(
    fleet: NetworkFleet, block: Block, prompts: Sequence[Sequence[int]], repeats: int, seed: int, note: Note
) -> Json:
    """All repeats of a block."""
    pace = await _settle(fleet, block, prompts, seed)
    cells, order, foreign = list(block.cells()), random.Random(seed), ForeignLoad()
    runs: dict[NetworkCell, list[RoundSummary]] = {cell: [] for cell in cells}
    for repeat in range(repeats):
        for mode, network in order.sample(cells, len(cells)):
            if not network.is_direct:
                await fleet.set_network(network, pace.verify_ms, seed + repeat)
            backend = fleet.backend(mode, network, pace.pass_ms)
            runs[mode, network].append(await backend.run(block.batch(prompts, seed + repeat)))
        done = ", ".join(f"{mode} {network.name}: {own[-1].ms_per_token:.1f}" for (mode, network), own in runs.items())
        note(f"  {repeat + 1} of {repeats}: {done} ms a token")
    return describe(block, pace, runs, foreign.cpus())


async def _settle(fleet: NetworkFleet, block: Block, prompts: Sequence[Sequence[int]], seed: int) -> MeasuredPace:
    """Warms everything up, and stretches the draft's passes to their length."""
    batch = block.batch(prompts, seed)
    await fleet.set_pass_ms(0.0)
    backend = fleet.backend(SEQUENTIAL, LOOPBACK, 0.0)
    await backend.run(batch)
    verify_ms = min([(await backend.run(batch)).verify_ms for _ in range(SETTLING)])  # no pace is set by a busy moment
    pace = MeasuredPace(verify_ms, block.cost * verify_ms)
    await fleet.set_pass_ms(pace.pass_ms)
    for name in fleet.colocated.keys() & block.modes:
        await fleet.backend(name, LOOPBACK, pace.pass_ms).run(batch)
    return pace


def describe(
    block: Block, pace: MeasuredPace, runs: dict[NetworkCell, list[RoundSummary]], foreign_cpus: float | None
) -> Json:
    """A block as JSON holds it."""
    pass_ms = _pass_ms(runs) or pace.pass_ms
    plain = [run.ms_per_token for (mode, _), own in runs.items() if mode == PLAIN for run in own]
    plain_ms = median(plain) if plain else pace.verify_ms
    return {
        "temperature": block.temperature,
        "batch": block.streams,
        "cost": block.cost,
        "k": block.num_draft_tokens,
        "verify_ms": pace.verify_ms,
        "pass_ms": pass_ms,
        "plain_ms": plain_ms,
        "foreign_cpus": foreign_cpus,
        "cells": [
            _describe_cell(mode, network, own, pace, pass_ms, plain_ms, block.num_draft_tokens)
            for (mode, network), own in runs.items()
        ],
    }


def _describe_cell(
    mode: str,
    network: Network,
    runs: Sequence[RoundSummary],
    pace: MeasuredPace,
    pass_ms: float,
    plain_ms: float,
    k: int,
) -> Json:
    tested = sum(run.tested for run in runs)
    costs = Costs(
        num_draft_tokens=k,
        acceptance=sum(run.accepted for run in runs) / tested if tested else 0.0,
        tokens_per_round=median(run.tokens_per_round for run in runs),
        verify_ms=median(run.verify_ms for run in runs),
        pass_ms=pass_ms,
    )
    hits = [run.hits for run in runs if run.hits is not None]
    round_trip_ms = network.round_trip_ms(pace.verify_ms)
    return {
        "mode": mode,
        "network": network.name,
        "steady": network.steady,
        "round_trip_ms": round_trip_ms,
        "ms_per_token": spread([run.ms_per_token for run in runs]),
        "hits": median(hits) if hits else None,
        "costs": asdict(costs),
        "form_ms": form_ms(mode, costs, round_trip_ms, median(hits) if hits else 0.0, plain_ms),
    }


def form_ms(mode: str, costs: Costs, round_trip_ms: float, hits: float, plain_ms: float) -> float | None:
    """Time per token in closed form; None where there is none."""
    if mode in (SEQUENTIAL, COLOCATED, COLOCATED_ALL):
        return sequential(costs, round_trip_ms)
    if mode == CHAINS:
        return chains(costs, round_trip_ms)
    return branches(costs, round_trip_ms, hits, plain_ms) if mode == BRANCHES else None


def _pass_ms(runs: dict[NetworkCell, list[RoundSummary]]) -> float:
    """A draft's pass where nothing else is drafted beside the chain."""
    known = [run.pass_ms for (mode, _), own in runs.items() if mode in (SEQUENTIAL, COLOCATED) for run in own]
    return median(known) if known else 0.0
