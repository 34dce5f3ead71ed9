"""A result of the network bench as an SVG: time per token against the round trip, a panel a block. Dots with whiskers
are measured, lines the closed forms with what was measured of their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from outrider.commands.bench_network_block import form_ms
from outrider.commands.bench_network_forms import Costs, floor
from outrider.commands.bench_result import Json, title
from outrider.commands.svg import FAINT, INK, svg_text

COLOURS = {
    "sequential": "#c05621", "chains": "#2f855a", "branches": "#2b6cb0", "auto": "#6b46c1", "colocated": "#b83280",
    "colocated-all": "#b7791f", "plain": "#718096",
}  # fmt: skip
WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 860, 300, 64, 190, 62, 44
STEPS = 80  # of a line


@dataclass(frozen=True, slots=True)
class Scale:
    """Milliseconds to places in a panel."""

    top: float
    most_x: float
    most_y: float

    def x(self, round_trip_ms: float) -> float:
        """To the right."""
        return LEFT + round_trip_ms / self.most_x * (WIDTH - LEFT - RIGHT)

    def y(self, ms: float) -> float:
        """Upwards."""
        return self.top + TOP + (1 - min(ms, self.most_y) / self.most_y) * (PANEL - TOP - BOTTOM)


def draw(result: Json) -> str:
    """The whole picture."""
    blocks, setup = result["blocks"], result["setup"]
    height = 40 + PANEL * len(blocks)
    shapes = [
        svg_text(16, 24, f"ms a token over the round trip: {setup['pair']}, k={setup['k']}", size=15, weight="bold")
    ]
    for index, block in enumerate(blocks):
        shapes += _panel(block, 40 + index * PANEL)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _panel(block: Json, top: float) -> Iterator[str]:
    cells = block["cells"]
    most_x = max(1.0, 1.08 * max(cell["round_trip_ms"] for cell in cells))
    scale = Scale(top, most_x, 1.1 * max(cell["ms_per_token"]["max"] for cell in cells))
    yield svg_text(LEFT, top + 20, f"{title(block)}, draft cost {block['cost']:g}", size=13, weight="bold")
    note = f"verification {block['verify_ms']:.1f} ms, draft pass {block['pass_ms']:.1f} ms"
    yield svg_text(LEFT, top + 36, note, colour=FAINT)
    yield from _axes(scale)
    modes = list(dict.fromkeys(cell["mode"] for cell in cells))
    for row, mode in enumerate(modes):
        own = [cell for cell in cells if cell["mode"] == mode]
        yield from _mode(mode, own, block, scale)
        place = top + TOP + 8 + 17 * row
        yield f'<circle cx="{WIDTH - RIGHT + 16}" cy="{place}" r="4" fill="{COLOURS[mode]}"/>'
        yield svg_text(WIDTH - RIGHT + 26, place + 4, mode)
    acceptance = [Costs(**cell["costs"]) for cell in cells if cell["costs"]["acceptance"]]
    if acceptance:
        yield _line([(x, floor(acceptance[0])) for x in (0.0, most_x)], scale, INK, "2 3")
        yield svg_text(WIDTH - RIGHT + 26, top + TOP + 12 + 17 * len(modes), "floor (1 - a) t_verify (dotted)")


def _axes(scale: Scale) -> Iterator[str]:
    base, right = scale.y(0), scale.x(scale.most_x)
    yield f'<path d="M{LEFT} {scale.y(scale.most_y):.1f}V{base:.1f}H{right:.1f}" fill="none" stroke="{FAINT}"/>'
    for part in range(5):
        ms, away = scale.most_y * part / 4, scale.most_x * part / 4
        yield svg_text(LEFT - 6, scale.y(ms) + 4, f"{ms:.0f}", anchor="end", colour=FAINT)
        yield svg_text(scale.x(away), base + 16, f"{away:.0f}", anchor="middle", colour=FAINT)
    yield svg_text(right, base + 32, "round trip, ms", anchor="end", colour=FAINT)


def _mode(mode: str, cells: Sequence[Json], block: Json, scale: Scale) -> Iterator[str]:
    """Its form, or a level where the network does not matter, and its dots."""
    colour, first = COLOURS[mode], cells[0]
    hits = [cell["hits"] for cell in cells if cell["hits"] is not None]
    places = [scale.most_x * step / STEPS for step in range(STEPS + 1)]
    if mode in ("plain", "colocated", "colocated-all"):
        yield _line([(x, first["ms_per_token"]["median"]) for x in (0.0, scale.most_x)], scale, colour, "6 4")
    else:
        costs = Costs(**first["costs"])
        form = [(x, form_ms(mode, costs, x, mean(hits) if hits else 0.0, block["plain_ms"])) for x in places]
        yield _line([(x, ms) for x, ms in form if ms is not None], scale, colour)
    for cell in cells:
        time, x = cell["ms_per_token"], scale.x(cell["round_trip_ms"])
        low, middle, high = (scale.y(time[key]) for key in ("min", "median", "max"))
        fill = colour if cell["steady"] else "#ffffff"
        yield f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="{fill}" stroke="{colour}"/>'


def _line(points: Sequence[tuple[float, float]], scale: Scale, colour: str, dashes: str = "none") -> str:
    path = " ".join(f"{scale.x(x):.1f},{scale.y(ms):.1f}" for x, ms in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'
