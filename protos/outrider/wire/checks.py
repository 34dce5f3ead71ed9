"""The bricks of the validator: each check adds to a list of violations, so that a caller learns of all at once. A
violation shows a number's value, and of texts and lists only the length: errors travel to logs. Types have JSON's
names, whoever asks."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from numbers import Integral, Real

from outrider.wire.errors import InvalidArgument, Violation

MAX_SHOWN = 40  # characters of a value
_CONTROL = ("Cc", "Zl", "Zp")
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a truth value"),
    (Real, "a number"),
    (str, "a text"),
    (bytes, "bytes"),
    (Mapping, "an object"),
    ((Sequence, set, frozenset), "a list"),
)


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

    def take(self, error: InvalidArgument) -> None:
        """Takes over what a check that raises has found."""
        self._found += error.violations

    def raise_if_any(self) -> None:
        """InvalidArgument that names every field."""
        if self._found:
            raise InvalidArgument.of(self._found)

    def integer(self, field: str, value: object, low: int, high: int, also: int | None = None) -> bool:
        """A whole number in a closed range, or the one value `also`."""
        if isinstance(value, Integral) and not isinstance(value, bool) and (low <= int(value) <= high or value == also):
            return True
        allowed = f"{low} to {high}" if also is None else f"{also}, or {low} to {high}"
        self.add(field, f"is {shown(value)}", f"a whole number, {allowed}")
        return False

    def number(self, field: str, value: object, low: float, high: float, *, zero: bool = False, say: str = "") -> bool:
        """A finite number in a closed range; `zero` allows 0 below it; `say` words the range."""
        finite = isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
        if finite and (low <= float(value) <= high or (zero and value == 0)):  # type: ignore[arg-type]
            return True
        self.add(field, f"is {shown(value)}", (say or f"{low:g} to {high:g}") if finite else "a finite number")
        return False

    def flag(self, field: str, value: object) -> None:
        """True or false."""
        if not isinstance(value, bool):
            self.add(field, f"is {shown(value)}", "true or false")

    def length(self, field: str, values: Sequence[object] | dict[int, float], high: int, unit: str = "entries") -> bool:
        """No more than so many entries."""
        if len(values) <= high:
            return True
        self.add(field, f"has {len(values)} {unit}", f"at most {high}")
        return False

    def text(self, field: str, value: object, high: int, *, empty: bool = True) -> None:
        """A text of bounded length."""
        if not isinstance(value, str):
            self.add(field, f"is {shown(value)}", "a text")
        elif len(value) > high:
            self.add(field, f"has {len(value)} characters", f"at most {high}")
        elif not value and not empty:
            self.add(field, "is empty", "at least one character")

    def name(self, field: str, value: object, high: int) -> None:
        """A text of bounded length that a line of a log can hold: without control characters and line ends."""
        self.text(field, value, high)
        if isinstance(value, str) and any(unicodedata.category(char) in _CONTROL for char in value[:high]):
            self.add(field, "has control characters", "printable ones")

    def ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Token ids below the number of logits; the first that is none is named by its place."""
        bad = _bad_id(ids, vocab_size)
        if bad is not None:
            self.add(f"{field}[{bad}]", f"is {shown(ids[bad])}", f"a token id, 0 to {vocab_size - 1}")

    def id_keys(self, field: str, values: Mapping[int, object], vocab_size: int) -> None:
        """Token ids as keys; the first that is none is named by itself."""
        keys = tuple(values)
        bad = _bad_id(keys, vocab_size)
        if bad is not None:
            self.add(f"{field}[{shown(keys[bad])}]", "is for no token id", f"token ids, 0 to {vocab_size - 1}")


def kind(value: object) -> str:
    """What JSON calls a value's type, with an article."""
    if value is None:
        return "null"
    for types, name in _KINDS:
        if isinstance(value, types):
            return name
    return "of an unknown type"


def shown(value: object) -> str:
    """A number, a truth value or null as it is; of anything else the type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return _cut(str(value)) if isinstance(value, Real) else kind(value)


def quoted(value: object) -> str:
    """A name that was to be one of a list, as it may stand in an error."""
    return repr(_cut(value)) if isinstance(value, str) else shown(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _bad_id(ids: Sequence[int], vocab_size: int) -> int | None:
    """The place of the first that is no token id. The extremes are found at C speed; a bad one is searched after."""
    if not ids:
        return None
    try:
        if min(ids) >= 0 and max(ids) < vocab_size and not _has_odd_type(ids):
            return None
    except TypeError:
        pass  # not all are numbers: found below
    for index, token in enumerate(ids):
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocab_size:
            return index
    return None


def _has_odd_type(ids: Sequence[int]) -> bool:
    return not {int}.issuperset(map(type, ids))


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats, as JSON allows
        return False
