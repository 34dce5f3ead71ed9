"""GGUF files of a test's own (version 3, little-endian), with no library of others."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ALIGNMENT = 32

_FORMS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
          "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip
_STRING, _ARRAY = 8, 9


class Typed(NamedTuple):
    """A number, or numbers, of a form that is not what their Python type stands for."""

    form: str  # of _FORMS
    value: Any


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Sequence[int], int, bytes]] | None = None
) -> Path:
    """Writes a file and returns its path. Texts, booleans, ints (u32, or i32 where one is negative), floats (f32) and
    sequences of these are metadata as they are; `Typed` says another form. Bytes are a text that need not be UTF-8."""
    placed, offset = [], 0
    for name, (shape, kind, data) in (tensors or {}).items():
        sizes = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        placed.append((_text(name) + sizes, _padded(data)))
        offset += len(placed[-1][1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(placed), len(metadata))
    head += b"".join(_text(key) + _value(value) for key, value in metadata.items())
    head += b"".join(entry for entry, _ in placed)
    path.write_bytes(_padded(head) + b"".join(data for _, data in placed))
    return path


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, Typed):
        kind, form = _FORMS[value.form]
        if isinstance(value.value, Sequence):
            return struct.pack(f"<IIQ{len(value.value)}{form}", _ARRAY, kind, len(value.value), *value.value)
        return struct.pack(f"<I{form}", kind, value.value)
    if isinstance(value, Sequence):
        return _array(value)
    return _value(Typed(_form_of([value]), value))


def _array(values: Sequence[Any]) -> bytes:
    if values and isinstance(values[0], str | bytes):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(_text, values))
    if values and isinstance(values[0], Sequence):  # arrays in an array
        inner = b"".join(_value(one)[4:] for one in values)
        return struct.pack("<IIQ", _ARRAY, _ARRAY, len(values)) + inner
    return _value(Typed(_form_of(values), values))


def _form_of(values: Sequence[Any]) -> str:
    if values and all(isinstance(one, bool) for one in values):
        return "bool"
    if any(isinstance(one, float) for one in values):
        return "f32"
    return "i32" if any(one < 0 for one in values) else "u32"
