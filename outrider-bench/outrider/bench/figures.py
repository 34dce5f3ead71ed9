"""The figures of the bench, as SVG files: speeds of a pair, time per token over a network, methods, what was learned.

matplotlib draws them, and is imported only when one is drawn: measuring does without. Texts stay texts, and equal
results give equal bytes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from outrider.bench.results import Json, shares, title
from outrider.planner.formulas import Costs, branches, chains, floor, sequential

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "matplotlib is not installed: pip install 'outrider[bench]'"
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 9.0, "axes.titlelocation": "left"}
INCHES = 8.6
OURS, OTHERS, INK = "#2b6cb0", "#a0aec0", "#1a202c"
MODES = {
    "sequential": "#c05621", "chains": "#2f855a", "branches": "#2b6cb0", "auto": "#6b46c1", "colocated": "#b83280",
    "colocated-all": "#b7791f", "plain": "#718096",
}  # fmt: skip
METHOD_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#b7791f", "#319795", "#718096", "#9b2c2c")
STEPS = 80  # of a line
ON_NO_NETWORK = ("plain", "colocated", "colocated-all")  # what a network changes nothing about, or hides in credit


def write_figure(path: Path, draw: Callable[[], Figure]) -> None:
    """Draws to an SVG file, or says on standard error that matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {path.name}: {MISSING}", file=sys.stderr)
        return
    from matplotlib import rc_context

    with rc_context(STYLE):
        draw().savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def draw_pair(result: Json) -> Figure:
    """Tokens a second: for each cell a bar a way, its range as a whisker, a diamond where the floor would be."""
    machine, setup, blocks = result["machine"], result["setup"], result["blocks"]
    sizes = [len(block["ways"]) + 1.5 for block in blocks]
    figure, panels = _panels(len(blocks), 1, 0.6 + 0.26 * sum(sizes), sizes)
    _head(
        figure,
        f"tokens/s: {setup['pair']}, k={setup['k']}",
        f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; medians of {setup['repeats']}, "
        "whiskers: least and greatest, diamonds: the floor",
    )
    for block, axes in zip(blocks, panels, strict=True):
        ways: Json = block["ways"]
        speeds = [way["tokens_per_s"] for way in ways.values()]
        medians = [speed["median"] for speed in speeds]
        below = [speed["median"] - speed["min"] for speed in speeds]
        above = [speed["max"] - speed["median"] for speed in speeds]
        colours = [OURS if name.startswith("outrider") else OTHERS for name in ways]
        bars = axes.barh(list(ways), medians, xerr=(below, above), color=colours, ecolor=INK)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        floors = [(speed, row) for row, way in enumerate(ways.values()) if (speed := floor_speed(way)) is not None]
        axes.plot([speed for speed, _ in floors], [row for _, row in floors], "D", color=INK, fillstyle="none")
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_title(title(block))
    return figure


def floor_speed(way: Json) -> float | None:
    """Tokens a second if a round were its products alone."""
    share, speed = way.get("share_of_floor"), way.get("steady_tokens_per_s")
    return speed["median"] / share["median"] if share and speed and share["median"] else None


def draw_network(result: Json) -> Figure:
    """Time per token over the round trip, a panel a block: dots with whiskers are measured (hollow: jitter or stalls),
    lines are the closed forms with what was measured of their inputs, or a level where the network changes nothing."""
    blocks, setup = result["blocks"], result["setup"]
    figure, panels = _panels(len(blocks), 1, 0.5 + 3.0 * len(blocks))
    _head(figure, f"ms a token over the round trip: {setup['pair']}, k={setup['k']}")
    for block, axes in zip(blocks, panels, strict=True):
        cells: list[Json] = block["cells"]
        most = max(1.0, 1.08 * max(cell["round_trip_ms"] for cell in cells))
        for mode in dict.fromkeys(cell["mode"] for cell in cells):
            _draw_mode(axes, mode, [cell for cell in cells if cell["mode"] == mode], block["plain_ms"], most)
        accepting = [Costs(**cell["costs"]) for cell in cells if cell["costs"]["acceptance"]]
        if accepting:
            axes.axhline(floor(accepting[0]), color=INK, linestyle=":", label="floor (1 - a) t_verify")
        axes.set_title(
            f"{title(block)}, draft cost {block['cost']:g}\n"
            f"verification {block['verify_ms']:.1f} ms, draft pass {block['pass_ms']:.1f} ms"
        )
        axes.set_xlabel("round trip, ms")
        axes.set_xlim(-most / 50, most)
        axes.set_ylim(0, 1.1 * max(cell["ms_per_token"]["max"] for cell in cells))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _draw_mode(axes: Axes, mode: str, cells: Sequence[Json], plain_ms: float, most: float) -> None:
    """One mode's line and dots."""
    colour = MODES[mode]
    if mode in ON_NO_NETWORK:
        axes.axhline(cells[0]["ms_per_token"]["median"], color=colour, linestyle="--")
    else:
        costs, hits = Costs(**cells[0]["costs"]), [cell["hits"] for cell in cells if cell["hits"] is not None]
        places = [most * step / STEPS for step in range(STEPS + 1)]
        form = [form_ms(mode, costs, place, mean(hits) if hits else 0.0, plain_ms) for place in places]
        points = [(place, ms) for place, ms in zip(places, form, strict=True) if ms is not None]
        axes.plot([place for place, _ in points], [ms for _, ms in points], color=colour)
    for number, cell in enumerate(cells):
        time = cell["ms_per_token"]
        whiskers = ([time["median"] - time["min"]], [time["max"] - time["median"]])
        axes.errorbar(
            cell["round_trip_ms"], time["median"], yerr=whiskers, fmt="o", color=colour,
            markerfacecolor=colour if cell["steady"] else "white", label=None if number else mode,
        )  # fmt: skip


def form_ms(mode: str, costs: Costs, round_trip_ms: float, hits: float, plain_ms: float) -> float | None:
    """Time per token in closed form; None where there is none."""
    if mode in ("sequential", "colocated", "colocated-all"):
        return sequential(costs, round_trip_ms)
    if mode == "chains":
        return chains(costs, round_trip_ms)
    return branches(costs, round_trip_ms, hits, plain_ms) if mode == "branches" else None


def draw_compare(result: Json) -> Figure:
    """For each set of prompts four panels with a bar or line a method: tokens a round, the draft's time, the share
    accepted by position, and the speed over plain decoding, a bar a mode."""
    sets, modes = result["sets"], result["setup"]["modes"]
    methods = result["setup"]["methods"]
    colours = dict(zip(methods, cycle(METHOD_COLOURS), strict=False))
    figure, panels = _panels(len(sets), 4, 0.7 + 0.5 * len(sets) + 0.22 * len(methods) * len(modes) * len(sets))
    setup = result["setup"]
    _head(figure, f"{setup['target']}: methods of drafting, k={setup['k']}", _where(result))
    for found, row in zip(sets, range(0, len(panels), 4), strict=True):
        tokens, times, accepted, speeds = panels[row : row + 4]
        ways = {
            name: found["ways"][f"{name}, {modes[0]}"] for name in methods if f"{name}, {modes[0]}" in found["ways"]
        }
        for axes, key, head in (
            (tokens, "tokens_per_round", "tokens a round"),
            (times, "draft_ms", "draft, ms"),
        ):
            values = [way[key]["median"] for way in ways.values()]
            axes.bar_label(axes.barh(list(ways), values, color=[colours[name] for name in ways]), fmt="%.2f", padding=2)
            axes.set_title(head, fontsize=9)
        tokens.set_title(f"{found['name']}: tokens a round", fontsize=9)
        for name, way in ways.items():
            places = [place for place, tested in enumerate(way["tested"], 1) if tested]
            accepted.plot(places, shares(way), "o-", markersize=3, color=colours[name], label=name)
        accepted.set_title("accepted by position", fontsize=9)
        accepted.set_ylim(0, 1.05)
        _draw_speeds(speeds, found["ways"], ways, modes, colours)
        for axes in (tokens, times, speeds):
            axes.invert_yaxis()
            axes.margins(x=0.25)
        for axes in (times, speeds):
            axes.tick_params(labelleft=False)
    return figure


def _draw_speeds(axes: Axes, found: Json, methods: Json, modes: Sequence[str], colours: dict[str, str]) -> None:
    """A bar a mode, the first one filled, of every method."""
    height = 0.8 / len(modes)
    for place, mode in enumerate(modes):
        rows = [row + (place - (len(modes) - 1) / 2) * height for row in range(len(methods))]
        speeds = [found[f"{name}, {mode}"]["over_plain"]["median"] for name in methods]
        bars = axes.barh(
            rows, speeds, height, color=[colours[name] for name in methods], alpha=1.0 if place == 0 else 0.45
        )
        axes.bar_label(bars, labels=[f"{speed:.2f} {mode}" for speed in speeds], padding=2, fontsize=7)
    axes.axvline(1.0, color=INK, linestyle=":")
    axes.set_yticks(range(len(methods)), list(methods))
    axes.set_title("speed over plain", fontsize=9)


def draw_learning(result: Json) -> Figure:
    """Drafts accepted, by what a learner has put in use so far: a line a domain, from what the draft came with; dotted
    what one that was distilled offline has."""
    setup, points = result["setup"], result["points"]
    learned = setup["domains"][0]
    figure, panels = _panels(1, 2, 3.4)
    _head(
        figure,
        f"accepted while it learns {learned}: {setup['pair']}, k={setup['k']}, {setup['tokens_per_s']:g} tokens/s",
        f"{_machine(result)}; by the learner's processor time, on texts that nobody learned from",
    )
    times = [0.0, *(point["seconds"] / 60 for point in points)]
    for axes, how in zip(panels, ("greedy", "sampled"), strict=True):
        for name, colour in zip(setup["domains"], cycle(METHOD_COLOURS)):
            shares = [result["alone"][name][how], *(point["live"][name][how] for point in points)]
            axes.step(times, shares, "-", where="post", color=colour, label=name, linewidth=2 if name == learned else 1)
            if "reference" in result:
                axes.axhline(result["reference"][name][how], color=colour, linestyle=":", linewidth=1)
        axes.set_title(how, fontsize=9)
        axes.set_xlabel("minutes")
        axes.set_ylim(0, None)
    panels[0].legend(fontsize=7)
    return figure


def _machine(result: Json) -> str:
    machine = result["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores"


def _where(result: Json) -> str:
    return f"{_machine(result)}; medians of {result['setup']['repeats']}"


def _panels(rows: int, columns: int, inches: float, sizes: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches' height, and its panels row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(INCHES, inches), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False, height_ratios=sizes).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _head(figure: Figure, head: str, below: str = "") -> None:
    """What the whole figure is of."""
    figure.suptitle(f"{head}\n{below}".rstrip(), x=0.01, horizontalalignment="left")
