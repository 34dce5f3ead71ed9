"""JSON as callers send it. What is read here is rendered by templates, compiled to grammars and told again in answers:
so it is held to what all of these take."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 100  # of lists and objects in one another: what walks them calls itself once a level
ALLOWED = f"a JSON object, nested at most {MAX_DEPTH} deep"


class RepeatedKey(ValueError):
    """A key stands twice in one object."""


def parse_json(text: str, unique_keys: bool = False) -> Any:
    """The value of a text. ValueError for what is no JSON, as NaN, numbers beyond floats and half surrogate pairs are
    none, and for what is nested deeper than MAX_DEPTH; RepeatedKey where each key may stand once."""
    try:
        hook = _with_unique_keys if unique_keys else None
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError("is nested too deep")
    if "\\u" in text:  # half a surrogate pair is no character: no tokenizer takes it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise RepeatedKey(next(key for key, num in Counter(key for key, _ in pairs).items() if num > 1))
    return values


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no number")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (part for whole in level for part in (whole.values() if isinstance(whole, dict) else whole))
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return False
    return True
