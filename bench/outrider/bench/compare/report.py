"""What was measured of the methods, as JSON holds it and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench.compare.requests import CompareRequest
from outrider.bench.compare.runs import PLAIN, Run, Way
from outrider.bench.results import Json, bracketed, median_of, spread

if TYPE_CHECKING:
    from rich.table import Table


def describe_set(path: Path, requests: Sequence[CompareRequest], repeats: Sequence[Mapping[Way, Run]]) -> Json:
    """One file: of every way the medians over the repeats, and its speed over plain decoding's, repeat by repeat."""
    plain = Way()
    counted = sum(request.counts for request in requests)
    ways = {}
    for way in repeats[0]:
        runs = [repeat[way] for repeat in repeats]
        speeds = [run.num_tokens / run.seconds for run in runs]
        plain_speeds = [repeat[plain].num_tokens / repeat[plain].seconds for repeat in repeats]
        ways[way.name] = {
            "method": PLAIN if way.method is None else way.method.name,
            "mode": way.mode,
            "tokens_per_round": spread([run.tokens_per_round for run in runs]),
            "draft_ms": spread([run.draft_ms for run in runs]),
            "tokens_per_s": spread(speeds),
            "over_plain": spread([own / other for own, other in zip(speeds, plain_speeds, strict=True)]),
            "off": spread([run.share_off for run in runs]),
            "accepted": _sums([run.tally.num_accepted_per_position for run in runs]),
            "tested": _sums([run.tally.num_tested_per_position for run in runs]),
            "forced": sum(run.tally.num_forced_tokens for run in runs),
            "forced_accepted": sum(run.tally.num_accepted_forced_tokens for run in runs),
            "different": sum(run.num_different for run in runs),
        }
    return {"name": path.stem, "prompts": counted, "ways": ways}


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def shares(way: Json) -> list[float]:
    """The share accepted at each position of those that were tested there: behind a refused token none is."""
    return [accepted / tested for accepted, tested in zip(way["accepted"], way["tested"], strict=True) if tested]


def tables(result: Json) -> Iterator[Table]:
    """A table a file: a row a method. What a round brought is of the first mode, where the number of drafted tokens is
    fixed unless that is auto; speeds are of every mode. Forced tokens are there where a prompt has a schema."""
    from rich.table import Table

    modes = result["setup"]["modes"]
    for found in result["sets"]:
        ways: Json = found["ways"]
        table = Table(title=f"{found['name']}: {found['prompts']} prompts", title_justify="left")
        for head in ("method", "tokens/round", "draft ms/round", *(f"{mode} / plain" for mode in modes), "auto off"):
            if head != "auto off" or "auto" in modes:
                table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
        forces = any(way["forced"] for way in ways.values())
        if forces:
            table.add_column("forced", justify="right", no_wrap=True)
        table.add_column("accepted at 1, 2, ...", no_wrap=True)
        speed = f"{median_of(ways[PLAIN]['tokens_per_s'], 1)} tokens/s"
        table.add_row(PLAIN, "1.00", "", speed)
        for method in dict.fromkeys(way["method"] for way in ways.values() if way["method"] != PLAIN):
            by_mode = [ways[f"{method}, {mode}"] for mode in modes]
            first, automatic = by_mode[0], [way for way in by_mode if way["mode"] == "auto"]
            table.add_row(
                method,
                median_of(first["tokens_per_round"], 2),
                median_of(first["draft_ms"], 2),
                *(bracketed(way["over_plain"]) for way in by_mode),
                *(f"{way['off']['median']:.0%}" for way in automatic),
                *([f"{first['forced_accepted']}/{first['forced']}"] if forces else []),
                " ".join(f"{share:.2f}" for share in shares(first)),
            )
        yield table


def differences(result: Json) -> Iterator[str]:
    """Answers that are not plain decoding's: a line a way that had any."""
    for found in result["sets"]:
        for name, way in found["ways"].items():
            if way["different"]:
                yield (
                    f"{found['name']}, {name}: {way['different']} answers are not plain decoding's: near-ties, which "
                    "the number of rows in a step decides (OUTRIDER_TARGET__BATCH_INVARIANT=true rules them out)"
                )
