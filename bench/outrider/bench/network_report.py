"""A result of the network bench as text.

A result of the network bench as an SVG: time per token against the round trip, a panel a block. Dots with whiskers
are measured, lines the closed forms with what was measured of their inputs.

One block of the network bench: a number of streams, a temperature and a draft's cost, over every mode and network,
all cells in random order in every repeat."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from outrider.bench.machine import ForeignLoad
from outrider.bench.network_fleet import (
    BRANCHES,
    CHAINS,
    COLOCATED,
    COLOCATED_ALL,
    PLAIN,
    SEQUENTIAL,
    Costs,
    Network,
    NetworkBatch,
    NetworkFleet,
    RoundSummary,
    batch_of,
    branches,
    chains,
    floor,
    sequential,
)
from outrider.bench.report import FAINT, INK, Json, align, spread, svg_text, title


def render(result: Json) -> Iterator[str]:
    """All blocks and the aims. Numbers are medians, with least and greatest in brackets."""
    machine, setup = result["machine"], result["setup"]
    yield f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; {setup['pair']}, k={setup['k']}"
    for block in result["blocks"]:
        yield ""
        foreign = block["foreign_cpus"]
        others = "not known" if foreign is None else f"{foreign:.2f} CPUs"
        yield (
            f"{title(block)}, draft cost {block['cost']:g}: verification {block['verify_ms']:.1f} ms, draft pass "
            f"{block['pass_ms']:.1f} ms; other programs {others}"
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
    costs, time = Costs(**cell["costs"]), cell["ms_per_token"]
    return (
        f"{cell['mode']}, {cell['network']}",
        f"{cell['round_trip_ms']:.1f}",
        f"{time['median']:.2f} ({time['min']:.2f}..{time['max']:.2f})",
        _number(cell["form_ms"]),
        _number(floor(costs) if costs.acceptance else None),
        f"{costs.tokens_per_round:.2f}",
        _number(costs.acceptance or None),
        _number(cell["hits"]),
    )


def _kills(kills: Json) -> Iterator[str]:
    yield "the draft killed at a random moment, ms a token"
    for name in ("plain_ms", "after_ms", "kept"):
        found = kills[name]
        yield f"  {name.removesuffix('_ms'):<6} {found['median']:.2f} ({found['min']:.2f}..{found['max']:.2f})"


def _aim(aim: Json) -> tuple[str, str, str, str]:
    reached = f"{aim['value']:.3f} ({aim['low']:.3f}..{aim['high']:.3f})"
    bound = f"{'never below ' * aim['never_below']}{aim['aim']:.2f}"
    return aim["name"], reached, bound, "met" if aim["met"] else "missed"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


SETTLING = 3  # runs before a block

Note = Callable[[str], None]
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
        return batch_of(prompts, self.streams, self.temperature, self.max_tokens, self.num_draft_tokens, seed)


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


COLOURS = {
    "sequential": "#c05621", "chains": "#2f855a", "branches": "#2b6cb0", "auto": "#6b46c1", "colocated": "#b83280",
    "colocated-all": "#b7791f", "plain": "#718096",
}  # fmt: skip
WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 860, 300, 64, 190, 62, 44
STEPS = 80  # of a line


@dataclass(frozen=True, slots=True)
class Scale:
    """Milliseconds to places in a panel."""

    top: float
    most_x: float
    most_y: float

    def x(self, round_trip_ms: float) -> float:
        """To the right."""
        return LEFT + round_trip_ms / self.most_x * (WIDTH - LEFT - RIGHT)

    def y(self, ms: float) -> float:
        """Upwards."""
        return self.top + TOP + (1 - min(ms, self.most_y) / self.most_y) * (PANEL - TOP - BOTTOM)


def draw(result: Json) -> str:
    """The whole picture."""
    blocks, setup = result["blocks"], result["setup"]
    height = 40 + PANEL * len(blocks)
    shapes = [
        svg_text(16, 24, f"ms a token over the round trip: {setup['pair']}, k={setup['k']}", size=15, weight="bold")
    ]
    for index, block in enumerate(blocks):
        shapes += _panel(block, 40 + index * PANEL)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _panel(block: Json, top: float) -> Iterator[str]:
    cells = block["cells"]
    most_x = max(1.0, 1.08 * max(cell["round_trip_ms"] for cell in cells))
    scale = Scale(top, most_x, 1.1 * max(cell["ms_per_token"]["max"] for cell in cells))
    yield svg_text(LEFT, top + 20, f"{title(block)}, draft cost {block['cost']:g}", size=13, weight="bold")
    note = f"verification {block['verify_ms']:.1f} ms, draft pass {block['pass_ms']:.1f} ms"
    yield svg_text(LEFT, top + 36, note, colour=FAINT)
    yield from _axes(scale)
    modes = list(dict.fromkeys(cell["mode"] for cell in cells))
    for row, mode in enumerate(modes):
        own = [cell for cell in cells if cell["mode"] == mode]
        yield from _mode(mode, own, block, scale)
        place = top + TOP + 8 + 17 * row
        yield f'<circle cx="{WIDTH - RIGHT + 16}" cy="{place}" r="4" fill="{COLOURS[mode]}"/>'
        yield svg_text(WIDTH - RIGHT + 26, place + 4, mode)
    acceptance = [Costs(**cell["costs"]) for cell in cells if cell["costs"]["acceptance"]]
    if acceptance:
        yield _line([(x, floor(acceptance[0])) for x in (0.0, most_x)], scale, INK, "2 3")
        yield svg_text(WIDTH - RIGHT + 26, top + TOP + 12 + 17 * len(modes), "floor (1 - a) t_verify (dotted)")


def _axes(scale: Scale) -> Iterator[str]:
    base, right = scale.y(0), scale.x(scale.most_x)
    yield f'<path d="M{LEFT} {scale.y(scale.most_y):.1f}V{base:.1f}H{right:.1f}" fill="none" stroke="{FAINT}"/>'
    for part in range(5):
        ms, away = scale.most_y * part / 4, scale.most_x * part / 4
        yield svg_text(LEFT - 6, scale.y(ms) + 4, f"{ms:.0f}", anchor="end", colour=FAINT)
        yield svg_text(scale.x(away), base + 16, f"{away:.0f}", anchor="middle", colour=FAINT)
    yield svg_text(right, base + 32, "round trip, ms", anchor="end", colour=FAINT)


def _mode(mode: str, cells: Sequence[Json], block: Json, scale: Scale) -> Iterator[str]:
    """Its form, or a level where the network does not matter, and its dots."""
    colour, first = COLOURS[mode], cells[0]
    hits = [cell["hits"] for cell in cells if cell["hits"] is not None]
    places = [scale.most_x * step / STEPS for step in range(STEPS + 1)]
    if mode in ("plain", "colocated", "colocated-all"):
        yield _line([(x, first["ms_per_token"]["median"]) for x in (0.0, scale.most_x)], scale, colour, "6 4")
    else:
        costs = Costs(**first["costs"])
        form = [(x, form_ms(mode, costs, x, mean(hits) if hits else 0.0, block["plain_ms"])) for x in places]
        yield _line([(x, ms) for x, ms in form if ms is not None], scale, colour)
    for cell in cells:
        time, x = cell["ms_per_token"], scale.x(cell["round_trip_ms"])
        low, middle, high = (scale.y(time[key]) for key in ("min", "median", "max"))
        fill = colour if cell["steady"] else "#ffffff"
        yield f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="{fill}" stroke="{colour}"/>'


def _line(points: Sequence[tuple[float, float]], scale: Scale, colour: str, dashes: str = "none") -> str:
    path = " ".join(f"{scale.x(x):.1f},{scale.y(ms):.1f}" for x, ms in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'
