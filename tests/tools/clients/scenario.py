"""What every client is asked for. Each script here, `with_LIBRARY.py URL MODEL`, does it in its library's own way, in
the environment that has the library, and prints a `report` of what a user of the library would have in hand."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Annotated, Any

from pydantic import BaseModel, Field

# So long that some blocks of it come from the prefix cache when it is asked again.
PROMPT = '''"""Events of a calendar: when they are, and how the weather will be."""

import calendar


def plan(self, day):'''
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
MAX_TOKENS = 32
LONGEST = 120  # tokens of an answer whose end a schema brings
RESULT = "rain at 14 degrees"


class Event(BaseModel, extra="forbid"):
    """An event of one day."""

    name: Annotated[str, Field(min_length=1, max_length=8)]
    day: Annotated[int, Field(ge=1, le=31)]


class Place(BaseModel, extra="forbid"):
    """Where a forecast is for."""

    city: Annotated[str, Field(min_length=1, max_length=8)]


FORECAST: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather.",
        "strict": True,
        "parameters": Place.model_json_schema(),
    },
}


def usage(prompt: int, completion: int, cached: int | None) -> dict[str, int | None]:
    """Tokens as a library counts them for its user."""
    return {"prompt": prompt, "completion": completion, "cached": cached}


def report(*packages: str, **found: Any) -> None:
    """Prints what was found, and by which versions."""
    print(json.dumps({"versions": {name: version(name) for name in packages}, **found}))
