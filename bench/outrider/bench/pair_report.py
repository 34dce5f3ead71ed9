"""What `outrider bench` found: described as JSON holds it, compared with the last stored result of the same machine and
setup, and as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median

from outrider.bench.measure import Cell, Run
from outrider.bench.results import Json, align, bracketed, median_of, other_programs, spread, title, where

PLAIN = "outrider plain"
AUTO = "outrider auto"
OURS = ("outrider rejection", "outrider coupled", "outrider chains", "outrider branches", AUTO)


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


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def last_result(folder: Path, machine: Json, setup: Json) -> Json | None:
    """The newest stored result of the same machine description and setup."""
    found: list[Json] = []
    for path in folder.glob("*.json"):
        result: Json = json.loads(path.read_text(encoding="utf-8"))
        if result["machine"] == machine and result["setup"] == setup:
            found.append(result)
    return max(found, key=lambda result: str(result["when"]), default=None)


def moved(old: Json, new: Json) -> list[str]:
    """What moved by more than the spread: either median lies outside the other's range. What was measured only once
    has no spread, and is left out."""
    before = dict(_figures(old))
    lines = []
    for name, now in _figures(new):
        then = before.get(name)
        if then is None or min(len(then["values"]), len(now["values"])) < 2:
            continue
        if _outside(now["median"], then) and _outside(then["median"], now):
            word = "better" if now["median"] > then["median"] else "worse"
            lines.append(f"{name}: {then['median']:.2f} -> {now['median']:.2f}, {word}")
    return lines


def _figures(result: Json) -> Iterator[tuple[str, Json]]:
    for block in result["blocks"]:
        for name, ratio in block["ratios"].items():
            yield f"{title(block)}: {name}", ratio
        for name, way in block["ways"].items():
            if "share_of_floor" in way:
                yield f"{title(block)}: {name}, share of floor", way["share_of_floor"]


def _outside(value: float, found: Json) -> bool:
    return not found["min"] <= value <= found["max"]


PARTS = ("total", "draft", "wire", "queue", "verify", "sample", "gateway")


def render(result: Json) -> Iterator[str]:
    """All blocks; numbers are medians, with least and greatest in brackets."""
    yield where(result)
    for block in result["blocks"]:
        yield ""
        yield f"{title(block)}  ({_probes(block)})"
        yield from _speeds(block)
        yield from _ratios(block)
        yield from _acceptance(block)
        yield from _rounds(block)


def _speeds(block: Json) -> Iterator[str]:
    rows = [("", "tokens/s", "tokens/round", "rows", "products ms", "share of floor", "overhead ms")]
    for name, way in block["ways"].items():
        rows.append(
            (
                name,
                bracketed(way.get("tokens_per_s"), 1),
                median_of(way.get("tokens_per_round"), 2),
                median_of(way.get("rows"), 0),
                median_of(way.get("products_ms"), 1),
                bracketed(way.get("share_of_floor"), 2),
                bracketed(way.get("overhead_ms"), 2),
            )
        )
    yield from align(rows)


def _ratios(block: Json) -> Iterator[str]:
    if block["ratios"]:
        yield ""
        yield from align([(name, bracketed(ratio, 2)) for name, ratio in block["ratios"].items()])


def _acceptance(block: Json) -> Iterator[str]:
    rows = [
        (name, *(f"{part}/{whole}" for part, whole in zip(way["accepted"], way["tested"], strict=True)))
        for name, way in block["ways"].items()
        if "tested" in way
    ]
    if rows:
        yield ""
        width = max(map(len, rows))
        head = ("accepted/tested", *(str(position) for position in range(1, width)))
        yield from align([head, *(row + ("",) * (width - len(row)) for row in rows)])


def _rounds(block: Json) -> Iterator[str]:
    rows = [
        (name, *(f"{way['round_ms'][part]:.2f}" for part in PARTS), f"{way['round_ms']['rows']:g}")
        for name, way in block["ways"].items()
        if way.get("round_ms")
    ]
    if rows:
        yield ""
        yield from align([("ms a round", *PARTS, "rows"), *rows])


def _probes(block: Json) -> str:
    probes = block["probe"].values()
    copies, products = ([probe[name] for probe in probes] for name in ("copy_gb_s", "product_gflop_s"))
    return (
        f"copy {min(copies):.0f}-{max(copies):.0f} GB/s, product {min(products):.0f}-{max(products):.0f} GFLOP/s, "
        f"before and after; {other_programs(block.get('foreign_cpus'))}"
    )
