"""The table of the kernel bench: as Markdown, and in a file named by time and device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from outrider.commands.bench_result import Json
from outrider.commands.bench_store import dump

HEAD = ("function", "where", "shape", "us", "floor us", "share of floor", "compared with", "us", "times as fast")


def store(folder: Path, result: Json) -> Path:
    """Writes JSON and Markdown; returns the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(result)}.json"
    path.write_text(dump(result), encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(render(result)) + "\n", encoding="utf-8")
    return path


def file_stem(result: Json) -> str:
    """When it was measured, and on what."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", result["device"]["name"]).lower()).strip("-")
    return f"{re.sub(r'[-:]', '', result['when'])[:13]}-{slug}"


def render(result: Json) -> Iterator[str]:
    """The whole page."""
    device, machine, setup = result["device"], result["machine"], result["setup"]
    yield f"# Kernels on {device['name']}"
    yield ""
    where = "CUDA " + device["cuda"] if device["cuda"] else f"{device['threads']} threads of {machine['cores']} cores"
    yield (
        f"{result['when']}, {where}, {device['dtype']}, torch {machine['torch']}; medians of {setup['repeats']} "
        f"alternating runs, least and greatest in brackets; k = {setup['k']}."
    )
    yield ""
    if setup["quick"]:
        yield "These shapes say only that it runs."
        yield ""
    yield from _rates(result)
    yield ""
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|---|---|--:|--:|--:|---|--:|--:|"
    for row in result["rows"]:
        yield f"| {' | '.join(_cells(row))} |"
    yield ""
    yield "Without a row:"
    yield ""
    yield from (f"* `{name}`: {reason}" for name, reason in result["without_row"].items())


def _rates(result: Json) -> Iterator[str]:
    measured = [row for row in result["rows"] if "us" in row]
    if measured:
        yield (
            f"Beside the rows: copy {_range(measured, 'copy_gb_s')} GB/s, read {_range(measured, 'read_gb_s')} GB/s, "
            f"product {_range(measured, 'product_gflop_s')} GFLOP/s; {_foreign(result['foreign_cpus'])}."
        )


def _range(rows: list[Json], name: str) -> str:
    medians = [row[name]["median"] for row in rows]
    return f"{min(medians):.0f} to {max(medians):.0f}"


def _foreign(cpus: float | None) -> str:
    return "other programs not known" if cpus is None else f"other programs kept {cpus:.2f} CPUs busy"


def _cells(row: Json) -> tuple[str, ...]:
    name = (f"`{row['function']}`", row["device"], row["shape"])
    if "us" not in row:
        said = f"not measured: {row['not_measured']}".replace("|", "/")
        return (*name, said, "", "", row["against"], "", "")
    return (
        *name,
        _us(row["us"]),
        f"{row['floor_us']['median']:.1f}",
        _ratio(row["share_of_floor"]),
        row["against"],
        _us(row["against_us"]),
        _ratio(row["times_as_fast"]),
    )


def _us(found: Json) -> str:
    return f"{found['median']:.1f}"


def _ratio(found: Json) -> str:
    return f"{found['median']:.2f} ({found['min']:.2f}..{found['max']:.2f})"
