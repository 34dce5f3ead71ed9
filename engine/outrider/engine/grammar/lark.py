"""Pieces of Lark and JSON schemas, from which constraints of every kind are put together, and how they are refused."""

from __future__ import annotations

import json
from typing import Any

from outrider.rpc.words.structured import JSON_OPTIONS


class GrammarError(ValueError):
    """A constraint that cannot be compiled, or that tokens do not fit."""


def first_line(text: str) -> str:
    """An error's first line, in at most 300 characters."""
    return next((line for line in text.splitlines() if line.strip()), "unknown error")[:300]


def quoted(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def schema_object(schema: object) -> dict[str, Any]:
    """A JSON schema with our options, where it has none of its own. Raises GrammarError for what is none."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise GrammarError("is no JSON schema; allowed: an object, true or false")
    return {"x-guidance": JSON_OPTIONS} | schema
