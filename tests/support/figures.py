"""What figures say."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def texts_of(path: Path) -> set[str]:
    """Every text of an SVG file, a line each."""
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    return {"".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("}text")}
