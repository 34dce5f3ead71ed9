"""The prompts of a load: built in, or from a file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from outrider.commands.bench_prompts import PROMPTS


def read_texts(path: Path | None) -> list[str]:
    """All prompts of a file: a JSON list, JSON lines or plain lines. ValueError names what is wrong."""
    if path is None:
        return list(PROMPTS)
    content = path.read_text(encoding="utf-8")
    if content.lstrip().startswith("[") and path.suffix != ".txt":
        values = _json(path, content)
    elif path.suffix in (".jsonl", ".ndjson") or content.lstrip().startswith(("{", '"')):
        lines = enumerate(content.splitlines(), 1)
        values = [_json(path, line, number) for number, line in lines if line.strip()]
    else:
        values = [line for line in content.splitlines() if line.strip()]
    texts = [_text(path, number, value) for number, value in enumerate(values, 1)]
    if not texts:
        raise ValueError(f"{path} has no prompts")
    return texts


def choose(texts: list[str], num: int, seed: int) -> list[str]:
    """`num` prompts: all of them once in an order that the seed decides, then again."""
    order = random.Random(seed).sample(texts, len(texts))
    return [order[place % len(order)] for place in range(num)]


def _json(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}, line {line or error.lineno}"
        raise ValueError(f"{where}: no JSON ({error.msg})") from error


def _text(path: Path, number: int, value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("prompt")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}, prompt {number}: expected a text, or an object with a text as prompt")
    return value
