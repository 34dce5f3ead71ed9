"""A result as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.commands.bench_result import Json, title

PARTS = ("total", "draft", "wire", "queue", "verify", "sample", "gateway")


def render(result: Json) -> Iterator[str]:
    """All blocks; numbers are medians, with least and greatest in brackets."""
    machine, setup = result["machine"], result["setup"]
    yield f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; {setup['pair']}, k={setup['k']}"
    for block in result["blocks"]:
        yield ""
        yield f"{title(block)}  ({_probes(block)})"
        yield from _speeds(block)
        yield from _ratios(block)
        yield from _acceptance(block)
        yield from _rounds(block)


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()


def _speeds(block: Json) -> Iterator[str]:
    rows = [("", "tokens/s", "tokens/round", "rows", "products ms", "share of floor", "overhead ms")]
    for name, way in block["ways"].items():
        rows.append(
            (
                name,
                _spread(way.get("tokens_per_s"), 1),
                _median(way.get("tokens_per_round"), 2),
                _median(way.get("rows"), 0),
                _median(way.get("products_ms"), 1),
                _spread(way.get("share_of_floor"), 2),
                _spread(way.get("overhead_ms"), 2),
            )
        )
    yield from align(rows)


def _ratios(block: Json) -> Iterator[str]:
    if block["ratios"]:
        yield ""
        yield from align([(name, _spread(ratio, 2)) for name, ratio in block["ratios"].items()])


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
        f"before and after; {_foreign(block)}"
    )


def _foreign(block: Json) -> str:
    busy = block.get("foreign_cpus")
    return "other programs not known" if busy is None else f"other programs {busy:.2f} CPUs"


def _spread(found: Json | None, digits: int) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}..{found['max']:.{digits}f})"


def _median(found: Json | None, digits: int) -> str:
    return "-" if found is None else f"{found['median']:.{digits}f}"
