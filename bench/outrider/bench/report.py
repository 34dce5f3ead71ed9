"""What the bench found, as JSON holds it: medians with their spread, ratios within repeats.

The regression check: ratios and shares of the floor against the last stored result of the same machine and setup.

Stored results: JSON and a plot beside it, in files named by time and machine.

A result as text.

The prompts of the bench: the beginnings of Python functions, cut to one length in tokens, because transformers'
batches are rectangles.

A result as an SVG: for each cell a bar for each way, its spread as a line, and a mark where the floor would be.

What the plots have in common: the colours of their texts, and a line of text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from outrider.bench.measure import Cell, Run
from outrider.gateway.text.tokenizer import Tokenizer

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


PROMPTS = (
    'def parse_args(argv):\n    """Parse the command line and return the options and the arguments."""\n    parser =',
    'class Stack:\n    """A last-in, first-out container of items."""\n\n    def __init__(self):\n        self.items =',
    'def read_config(path):\n    """Read the configuration file and return it as a dictionary."""\n    with open(path)',
    'import os\nimport sys\n\n\ndef find_files(root, suffix):\n    """Yield the files below root that end in',
    'def binary_search(values, key):\n    """Return the index of key in the sorted list values, or -1."""\n    low = 0',
    'class Node:\n    """A node of a binary tree, with a value and two children."""\n\n    def __init__(self, value):',
    'def fibonacci(n):\n    """Return the first n numbers of the Fibonacci sequence, in a list."""\n    result = []\n',
    'import json\n\n\ndef save(data, filename):\n    """Write the data to the file as JSON with indentation."""\n',
    'def is_prime(number):\n    """Return True if the number is a prime number and False otherwise."""\n    if number',
    'class Timer:\n    """Measure the time that a block of code takes to run."""\n\n    def __enter__(self):\n',
    'def merge(left, right):\n    """Merge two sorted lists into a new sorted list and return it."""\n    result =',
    'import unittest\n\n\nclass TestParser(unittest.TestCase):\n    """Tests of the parser on small inputs."""\n\n',
    'def send_request(url, data=None, timeout=10):\n    """Send a request to the url and return the response."""\n   ',
    'class Cache:\n    """A dictionary that forgets the entries that were not used lately."""\n\n    def get(self,',
    'def count_words(text):\n    """Return a dictionary from each word of the text to its number."""\n    counts =',
    'import threading\n\n\nclass Worker(threading.Thread):\n    """Take tasks from a queue and run them, until',
)
MAX_PROMPT_TOKENS = 64


def read_prompts(tokenizer: Tokenizer, path: Path | None, num: int) -> list[list[int]]:
    """Token ids of `num` prompts, all of the same length. Raises ValueError where the file has too few."""
    texts = list(PROMPTS) if path is None else json.loads(path.read_text(encoding="utf-8"))
    if len(texts) < num or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"the prompts must be a JSON list of at least {num} texts")
    prompts = [list(tokenizer.encode(text)) for text in texts[:num]]
    length = min(MAX_PROMPT_TOKENS, *map(len, prompts)) if num > 1 else min(MAX_PROMPT_TOKENS, len(prompts[0]))
    return [ids[:length] for ids in prompts]


INK, FAINT = "#1a202c", "#4a5568"


def svg_text(
    x: float, y: float, text: str, *, size: int = 11, weight: str = "normal", anchor: str = "start", colour: str = INK
) -> str:
    """A line of text."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


WIDTH, LABEL, MARGIN = 860, 220, 24
BAR, GAP, HEAD = 18, 6, 34
OUR_COLOUR, OTHERS_COLOUR = "#2b6cb0", "#a0aec0"


def draw(result: Json) -> str:
    """The whole picture."""
    blocks = result["blocks"]
    height = MARGIN * 2 + 40 + sum(_height(block) for block in blocks)
    machine, setup = result["machine"], result["setup"]
    top = MARGIN + 40
    shapes = [
        svg_text(MARGIN, MARGIN + 6, f"tokens/s: {setup['pair']}, k={setup['k']}", size=15, weight="bold"),
        svg_text(
            MARGIN,
            MARGIN + 24,
            f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}; medians of {setup['repeats']}, "
            "whiskers: least and greatest, diamonds: the floor",
            colour=FAINT,
        ),
    ]
    for block in blocks:
        shapes += _block(block, top)
        top += _height(block)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _height(block: Json) -> int:
    return HEAD + len(block["ways"]) * (BAR + GAP)


def floor_speed(way: Json) -> float | None:
    """Tokens a second if a round were its products alone."""
    share, speed = way.get("share_of_floor"), way.get("steady_tokens_per_s")
    return speed["median"] / share["median"] if share and speed and share["median"] else None


def _block(block: Json, top: int) -> Iterator[str]:
    ways = block["ways"]
    most = max(max(way["tokens_per_s"]["max"], floor_speed(way) or 0) for way in ways.values())
    scale = (WIDTH - LABEL - 2 * MARGIN - 60) / most
    yield svg_text(MARGIN, top + HEAD - 12, title(block), size=13, weight="bold")
    for row, (name, way) in enumerate(ways.items()):
        yield from _bar(name, way, top + HEAD + row * (BAR + GAP), scale)


def _bar(name: str, way: Json, top: int, scale: float) -> Iterator[str]:
    left, middle = MARGIN + LABEL, top + BAR / 2
    speed = way["tokens_per_s"]
    low, centre, high = (left + speed[key] * scale for key in ("min", "median", "max"))
    colour = OUR_COLOUR if name.startswith("outrider") else OTHERS_COLOUR
    yield svg_text(left - 8, middle + 4, name, anchor="end")
    yield f'<rect x="{left}" y="{top}" width="{centre - left:.1f}" height="{BAR}" fill="{colour}"/>'
    yield f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{INK}" stroke-width="1.5"/>'
    end = high
    if floor := floor_speed(way):
        x = left + floor * scale
        yield f'<path d="M{x:.1f} {middle - 6}l5 6l-5 6l-5 -6z" fill="none" stroke="{INK}"/>'
        end = max(end, x + 5)
    yield svg_text(end + 6, middle + 4, f"{speed['median']:.1f}")


def store(folder: Path, result: Json, plot: Callable[[Json], str] = draw) -> Path:
    """Writes both files; returns the JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = result["machine"]
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(.*?\)", "", machine["cpu"]).lower()).strip("-")
    when = re.sub(r"[-:]", "", result["when"])[:13]
    path = folder / f"{when}-{slug}-{machine['cores']}c.json"
    path.write_text(dump(result), encoding="utf-8")
    path.with_suffix(".svg").write_text(plot(result), encoding="utf-8")
    return path


def dump(result: Json) -> str:
    """JSON with short lists on one line."""
    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"
