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

What is wrong with a request is collected by one class, for every entry point (gRPC, HTTP, in process): Violations, by
the checks of `words.checks`."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

import grpc
import grpc.aio

from outrider.rpc.words.checks import Checks
from outrider.rpc.words.checks import Violation as Violation
from outrider.rpc.words.checks import kind as kind
from outrider.rpc.words.checks import quoted as quoted
from outrider.rpc.words.checks import shown as shown

DOMAIN = "outrider"
OTHER_MODEL = "OTHER_MODEL"  # a reason: what was begun with other weights is not continued here
WEIGHTS_RESTART = "WEIGHTS_RESTART"  # a reason: what other weights began is to begin anew with the present ones
TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"  # a reason: the prompt, alone or with max_tokens, is more than the context
MAX_VIOLATIONS = 16


def one_line(error: BaseException) -> str:
    """The message of an error of whatever library, as a part of another one's."""
    return " ".join(str(error).split())[:500] or type(error).__name__


class OutriderError(Exception):
    """The root; catch it to catch everything that Outrider raises on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = code.name  # a class with a code has its name, unless it says more

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls) and "default_reason" not in vars(cls):
            cls.default_reason = cls.code.name

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

    @classmethod
    def of(cls, violations: Iterable[Violation]) -> InvalidArgument:
        """An error that names the given fields. A hostile request may break thousands of rules, and the answer has to
        fit in a trailer: the first ones do."""
        listed = tuple(violations)[:MAX_VIOLATIONS]
        return cls("; ".join(map(str, listed)), reason=listed[0].reason if listed else "", violations=listed)


class ResourceExhausted(OutriderError):
    """There is no room now; `retry_after_ms` says when there may be."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(OutriderError):
    """The state does not allow what was asked."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(OutriderError):
    """What was named does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(OutriderError):
    """The name is another one's."""

    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(OutriderError):
    """The service was not started so that a caller may do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(OutriderError):
    """The caller has not shown who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Unavailable(OutriderError):
    """A peer is gone, draining or dead."""

    code = grpc.StatusCode.UNAVAILABLE


class ProtocolError(Unavailable):
    """The peer broke the frame rules. UNAVAILABLE, since opening the stream again is the remedy."""

    default_reason = "PROTOCOL_ERROR"


class DeadlineExceeded(OutriderError):
    """The request's time ran out."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(OutriderError):
    """The caller went away."""

    code = grpc.StatusCode.CANCELLED


class Internal(OutriderError):
    """A bug on the side that raised it."""

    code = grpc.StatusCode.INTERNAL


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


class Violations(Checks):
    """The checks of a request, whose violations are raised as one error."""

    def take(self, error: InvalidArgument) -> None:
        """Takes over what a check that raises has found."""
        self._found += error.violations

    def raise_if_any(self) -> None:
        """InvalidArgument that names every field."""
        if self._found:
            raise InvalidArgument.of(self._found)


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
