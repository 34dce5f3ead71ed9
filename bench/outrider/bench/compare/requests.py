"""What is asked: the lines of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.bench.prompts import read_values

Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompareRequest(BaseModel):
    """A prompt with all that is its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: Text | Ids = Field(union_mode="left_to_right")
    prediction: Text | Ids | None = Field(None, union_mode="left_to_right")  # a guess at the answer
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    json_schema: dict[str, Any] | None = None  # that the answer satisfies
    counts: bool = True  # else it is asked, and learned from, but not measured


def read_requests(path: Path, whole: bool = False) -> list[CompareRequest]:
    """The requests of a file: JSON lines (or a JSON list) of objects, texts or lists of token ids; else a prompt a
    line, or, if `whole`, the text as one prompt. Raises OSError, and ValueError that names the line and the field."""
    values = [path.read_text(encoding="utf-8")] if whole else read_values(path)
    requests = [_request(path, number, value) for number, value in enumerate(values, 1)]
    if not any(request.counts for request in requests):
        raise ValueError(f"{path} has no prompt that counts")
    return requests


def _request(path: Path, number: int, value: Any) -> CompareRequest:
    fields = value if isinstance(value, dict) else {"prompt": value}
    try:
        return CompareRequest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0] if first["loc"] else "prompt"
        allowed = ", ".join(CompareRequest.model_fields)
        problem = f"is no field; allowed: {allowed}" if first["type"] == "extra_forbidden" else first["msg"].lower()
        raise ValueError(f"{path}, prompt {number}: {name}: {problem}") from error
