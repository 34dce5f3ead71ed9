"""What the bench found, as JSON holds it: medians with their spread, ratios within repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from outrider.commands.bench_run import Cell, Run

PLAIN = "outrider plain"
REJECTION = "outrider rejection"
COUPLED = "outrider coupled"
CHAINS = "outrider chains"
BRANCHES = "outrider branches"
AUTO = "outrider auto"
OURS = (REJECTION, COUPLED, CHAINS, BRANCHES, AUTO)

Json = dict[str, Any]


def spread(values: Sequence[float | None]) -> Json | None:
    """Median, least and greatest of the values that are there."""
    found = [round(value, 4) for value in values if value is not None]
    return {"median": median(found), "min": min(found), "max": max(found), "values": found} if found else None


def describe_way(runs: Sequence[Run], cell: Cell) -> Json:
    """One way of decoding in one cell."""
    described: Json = {
        "tokens_per_s": spread([run.tokens_per_s for run in runs]),
        "steady_tokens_per_s": spread([run.steady_tokens_per_s for run in runs]),
        "tokens_per_round": spread([run.tokens_per_round for run in runs]),
        "rows": spread([run.rows or None for run in runs]),
        "products_ms": spread([run.products_ms for run in runs]),
        "share_of_floor": spread([run.share_of_floor(cell.batch) for run in runs]),
        "overhead_ms": spread([median(run.overhead_us) / 1e3 if run.overhead_us else None for run in runs]),
    }
    stats = [found for run in runs for found in run.stats]
    if any(found.num_draft_tokens for found in stats):
        described["accepted"] = _columns([found.num_accepted_per_position for found in stats])
        described["tested"] = _columns([found.num_tested_per_position for found in stats])
    return {name: value for name, value in described.items() if value is not None}


def ratios(runs: Mapping[str, Sequence[Run]]) -> Json:
    """Each of our speculating ways over plain decoding and the peers', auto over every way, and our plain decoding over
    the peers', repeat by repeat."""
    found: Json = {}
    for mine in (*OURS, PLAIN):
        for other in runs:
            if mine not in runs or other == mine or (other in OURS and mine != AUTO):
                continue
            pairs = zip(runs[mine], runs[other], strict=True)
            found[f"{mine} / {other}"] = spread([ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs])
    return found


def describe_block(
    cell: Cell, runs: Mapping[str, Sequence[Run]], before: Json, after: Json, foreign_cpus: float | None
) -> Json:
    """One cell. The probe was made before and after it; other programs kept `foreign_cpus` busy meanwhile."""
    return {
        "batch": cell.batch,
        "temperature": cell.temperature,
        "probe": {"before": before, "after": after},
        "foreign_cpus": foreign_cpus,
        "ways": {name: describe_way(own, cell) for name, own in runs.items()},
        "ratios": ratios(runs),
    }


def title(block: Json) -> str:
    """A cell in words."""
    streams = "1 stream" if block["batch"] == 1 else f"{block['batch']} streams"
    kind = "greedy" if block["temperature"] == 0 else f"temperature {block['temperature']:g}"
    return f"{streams}, {kind}"


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
