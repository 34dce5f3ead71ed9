"""`outrider bench network`: what the way between the services costs, over delays, modes and costs of the draft.

A block is a number of streams, a temperature and a draft's cost, over every mode and network, all cells in random order
in every repeat."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.bench.figures import draw_network, form_ms, write_figure
from outrider.bench.harness import EXPAND, RESULTS, RESULTS_TEXT, PairSettings, Temperatures, report_failures
from outrider.bench.network_fleet import (
    COLOCATED,
    COLOCATED_ON,
    PLAIN,
    SEQUENTIAL,
    SERVICES,
    Network,
    NetworkBatch,
    NetworkFleet,
    RoundSummary,
    Setup,
    start_network_fleet,
)
from outrider.bench.prompts import PROMPTS, read_prompts
from outrider.bench.results import (
    ForeignLoad,
    Json,
    align,
    bracketed,
    new_result,
    note,
    number,
    other_programs,
    share_cores,
    spread,
    title,
    where,
)
from outrider.cli.arguments import load_tokenizer, parse, split_ids
from outrider.planner.formulas import Costs, floor

NetworkMode = Literal["plain", "sequential", "chains", "branches", "auto", "colocated", "colocated-all"]
NetworkCell = tuple[str, Network]
LOOPBACK = Network.parse("0")
FULL: dict[str, Any] = {
    "networks": ("0", "0v", "0.2v", "1", "5", "20", "5~2", "5!200"),
    "temperatures": (0.0, 0.7, 1.0),
    "streams": (1, 4, 16),
    "costs": (0.05, 0.1, 0.2, 0.4),
    "modes": (*SERVICES, *COLOCATED_ON),
    "load_streams": 32,
}
SETTLING = 3  # runs before a block
HEAD = ("mode, network", "round trip ms", "ms a token", "closed form", "floor", "tokens/round", "accepted", "hits")
DESCRIPTION = (
    "Measure what the network between the services costs: time per token over delays, jitter and stalls between them, "
    "for each mode, beside plain decoding, co-located speculation and the closed forms."
)


class NetworkSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_network"

    expand: bool = Field(True, description=EXPAND)
    networks: Annotated[tuple[str, ...], BeforeValidator(split_ids)] = Field(
        ("0", "0v", "0.2v", "20"),
        min_length=1,
        description="each way on each link: 5 (ms), 0.2v (of a verification; 0v: none), 5~2 (jitter), 5!200 (stalls)",
    )
    modes: Annotated[tuple[NetworkMode, ...], BeforeValidator(split_ids)] = Field(
        ("plain", "sequential", "chains", "branches", "colocated", "colocated-all"),
        min_length=1,
        description="plain, sequential, chains, branches, auto, colocated (on the target's cores), colocated-all",
    )
    temperatures: Temperatures = Field((0.0,), min_length=1, description="temperatures, as in 0,1")
    streams: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], BeforeValidator(split_ids)] = Field(
        (1,), min_length=1, description="numbers of streams at once, as in 1,4"
    )
    costs: Annotated[tuple[Annotated[float, Field(ge=0, le=4)], ...], BeforeValidator(split_ids)] = Field(
        (0.05, 0.2), min_length=1, description="a draft pass over a verification; 0: as it is"
    )
    load_streams: int = Field(0, ge=0, le=64, description="one more block under load, with this many streams; 0: none")
    max_tokens: int = Field(96, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(10, ge=1, le=100, description="runs of each cell, in random order")
    results: Path = Field(RESULTS / "network", description=RESULTS_TEXT)
    full: bool = Field(False, description="every network, temperature, cost and number of streams: hours")

    @model_validator(mode="after")
    def _check_networks(self) -> Self:
        for name in self.networks:
            Network.parse(name)
        return self

    def effective(self) -> NetworkSettings:
        """With what --full stands for, where nothing else was said."""
        return self.filled(FULL) if self.full else self


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench network") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(NetworkSettings, argv, prog, DESCRIPTION).effective()
    logging.basicConfig(level=logging.ERROR)

    def work() -> None:
        result = asyncio.run(run(settings))
        if path := settings.finish(result, render(result)):
            write_figure(path.with_suffix(".svg"), lambda: draw_network(result))

    return report_failures(prog, work)


async def run(settings: NetworkSettings) -> Json:
    """Every block."""
    cores = share_cores()
    folders, pair = settings.checkpoints()
    prompts = read_prompts(load_tokenizer(folders.target, "--target"), None, len(PROMPTS))
    setup = Setup(folders, cores, settings.expand, settings.num_draft_tokens, settings.start_timeout)
    result = new_result({
        "pair": f"{'the expansion of ' * settings.expand}{pair}", "k": settings.num_draft_tokens,
        "max_tokens": settings.max_tokens, "repeats": settings.repeats, "seed": settings.seed,
    }) | {"blocks": []}  # fmt: skip
    note("starting the services ...")
    async with start_network_fleet(setup, settings.modes, map(Network.parse, settings.networks)) as fleet:
        for block in blocks_of(settings):
            note(f"{title({'batch': block.streams, 'temperature': block.temperature})}, draft cost {block.cost:g}")
            result["blocks"].append(await measure_block(fleet, block, prompts, settings.repeats, settings.seed))
    return result


def blocks_of(settings: NetworkSettings) -> Iterator[Block]:
    """Every block; the one under load has a draft at its own cost, and no network."""
    networks = tuple(map(Network.parse, settings.networks))
    k, length = settings.num_draft_tokens, settings.max_tokens
    for streams in settings.streams:
        for temperature in settings.temperatures:
            for cost in settings.costs:
                yield Block(temperature, streams, cost, settings.modes, networks, k, length)
    if settings.load_streams:
        yield Block(settings.temperatures[0], settings.load_streams, 0.0, SERVICES, (LOOPBACK,), k, length)


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
            yield from (
                (mode, network) for network in ((LOOPBACK,) if mode in (PLAIN, *COLOCATED_ON) else self.networks)
            )

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
    fleet: NetworkFleet, block: Block, prompts: Sequence[Sequence[int]], repeats: int, seed: int
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
        "temperature": block.temperature, "batch": block.streams, "cost": block.cost, "k": block.num_draft_tokens,
        "verify_ms": pace.verify_ms, "pass_ms": pass_ms, "plain_ms": plain_ms, "foreign_cpus": foreign_cpus,
        "cells": [
            _describe_cell(cell, own, pace, pass_ms, plain_ms, block.num_draft_tokens) for cell, own in runs.items()
        ],
    }  # fmt: skip


def _describe_cell(
    cell: NetworkCell, runs: Sequence[RoundSummary], pace: MeasuredPace, pass_ms: float, plain_ms: float, k: int
) -> Json:
    (mode, network), tested = cell, sum(run.tested for run in runs)
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


def _pass_ms(runs: dict[NetworkCell, list[RoundSummary]]) -> float:
    """A draft's pass where nothing else is drafted beside the chain."""
    known = [run.pass_ms for (mode, _), own in runs.items() if mode in (SEQUENTIAL, COLOCATED) for run in own]
    return median(known) if known else 0.0


def render(result: Json) -> Iterator[str]:
    """All blocks. Numbers are medians, with least and greatest in brackets."""
    yield where(result)
    for block in result["blocks"]:
        yield ""
        yield (
            f"{title(block)}, draft cost {block['cost']:g}: verification {block['verify_ms']:.1f} ms, draft pass "
            f"{block['pass_ms']:.1f} ms; {other_programs(block['foreign_cpus'])}"
        )
        yield from align([HEAD, *map(_row, block["cells"])])


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
