"""`outrider bench network`: what the way between the services costs, over delays, modes and costs of the draft.

Beside the blocks it kills drafts at random moments of a completion, to compare what follows with plain decoding, and
checks the numbers that are aimed at, repeat by repeat where both runs have one. "Never below" a bound means that the
95 % interval of the median does not lie below it."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.bench.command import Note, PairSettings, note, report_failures
from outrider.bench.figures import draw_network, write_figure
from outrider.bench.machine import CoreSpinner, describe, share_cores
from outrider.bench.network.backends import (
    AUTO,
    BRANCHES,
    COLOCATED,
    COLOCATED_ALL,
    PLAIN,
    SERVICES,
    NetworkBatch,
    ServicesBackend,
)
from outrider.bench.network.fleet import NetworkFleet, Setup, connect, start_network_fleet
from outrider.bench.network.proxy import Network
from outrider.bench.network.report import LOOPBACK, Block, measure_block, render
from outrider.bench.processes import start_slow_draft
from outrider.bench.prompts import PROMPTS, read_prompts
from outrider.bench.results import Json, new_result, spread, store, title
from outrider.bench.worker import BenchWorker
from outrider.cli.arguments import load_tokenizer, parse, split_ids
from outrider.planner.policy import Round

NetworkMode = Literal["plain", "sequential", "chains", "branches", "auto", "colocated", "colocated-all"]
FULL: dict[str, Any] = {
    "networks": ("0", "0v", "0.2v", "1", "5", "20", "5~2", "5!200"),
    "temperatures": (0.0, 0.7, 1.0),
    "streams": (1, 4, 16),
    "costs": (0.05, 0.1, 0.2, 0.4),
    "modes": (*SERVICES, COLOCATED, COLOCATED_ALL),
    "load_streams": 32,
}


class NetworkSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_network"

    expand: bool = Field(True, description="make the target large: the same function, about 300M parameters (Llama)")
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
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(split_ids)] = Field(
        (0.0,), min_length=1, description="temperatures, as in 0,1"
    )
    streams: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], BeforeValidator(split_ids)] = Field(
        (1,), min_length=1, description="numbers of streams at once, as in 1,4"
    )
    costs: Annotated[tuple[Annotated[float, Field(ge=0, le=4)], ...], BeforeValidator(split_ids)] = Field(
        (0.05, 0.2), min_length=1, description="a draft pass over a verification; 0: as it is"
    )
    load_streams: int = Field(0, ge=0, le=64, description="one more block under load, with this many streams; 0: none")
    kills: int = Field(5, ge=0, le=100, description="drafts killed at a random moment of a completion")
    max_tokens: int = Field(96, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(10, ge=1, le=100, description="runs of each cell, in random order")
    results: Path = Field(Path("bench/results/network"), description="folder of the stored results")
    full: bool = Field(False, description="every network, temperature, cost and number of streams: hours")

    @model_validator(mode="after")
    def _check_networks(self) -> Self:
        for name in self.networks:
            Network.parse(name)
        return self

    def effective(self) -> NetworkSettings:
        """With what --full stands for, where nothing else was said."""
        return self.filled(FULL) if self.full else self


WITHIN_S = 0.05  # of the round that ends next: the moment has nothing to do with the rounds


@dataclass(slots=True)
class DraftKiller:
    """Kills the draft a while after a number of tokens."""

    draft: BenchWorker
    after_tokens: int
    wait_s: float
    killed_at: float | None = None
    _num_tokens: int = field(default=0)
    _timer: asyncio.TimerHandle | None = None

    def on_round(self, closed: Round) -> None:
        """Counts."""
        self._num_tokens += len(closed.commit.ids)
        if self._num_tokens >= self.after_tokens and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.wait_s, self._kill)

    def _kill(self) -> None:
        self.draft.kill()
        self.killed_at = time.monotonic()


async def measure_kills(
    fleet: NetworkFleet, prompts: Sequence[Sequence[int]], kills: int, max_tokens: int, seed: int, note: Note
) -> Json:
    """Milliseconds a token: plain, and from the kill to the end, alternating; `kept` is plain over the latter."""
    rng = random.Random(seed)
    plain, after = [], []
    for number in range(kills):
        k = fleet.setup.num_draft_tokens
        batch = NetworkBatch.of([prompts[number % len(prompts)]], 1, 0.0, max_tokens, k, seed + number)
        plain.append((await fleet.backend(PLAIN, LOOPBACK, 0.0).run(batch)).ms_per_token)
        moment = rng.randint(max_tokens // 8, max_tokens // 2)
        after.append(await _after_kill(fleet, batch, moment, rng.uniform(0.0, WITHIN_S)))
        note(f"  {number + 1} of {kills}: plain {plain[-1]:.1f}, after the draft's end {after[-1]:.1f} ms a token")
    return {
        "plain_ms": spread(plain),
        "after_ms": spread(after),
        "kept": spread([before / later for before, later in zip(plain, after, strict=True)]),
    }


async def _after_kill(fleet: NetworkFleet, batch: NetworkBatch, after_tokens: int, wait_s: float) -> float:
    """A draft of its own is started, used and killed. Raises ValueError if the completion ended too early."""
    with start_slow_draft(fleet.setup.folders.draft, fleet.setup.cores.draft) as draft:
        ready = await asyncio.to_thread(draft.wait, fleet.setup.timeout_s)
        async with connect(fleet.setup, fleet.target.address, ready["address"]) as gateway:
            killer = DraftKiller(draft, after_tokens, wait_s)
            backend = ServicesBackend(gateway.engine, gateway.watcher, BRANCHES)
            rounds = await backend.stream(batch, 0, killer.on_round)
    return after_ms(rounds, killer.killed_at)


def after_ms(rounds: Sequence[Round], killed_at: float | None) -> float:
    """Milliseconds a token from a moment on."""
    later = [closed for closed in rounds if killed_at is not None and closed.ended > killed_at]
    tokens = sum(len(closed.commit.ids) for closed in later)
    if killed_at is None or not tokens:
        raise ValueError("a completion ended before its draft was killed: ask for more tokens")
    return 1e3 * (rounds[-1].ended - killed_at) / tokens


NEAR, NO_DELAY = "0.2v", "0v"  # both through the proxies, so that they differ in the delay alone
KEPT_AIM, FORM_AIM, COLOCATED_AIM, KILL_AIM, LOAD_AIM = 0.9, 0.9, 1.15, 0.95, 0.97
COLOCATED_COST, LOAD_STREAMS = 0.2, 32


def check_aims(result: Json) -> Iterator[Json]:
    """Every aim that the result has the cells for: {"name", "value", "low", "high", "aim", "met"}."""
    for block in result["blocks"]:
        where = f"{title(block)}, draft cost {block['cost']:g}"
        for name, values, aim, never_below in _of_block(block):
            yield _checked(f"{where}: {name}", values, aim, never_below)
    if result.get("kills"):
        values = result["kills"]["kept"]["values"]
        yield _checked("speed after the draft was killed, over plain", values, KILL_AIM, never_below=True)


def _checked(name: str, values: Sequence[float], aim: float, never_below: bool) -> Json:
    value, (low, high) = median(values), interval(values)
    return {
        "name": name,
        "value": value,
        "low": low,
        "high": high,
        "aim": aim,
        "never_below": never_below,
        "met": (high if never_below else value) >= aim,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """What holds the median with at least 95 % confidence, whatever the distribution: the narrowest pair of order
    statistics that does, by the binomial law; least and greatest where fewer than six values allow none."""
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 2.0**-count
    while cut + 1 < count - cut - 1 and outside + comb(count, cut + 1) * 2.0**-count <= 0.025:
        cut += 1
        outside += comb(count, cut) * 2.0**-count
    return ordered[cut], ordered[-1 - cut]


def _of_block(block: Json) -> Iterator[tuple[str, Sequence[float], float, bool]]:
    here, near = cell(block, BRANCHES, "0"), cell(block, BRANCHES, NEAR)
    if (undelayed := cell(block, BRANCHES, NO_DELAY) or here) and near:
        yield f"branches, {NEAR} over no delay", faster(near, undelayed), KEPT_AIM, False
    if near:
        over_form = [near["form_ms"] / value for value in near["ms_per_token"]["values"]]
        yield f"branches, {NEAR}, over the closed form", over_form, FORM_AIM, False
    for name in (COLOCATED, COLOCATED_ALL):
        other = cell(block, name, "0")
        if here and other and block["cost"] == COLOCATED_COST:
            yield f"branches over {name}", faster(here, other), COLOCATED_AIM, False
    auto = cell(block, AUTO, "0")
    if auto and block["batch"] >= LOAD_STREAMS:
        others = [found for name in SERVICES if name != AUTO and (found := cell(block, name, "0"))]
        best = min(others, key=lambda found: float(found["ms_per_token"]["median"]), default=auto)
        if cell(block, PLAIN, "0"):
            yield f"auto over the best of the others ({best['mode']})", faster(auto, best), LOAD_AIM, True


def cell(block: Json, mode: str, network: str) -> Json | None:
    """A cell of a block, if it was measured."""
    return next((found for found in block["cells"] if (found["mode"], found["network"]) == (mode, network)), None)


def faster(one: Json, other: Json) -> list[float]:
    """Speed of one cell over another's, repeat by repeat."""
    pairs = zip(one["ms_per_token"]["values"], other["ms_per_token"]["values"], strict=True)
    return [theirs / ours for ours, theirs in pairs]


DESCRIPTION = (
    "Measure what the network between the services costs: time per token over delays, jitter and stalls between them, "
    "for each mode, beside plain decoding, co-located speculation and the closed forms."
)
MAX_TOKENS = 900  # of the completions in which a draft is killed


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench network") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(NetworkSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION).effective()
    logging.basicConfig(level=logging.ERROR)  # drafts that are killed are no news

    def work() -> int:
        result = asyncio.run(_run(settings))
        print("\n".join(render(result)))
        settings.write(result)
        if settings.store:
            path = store(settings.results, result)
            print(f"\nstored in {path}")
            write_figure(path.with_suffix(".svg"), lambda: draw_network(result))
        return 0

    return report_failures(prog, work)


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


async def _run(settings: NetworkSettings) -> Json:
    cores = share_cores()
    folders, pair = settings.checkpoints()
    prompts = read_prompts(load_tokenizer(folders.target, "--target"), None, len(PROMPTS))
    setup = Setup(folders, cores, settings.expand, settings.num_draft_tokens, settings.start_timeout)
    network_setup = {
        "pair": f"{'the expansion of ' * settings.expand}{pair}",
        "k": settings.num_draft_tokens,
        "max_tokens": settings.max_tokens,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "cores_awake": settings.keep_awake,
    }
    result = new_result(describe(), network_setup) | {"blocks": [], "kills": None}
    with CoreSpinner(settings.keep_awake):
        note("starting the services ...")
        async with start_network_fleet(setup, settings.modes, map(Network.parse, settings.networks)) as fleet:
            await _measure(settings, fleet, prompts, result)
    result["aims"] = list(check_aims(result))
    return result


async def _measure(
    settings: NetworkSettings, fleet: NetworkFleet, prompts: Sequence[Sequence[int]], result: Json
) -> None:
    for block in blocks_of(settings):
        note(f"{title({'batch': block.streams, 'temperature': block.temperature})}, draft cost {block.cost:g}")
        result["blocks"].append(await measure_block(fleet, block, prompts, settings.repeats, settings.seed, note))
    if settings.kills:
        note("drafts killed at random moments")
        length = min(2 * settings.max_tokens, MAX_TOKENS)
        result["kills"] = await measure_kills(fleet, prompts, settings.kills, length, settings.seed, note)


if __name__ == "__main__":
    sys.exit(main())
