"""What the plots have in common: the colours of their texts, and a line of text."""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, FAINT = "#1a202c", "#4a5568"


def svg_text(
    x: float, y: float, text: str, *, size: int = 11, weight: str = "normal", anchor: str = "start", colour: str = INK
) -> str:
    """A line of text."""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'
