"""The numbers aimed at, from a result: what was reached, repeat by repeat where both runs have one.

"Never below" a bound means that the 95 % interval of the median does not lie below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from statistics import median

from outrider.commands.bench_network_run import AUTO, BRANCHES, COLOCATED, COLOCATED_ALL, PLAIN, SERVICES
from outrider.commands.bench_result import Json, title

NEAR, NO_DELAY = "0.2v", "0v"  # both through the proxies, so that they differ in the delay alone
KEPT_AIM, FORM_AIM, COLOCATED_AIM, KILL_AIM, LOAD_AIM = 0.9, 0.9, 1.15, 0.95, 0.97
COLOCATED_COST, LOAD_STREAMS = 0.2, 32


def judge(result: Json) -> Iterator[Json]:
    """Every aim that the result has the cells for: {"name", "value", "low", "high", "aim", "met"}."""
    for block in result["blocks"]:
        where = f"{title(block)}, draft cost {block['cost']:g}"
        for name, values, aim, never_below in _of_block(block):
            yield _judged(f"{where}: {name}", values, aim, never_below)
    if result.get("kills"):
        values = result["kills"]["kept"]["values"]
        yield _judged("speed after the draft was killed, over plain", values, KILL_AIM, never_below=True)


def _judged(name: str, values: Sequence[float], aim: float, never_below: bool) -> Json:
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
