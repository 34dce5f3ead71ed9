"""Errors as they travel: a google.rpc.Status each, with ErrorInfo, and where they apply BadRequest (the violations) and
RetryInfo."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from outrider.rpc.errors import (
    DOMAIN,
    DeadlineExceeded,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Violation,
    make_error,
    unexpected,
)

log = logging.getLogger(__name__)

STATUS_DETAILS_KEY = "grpc-status-details-bin"


def make_status(
    code: int, message: str, reason: str = "", retry_after_ms: int = 0, violations: Sequence[Violation] = ()
) -> status_pb2.Status:
    """A google.rpc.Status with the details that are not empty."""
    status = status_pb2.Status(code=code, message=message)
    if reason:
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    if retry_after_ms:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_after_ms)
        status.details.add().Pack(retry)
    if violations:
        bad = error_details_pb2.BadRequest()
        for violation in violations:
            bad.field_violations.add(field=violation.field, description=violation.problem)
        status.details.add().Pack(bad)
    return status


def parse_details(status: status_pb2.Status) -> tuple[str, int, tuple[Violation, ...]]:
    """(reason, retry_after_ms, violations) of a status; details of other types are skipped."""
    reason, retry_after_ms = "", 0
    violations: tuple[Violation, ...] = ()
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
        elif detail.Unpack(bad):
            violations += tuple(Violation(v.field, v.description) for v in bad.field_violations)
    return reason, retry_after_ms, violations


def to_status(error: OutriderError) -> status_pb2.Status:
    """The google.rpc.Status of an error, with its details."""
    return make_status(error.code.value[0], error.message, error.reason, error.retry_after_ms, error.violations)


def from_status(status: status_pb2.Status) -> OutriderError:
    """The error that a google.rpc.Status stands for."""
    reason, retry_after_ms, violations = parse_details(status)
    return make_error(status.code, status.message, reason=reason, retry_after_ms=retry_after_ms, violations=violations)


FULL_RETRY_MS = 1000  # after which one that has too many calls may be asked again
_FULL = "Concurrent RPC limit exceeded!"  # grpc.aio's words, where nothing says when to come back
_WRITE_FAILED = "Internal error from Core"  # grpc.aio's words, put over the status that the peer ended the call with


def from_rpc_error(error: grpc.RpcError) -> OutriderError:
    """The error that a failed call stands for: from its rich status where it has one, else from code and text."""
    code, details = error.code(), error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            try:
                return from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                break  # a proxy may have mangled it; code and text still hold
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # by gRPC itself, whose own words say less
        details = "the request's time ran out"
    if code is grpc.StatusCode.INTERNAL and details == _WRITE_FAILED:
        return Unavailable("the peer ended the call while it was written to", reason="CALL_ENDED")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and details == _FULL:  # others of its are no fault of the moment
        return ResourceExhausted("the peer has too many calls", reason="TOO_MANY_CALLS", retry_after_ms=FULL_RETRY_MS)
    return make_error(code.value[0], details)


def translate(error: Exception, method: str) -> OutriderError:
    """What a method's exception is to its caller."""
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)  # a peer's error, passed on
    if isinstance(error, grpc.aio.InternalError):  # of what is done with a call whose caller has gone meanwhile
        return Unavailable("the call has ended", reason="CALL_ENDED")
    if isinstance(error, asyncio.TimeoutError):
        return DeadlineExceeded("the request's time ran out")
    if isinstance(error, DecodeError):  # for which gRPC by itself would say UNKNOWN
        return InvalidArgument.of([Violation("request", "cannot be read; allowed: a protobuf message, texts in UTF-8")])
    log.error("unexpected error in %s", method, exc_info=error)
    return unexpected(error)
