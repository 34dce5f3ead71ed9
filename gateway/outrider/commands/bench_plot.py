"""A result as an SVG: for each cell a bar for each way, its spread as a line, and a mark where the floor would be."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.commands.bench_result import Json, title
from outrider.commands.svg import FAINT, INK, svg_text

WIDTH, LABEL, MARGIN = 860, 220, 24
BAR, GAP, HEAD = 18, 6, 34
OURS, OTHERS = "#2b6cb0", "#a0aec0"


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
    colour = OURS if name.startswith("outrider") else OTHERS
    yield svg_text(left - 8, middle + 4, name, anchor="end")
    yield f'<rect x="{left}" y="{top}" width="{centre - left:.1f}" height="{BAR}" fill="{colour}"/>'
    yield f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{INK}" stroke-width="1.5"/>'
    end = high
    if floor := floor_speed(way):
        x = left + floor * scale
        yield f'<path d="M{x:.1f} {middle - 6}l5 6l-5 6l-5 -6z" fill="none" stroke="{INK}"/>'
        end = max(end, x + 5)
    yield svg_text(end + 6, middle + 4, f"{speed['median']:.1f}")
