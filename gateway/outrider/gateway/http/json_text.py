"""Answers as JSON. json.dumps writes all of a long one in one call, for which no other thread runs."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from starlette.responses import JSONResponse, Response

JOINED = 4096  # pieces at once

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))  # as starlette's


def dumps(value: dict[str, Any]) -> str:
    """JSON on one line."""
    return _ENCODER.encode(value)


def dumps_in_pieces(value: dict[str, Any]) -> str:
    """JSON on one line, written in as many calls as it has values."""
    return "".join(_ENCODER.iterencode(value))


def answer(value: dict[str, Any], *, is_long: bool) -> Response:
    """A whole answer; a long one is written for other threads to run."""
    return InPieces(value) if is_long else JSONResponse(value)


class InPieces(JSONResponse):
    """A JSONResponse's bytes."""

    def render(self, content: Any) -> bytes:
        """Written in as many calls as it has values, and joined in several, too."""
        pieces = _STRICT.iterencode(content)
        return b"".join("".join(some).encode() for some in iter(lambda: list(islice(pieces, JOINED)), []))
