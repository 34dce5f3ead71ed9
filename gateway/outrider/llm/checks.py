"""What the checks of every argument share. numpy's numbers are numbers; True and False are none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number, neither NaN nor infinite."""
    return isinstance(value, Real) and not isinstance(value, bool) and -math.inf < float_or_inf(value) < math.inf


def float_or_inf(value: Real) -> float:
    """The number as a float; infinity for a whole number beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raises a ValueError that names the field, its value and what is allowed."""
    if not holds:
        raise ValueError(f"{name} must be {allowed}, got {value!r:.100}.")


def listed(name: str, value: Any, allowed: str) -> list[Any]:
    """The entries of a list, a tuple, a set, an array; what Python would take apart otherwise is refused."""
    require(isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping), name, value, allowed)
    return list(value)
