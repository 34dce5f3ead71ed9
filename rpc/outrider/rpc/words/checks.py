"""What a value may be: each check adds what is wrong with one to a list, so that a caller learns of all fields at once.
A violation shows a number's value, and of texts and lists only the length. Types have JSON's names, whoever asks. Token
ids are checked against the number of logits. The checks that a table's rows name are functions (`Check`)."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

ALL_LOGPROBS = -1  # as many as the vocabulary has ids; as a bound: none
MAX_SHOWN = 40  # characters of a value
_CONTROL = ("Cc", "Zl", "Zp")
_JSON_TYPES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a truth value"),
    (Real, "a number"),
    (str, "a text"),
    (bytes, "bytes"),
    (Mapping, "an object"),
    ((Sequence, set, frozenset), "a list"),
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is out of bounds: `problem` says what it is and what is allowed."""

    field: str
    problem: str
    reason: str = ""  # the error's, where this is the first of its violations

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class Checks:
    """Collects what is wrong; `prefix` is put before each field's name ("sampling.")."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._found: list[Violation] = []

    def add(self, field: str, problem: str, allowed: str, reason: str = "") -> None:
        """One violation."""
        self._found.append(Violation(self._prefix + field, f"{problem}; allowed: {allowed}", reason))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._found)

    def add_all(self, others: Checks) -> None:
        """The violations of another list, as they are."""
        self._found += others._found

    def integer(self, field: str, value: object, low: int, high: int, also: int | None = None) -> bool:
        """A whole number in a closed range, or the one value `also`."""
        if type(value) is int and low <= value <= high:
            return True
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
    for types, name in _JSON_TYPES:
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds parameters beside the table: the model, a service's flag, and the request's own max_tokens."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int  # ALL_LOGPROBS: as many as the vocabulary has ids
    max_tokens: int


Check = Callable[[Checks, str, Any, Limits], object]  # adds what is wrong with a value, whatever its type, to a list


def number(low: float, high: float, words: str = "", *, zero: bool = False) -> Check:
    """A finite number in a closed range, which `words` say; `zero`: or 0."""
    return lambda found, name, value, limits: found.number(name, value, low, high, zero=zero, say=words)


def integer(low: int, high: int | Callable[[Limits], int], also: int | None = None) -> Check:
    """A whole number in a closed range, or `also`."""

    def check(found: Checks, name: str, value: Any, limits: Limits) -> None:
        found.integer(name, value, low, high if isinstance(high, int) else high(limits), also)

    return check


def check_logprobs(found: Checks, name: str, value: Any, limits: Limits) -> None:
    """Of how many tokens a position: as many as the service's flag allows."""
    if limits.max_logprobs == ALL_LOGPROBS:
        found.integer(name, value, 0, limits.vocab_size, also=ALL_LOGPROBS)
    else:
        found.integer(name, value, 0, limits.max_logprobs)


def check_flag(found: Checks, name: str, value: Any, limits: Limits) -> None:
    """True or false."""
    found.flag(name, value)


def token_ids(most: int | None = None) -> Check:
    """So many token ids; None: as many as the vocabulary has."""

    def check(found: Checks, name: str, value: Any, limits: Limits) -> None:
        if found.length(name, value, limits.vocab_size if most is None else most):
            found.ids(name, value, limits.vocab_size)

    return check


def id_lists(most: int, longest: int) -> Check:
    """So many lists of token ids, none of them empty or longer."""

    def check(found: Checks, name: str, value: Any, limits: Limits) -> None:
        if found.length(name, value, most):
            for index, ids in enumerate(value):
                if not 1 <= len(ids) <= longest:
                    found.add(f"{name}[{index}]", f"has {len(ids)} entries", f"1 to {longest}")
                found.ids(f"{name}[{index}]", ids, limits.vocab_size)

    return check


def texts(most: int, longest: int) -> Check:
    """So many texts, none of them empty or of more characters."""

    def check(found: Checks, name: str, value: Any, limits: Limits) -> None:
        if found.length(name, value, most):
            for index, text in enumerate(value):
                found.text(f"{name}[{index}]", text, longest, empty=False)

    return check


def biases(most: int, bound: float) -> Check:
    """So many numbers by token id, from -bound to bound; the first that is none is named."""

    def check(found: Checks, name: str, value: Any, limits: Limits) -> None:
        if found.length(name, value, most):
            found.id_keys(name, value, limits.vocab_size)
            for token, bias in value.items():
                if not found.number(f"{name}[{shown(token)}]", bias, -bound, bound):
                    break

    return check
