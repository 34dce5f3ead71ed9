"""The JSON body of a request, and how its fields are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from outrider.gateway.http_errors import invalid
from outrider.gateway.http_options import options_of
from outrider.wire.checks import kind, shown

MAX_SHOWN = 100  # characters of a name that nobody knows


@dataclass(slots=True)
class Body:
    """A JSON object whose nulls are absent."""

    values: Mapping[str, Any]
    where: str = ""  # before the names of fields

    def get(self, name: str, default: Any = None) -> Any:
        """The value, unchecked."""
        value = self.values.get(name)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: a text")
        return value

    def items(self, name: str, allowed: str = "a list") -> tuple[Any, ...]:
        """A list, its entries unchecked."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: {allowed}")
        return tuple(value)

    def inner(self, name: str) -> Body | None:
        """An object inside this one."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: an object")
        return Body(value, f"{self.where}{name}.")

    def only(self, *names: str) -> None:
        """Refuses names that this object does not have."""
        for name in self.values:
            if name not in names:
                raise invalid(f"{self.where}{name[:MAX_SHOWN]}", f"is unknown; allowed: {', '.join(names)}")

    def refuse(self, *names: str, unless: tuple[Any, ...] = (False, "", [], {})) -> None:
        """Fields that are known and not supported; `unless` are values that ask for nothing."""
        for name in names:
            value = self.get(name)
            if value is not None and not any(value == harmless for harmless in unless):
                raise invalid(self.where + name, "is not supported; leave it out")


async def read_body(request: Request) -> Body:
    """The JSON object of a request. 413 for one that is too large. A browser's form is refused: no other page may post
    here."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid("content-type", "is not JSON; allowed: application/json")
    most = options_of(request).max_body_bytes
    too_large = HTTPException(413, f"body: has more than {most} bytes; allowed: at most that many (max_request_bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:  # before it is read
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise too_large
        chunks.append(chunk)
    return parse_body(b"".join(chunks))


def parse_body(raw: bytes) -> Body:
    """The JSON object in some bytes."""
    try:
        values = json.loads(raw)
        if b"\\u" in raw:  # half a surrogate pair is no character: no tokenizer takes it
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise invalid("body", "is no JSON; allowed: a JSON object in UTF-8") from None
    if not isinstance(values, dict):
        raise invalid("body", f"is {kind(values)}; allowed: a JSON object")
    return Body(values)
