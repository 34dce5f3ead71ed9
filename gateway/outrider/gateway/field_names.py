"""A refusal's fields by the names that a caller has for them. The protocol's own are for gRPC; HTTP and `LLM` call some
otherwise, and both translate here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from outrider.rpc.errors import TOO_LONG, InvalidArgument, OutriderError, Violation

_FIELD = re.compile(r"([a-z_]+(?:\.[a-z_]+)*(?:\[\d+\])?): ")
_DOTTED = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+")  # in a sentence a name of one word may be just that word
_PARTS = ("open.", "sampling.")


def renamed(error: OutriderError, names: Mapping[str, str], max_model_len: int) -> OutriderError:
    """The error with its fields as the caller knows them. `names` maps the protocol's names, or what they begin with.
    What is too long is told in OpenAI's words, too: libraries look for them."""
    violations, found = error.violations, _FIELD.match(error.message)
    if not violations and isinstance(error, InvalidArgument) and found:
        violations = (Violation(found[1], error.message[found.end() :]),)  # a target's refusal is text alone
    if not violations:
        field = f"{_rename(found[1], names)}: " if found else ""
        message = field + _within(error.message[found.end() if found else 0 :], names)
        return error if message == error.message else _retold(error, message)
    told = InvalidArgument.of(
        replace(item, field=_rename(item.field, names), problem=_within(item.problem, names)) for item in violations
    )
    if told.reason != TOO_LONG:
        return told
    message = f"{told.message}. This model's maximum context length is {max_model_len} tokens."
    return InvalidArgument(message, reason=TOO_LONG, violations=told.violations)


def _retold(error: OutriderError, message: str) -> OutriderError:
    return type(error)(message, reason=error.reason, retry_after_ms=error.retry_after_ms)


def _within(text: str, names: Mapping[str, str]) -> str:
    """A text with the protocol's names in it."""

    def own(found: re.Match[str]) -> str:
        return _rename(found[0], names) if found[0] in names or found[0].startswith(_PARTS) else found[0]

    return _DOTTED.sub(own, text)


def _rename(field: str, names: Mapping[str, str]) -> str:
    for part in _PARTS:
        field = field.removeprefix(part)
    for name in sorted(names, key=len, reverse=True):
        if field == name or field.startswith((f"{name}[", f"{name}.")):
            return names[name] + field[len(name) :]
    return field
