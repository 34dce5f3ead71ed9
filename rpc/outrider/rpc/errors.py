"""What can go wrong, as exceptions that map one to one on gRPC status codes.

    OutriderError
    ├── InvalidArgument      INVALID_ARGUMENT     a field is out of bounds; every violation is named
    ├── ResourceExhausted    RESOURCE_EXHAUSTED   no room now; says when to try again
    ├── FailedPrecondition   FAILED_PRECONDITION  the state does not allow it (a mismatched pair, a closed sequence)
    ├── NotFound             NOT_FOUND            no such model, method or sequence
    ├── AlreadyExists        ALREADY_EXISTS       the name is another one's
    ├── PermissionDenied     PERMISSION_DENIED    the caller may not do this, or nobody may here
    ├── Unauthenticated      UNAUTHENTICATED      the caller has not shown who it is
    ├── Unavailable          UNAVAILABLE          a peer is gone, draining or dead; try another
    │   └── ProtocolError    (the same code)      the peer broke the frame rules; the stream is reopened
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    the request's time ran out
    ├── Cancelled            CANCELLED            the caller went away
    └── Internal             INTERNAL             a bug; the log has it, the wire does not

On the wire each is a google.rpc.Status (status.py). Messages never hold prompts or generated text: they travel to logs
and traces.

What is wrong with a request is collected by one class, for every entry point (gRPC, HTTP, in process): each check of
Violations adds to its list, so that a caller learns of all fields at once. A violation shows a number's value, and of
texts and lists only the length. Types have JSON's names, whoever asks. Token ids are checked against the number of
logits. What bounds a message or the sampling parameters stands beside these."""

from __future__ import annotations

import errno
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar

import grpc
import grpc.aio

DOMAIN = "outrider"
OTHER_MODEL = "OTHER_MODEL"  # a reason: what was begun with other weights is not continued here
TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"  # a reason: the prompt, alone or with max_tokens, is more than the context
MAX_VIOLATIONS = 16


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is out of bounds: `problem` says what it is and what is allowed."""

    field: str
    problem: str
    reason: str = ""  # the error's, where this is the first of its violations

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class OutriderError(Exception):
    """The root; catch it to catch everything that Outrider raises on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.retry_after_ms = retry_after_ms
        self.violations = tuple(violations)


class InvalidArgument(OutriderError):
    """A request is malformed; the message lists every violation."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, violations: Iterable[Violation]) -> InvalidArgument:
        """An error that names the given fields. A hostile request may break thousands of rules, and the answer has to
        fit in a trailer: the first ones do."""
        listed = tuple(violations)[:MAX_VIOLATIONS]
        return cls("; ".join(map(str, listed)), reason=listed[0].reason if listed else "", violations=listed)


class ResourceExhausted(OutriderError):
    """There is no room now; `retry_after_ms` says when there may be."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class FailedPrecondition(OutriderError):
    """The state does not allow what was asked."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class NotFound(OutriderError):
    """What was named does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExists(OutriderError):
    """The name is another one's."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class PermissionDenied(OutriderError):
    """The service was not started so that a caller may do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class Unauthenticated(OutriderError):
    """The caller has not shown who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class Unavailable(OutriderError):
    """A peer is gone, draining or dead."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class ProtocolError(Unavailable):
    """The peer broke the frame rules. UNAVAILABLE, since opening the stream again is the remedy."""

    default_reason = "PROTOCOL_ERROR"


class DeadlineExceeded(OutriderError):
    """The request's time ran out."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class Internal(OutriderError):
    """A bug on the side that raised it."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


def unexpected(error: BaseException, message: str = "", reason: str = "INTERNAL") -> OutriderError:
    """What is told of a bug: the message, else its type alone. Who lacks memory is asked again later, or another one
    is."""
    if lacks_memory(error):
        return Unavailable("out of memory", reason="NO_MEMORY", retry_after_ms=1000)
    return Internal(message or f"unexpected {type(error).__name__}; see the log", reason=reason)


def lacks_memory(error: BaseException) -> bool:
    """Whether the system or a device refused memory or a thread, as Python, PyTorch and C++ say it."""
    if isinstance(error, RuntimeError):
        return _NO_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


_NO_MEMORY = re.compile(r"out of memory|an('t|not) allocate memory|bad_alloc|start new thread", re.IGNORECASE)


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


class Violations:
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

    def take(self, error: InvalidArgument) -> None:
        """Takes over what a check that raises has found."""
        self._found += error.violations

    def raise_if_any(self) -> None:
        """InvalidArgument that names every field."""
        if self._found:
            raise InvalidArgument.of(self._found)

    def hand_over(self, whole: Violations | None) -> None:
        """Adds these to those of the whole; raises them if this was all."""
        if whole is None:
            self.raise_if_any()
        else:
            whole._found += self._found

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


_CLASSES: dict[int, type[OutriderError]] = {
    cls.code.value[0]: cls
    for cls in (
        InvalidArgument, ResourceExhausted, FailedPrecondition, NotFound, AlreadyExists, PermissionDenied,
        Unauthenticated, Unavailable, DeadlineExceeded, Cancelled, Internal,
    )
}  # fmt: skip
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def status_code(number: int) -> grpc.StatusCode:
    """The gRPC status code of a number; UNKNOWN for one that does not exist."""
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def make_error(
    code: int,
    message: str,
    *,
    reason: str = "",
    retry_after_ms: int = 0,
    violations: Sequence[Violation] = (),
) -> OutriderError:
    """The error class for a status code's number. Codes without a class of their own become Internal."""
    if reason == ProtocolError.default_reason:
        cls: type[OutriderError] = ProtocolError
    else:
        cls = _CLASSES.get(code, Internal)
        reason = reason or ("" if code in _CLASSES else status_code(code).name)
    return cls(message, reason=reason, retry_after_ms=retry_after_ms, violations=violations)
