"""Draft weights as they cross the wire, from plain integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence

Vector = tuple[Sequence[int], Sequence[int]] | None


def packed(vectors: Sequence[Vector]) -> list[tuple[bytes, bytes] | None]:
    """Little-endian uint32; what is negative wraps around, as it would on a careless sender."""
    return [None if vector is None else (_pack(vector[0]), _pack(vector[1])) for vector in vectors]


def _pack(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *(int(value) & 0xFFFFFFFF for value in values))
