"""A result of the network bench as text."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.commands.bench_network_forms import Costs, floor
from outrider.commands.bench_result import Json, title
from outrider.commands.bench_table import align


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
