"""A load's result as an SVG: for each kind of time the share of requests (or deliveries) that took at most so long, its
median and 99th percentile, and the objective where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.commands.bench_serve_report import TIMES, Json
from outrider.commands.svg import FAINT, svg_text

WIDTH, MARGIN, GAP, TOP = 860, 40, 50, 92
PANEL_WIDTH, PANEL_HEIGHT = (WIDTH - 2 * MARGIN - GAP) / 2, 190
CURVE, OBJECTIVE, GRID = "#2b6cb0", "#c05621", "#e2e8f0"
MOST_POINTS = 400
OBJECTIVES = {"ttft_ms": "slo_ttft_ms", "tpot_ms": "slo_itl_ms"}


def draw(result: Json, times: dict[str, list[float]]) -> str:
    """The whole picture."""
    shown = [(key, name) for key, name in TIMES if times[key]]
    height = TOP + (len(shown) + 1) // 2 * (PANEL_HEIGHT + GAP + 12) + MARGIN
    shapes = [
        svg_text(MARGIN, 32, f"{result['server']}: {result['loop']}", size=15, weight="bold"),
        svg_text(MARGIN, 52, _numbers(result), colour=FAINT),
    ]
    for place, (key, name) in enumerate(shown):
        left = MARGIN + place % 2 * (PANEL_WIDTH + GAP)
        top = TOP + place // 2 * (PANEL_HEIGHT + GAP + 12)
        objective = result["setup"].get(OBJECTIVES.get(key, ""))
        shapes += _panel(left, top, name, sorted(times[key]), result["times"][key], objective)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _numbers(result: Json) -> str:
    words = [
        f"{result['completed']} of {result['requests']} requests",
        f"{result['output_tokens_per_s']:.1f} output tokens/s",
        f"{result['requests_per_s']:.2f} requests/s",
    ]
    if result["goodput"] is not None:
        words.append(f"goodput {result['goodput']['requests_per_s']:.2f} requests/s")
    if result["speculation"] is not None:
        words.append(f"acceptance {result['speculation']['acceptance_rate']:.1%}")
    return ", ".join(words)


def _panel(
    left: float, top: float, name: str, ordered: Sequence[float], found: Json, objective: float | None
) -> Iterator[str]:
    """One curve; its axis reaches the greatest value, or the objective where that is more."""
    most = max(ordered[-1], objective or 0.0) or 1.0
    bottom, right = top + PANEL_HEIGHT, left + PANEL_WIDTH
    yield svg_text(left, top - 10, f"{name.partition(' (')[0]}, ms", size=12, weight="bold")
    yield svg_text(right, top - 10, f"p50 {found['p50']:.1f}, p99 {found['p99']:.1f}", anchor="end", colour=FAINT)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - share * PANEL_HEIGHT
        yield f'<path d="M{left:g} {y:g}H{right:g}" stroke="{GRID}"/>'
        yield svg_text(left - 4, y + 3, f"{share:.0%}", size=9, anchor="end", colour=FAINT)
        yield svg_text(
            left + share * PANEL_WIDTH, bottom + 14, f"{share * most:.4g}", size=9, anchor="middle", colour=FAINT
        )
    yield f'<path d="{_curve(ordered, left, bottom, most)}" fill="none" stroke="{CURVE}" stroke-width="1.6"/>'
    if objective is not None:
        x = left + objective / most * PANEL_WIDTH
        yield f'<path d="M{x:.1f} {top:g}V{bottom:g}" stroke="{OBJECTIVE}" stroke-dasharray="4 3"/>'
        yield svg_text(x - 4, top + 10, f"objective {objective:g}", size=9, anchor="end", colour=OBJECTIVE)


def _curve(ordered: Sequence[float], left: float, bottom: float, most: float) -> str:
    """Steps up by one value each; of many values a part."""
    count = len(ordered)
    places = sorted({round(place * (count - 1) / (MOST_POINTS - 1)) for place in range(MOST_POINTS)})
    points = [f"M{left + ordered[0] / most * PANEL_WIDTH:.1f} {bottom:.1f}"]
    for place in places:
        x, y = left + ordered[place] / most * PANEL_WIDTH, bottom - (place + 1) / count * PANEL_HEIGHT
        points.append(f"H{x:.1f}V{y:.1f}")
    return "".join(points)
