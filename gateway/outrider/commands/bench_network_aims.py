"""The numbers aimed at, from a result: what was reached, repeat by repeat where both runs have one."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from outrider.commands.bench_network_run import AUTO, BRANCHES, COLOCATED, COLOCATED_ALL, PLAIN, SERVICES
from outrider.commands.bench_result import Json, title

NEAR = "0.2v"
KEPT_AIM, FORM_AIM, COLOCATED_AIM, KILL_AIM, LOAD_AIM = 0.9, 0.9, 1.15, 0.95, 0.97
COLOCATED_COST, LOAD_STREAMS = 0.2, 32


def judge(result: Json) -> Iterator[Json]:
    """Every aim that the result has the cells for: {"name", "value", "aim", "met"}."""
    for block in result["blocks"]:
        where = f"{title(block)}, draft cost {block['cost']:g}"
        for name, value, aim in _of_block(block):
            yield {"name": f"{where}: {name}", "value": value, "aim": aim, "met": value >= aim}
    if result.get("kills"):
        value = result["kills"]["kept"]["median"]
        name = "speed after the draft was killed, over plain"
        yield {"name": name, "value": value, "aim": KILL_AIM, "met": value >= KILL_AIM}


def _of_block(block: Json) -> Iterator[tuple[str, float, float]]:
    here, near = cell(block, BRANCHES, "0"), cell(block, BRANCHES, NEAR)
    if here and near:
        yield f"branches, {NEAR} over no delay", faster(near, here), KEPT_AIM
    if near:
        yield f"branches, {NEAR}, over the closed form", near["form_ms"] / near["ms_per_token"]["median"], FORM_AIM
    for name in (COLOCATED, COLOCATED_ALL):
        other = cell(block, name, "0")
        if here and other and block["cost"] == COLOCATED_COST:
            yield f"branches over {name}", faster(here, other), COLOCATED_AIM
    auto = cell(block, AUTO, "0")
    if auto and block["batch"] >= LOAD_STREAMS:
        others = [found for name in SERVICES if name != AUTO and (found := cell(block, name, "0"))]
        best = min(others, key=lambda found: float(found["ms_per_token"]["median"]), default=auto)
        if cell(block, PLAIN, "0"):
            yield f"auto over the best of the others ({best['mode']})", faster(auto, best), LOAD_AIM


def cell(block: Json, mode: str, network: str) -> Json | None:
    """A cell of a block, if it was measured."""
    return next((found for found in block["cells"] if (found["mode"], found["network"]) == (mode, network)), None)


def faster(one: Json, other: Json) -> float:
    """Speed of one cell over another's."""
    pairs = zip(one["ms_per_token"]["values"], other["ms_per_token"]["values"], strict=True)
    return float(median(theirs / ours for ours, theirs in pairs))
