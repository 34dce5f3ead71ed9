"""The bricks of the validator: each check adds to a list of violations, so that a caller learns of all at once. A
violation shows a number's value, and of texts and lists only the length: errors travel to logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from outrider.wire.errors import InvalidArgument, Violation


class Violations:
    """Collects what is wrong; `prefix` is put before each field's name ("sampling.")."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._found: list[Violation] = []

    def add(self, field: str, problem: str, allowed: str) -> None:
        """One violation."""
        self._found.append(Violation(self._prefix + field, f"{problem}; allowed: {allowed}"))

    def extend(self, other: Violations) -> None:
        """Takes over the violations of a part."""
        self._found += other._found

    def raise_if_any(self) -> None:
        """InvalidArgument that names every field."""
        if self._found:
            raise InvalidArgument.of(self._found)

    def integer(self, field: str, value: object, low: int, high: int, also: int | None = None) -> bool:
        """A whole number in a closed range, or the one value `also`."""
        if isinstance(value, Integral) and not isinstance(value, bool) and (low <= int(value) <= high or value == also):
            return True
        allowed = f"{low} to {high}" if also is None else f"{also}, or {low} to {high}"
        self.add(field, f"is {_shown(value)}", f"a whole number, {allowed}")
        return False

    def number(self, field: str, value: object, low: float, high: float, *, zero: bool = False, say: str = "") -> bool:
        """A finite number in a closed range; `zero` allows 0 below it; `say` words the range."""
        finite = isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
        if finite and (low <= float(value) <= high or (zero and value == 0)):  # type: ignore[arg-type]
            return True
        self.add(field, f"is {_shown(value)}", (say or f"{low:g} to {high:g}") if finite else "a finite number")
        return False

    def flag(self, field: str, value: object) -> None:
        """True or false."""
        if not isinstance(value, bool):
            self.add(field, f"is {_shown(value)}", "true or false")

    def length(self, field: str, values: Sequence[object] | dict[int, float], high: int) -> bool:
        """No more than so many entries."""
        if len(values) <= high:
            return True
        self.add(field, f"has {len(values)} entries", f"at most {high}")
        return False

    def text(self, field: str, value: object, high: int, *, empty: bool = True) -> None:
        """A text of bounded length."""
        if not isinstance(value, str):
            self.add(field, f"is a {type(value).__name__}", "a text")
        elif len(value) > high:
            self.add(field, f"has {len(value)} characters", f"at most {high}")
        elif not value and not empty:
            self.add(field, "is empty", "at least one character")

    def ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Token ids below the number of logits. The extremes are found at C speed; a bad one is searched after."""
        if not ids:
            return
        try:
            if min(ids) >= 0 and max(ids) < vocab_size and not _has_odd_type(ids):
                return
        except TypeError:
            pass  # not all are numbers: named below
        for index, token in enumerate(ids):
            if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
                self.add(f"{field}[{index}]", f"is {_shown(token)}", f"a token id, 0 to {vocab_size - 1}")
                return


def _has_odd_type(ids: Sequence[int]) -> bool:
    return not {int}.issuperset(map(type, ids))


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats, as JSON allows
        return False


def _shown(value: object) -> str:
    if isinstance(value, bool | Real) or value is None:
        text = str(value)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return f"a {type(value).__name__}"
