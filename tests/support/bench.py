"""What the benches' tests share: a run with its result, and what figures say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support.services import succeed

Measured = tuple[str, dict[str, Any]]


def run_bench(folder: Path, *arguments: str) -> Measured:
    """What `outrider bench ARGUMENTS` prints, and its result."""
    text = succeed("bench", *arguments, "--output", str(folder / "result.json"), cwd=folder)
    return text, only_result(folder)


def only_result(folder: Path) -> dict[str, Any]:
    """Of a bench that stores nothing beside; it names no place of this machine."""
    assert [entry.name for entry in folder.iterdir()] == ["result.json"]
    text = (folder / "result.json").read_text()
    assert not any(place in text for place in (str(Path.home()), os.uname().nodename, "/" + "tmp"))
    result: dict[str, Any] = json.loads(text)
    return result


def texts_of(path: Path) -> set[str]:
    """Every text of an SVG file, a line each."""
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    return {"".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("}text")}
