"""How a call ended, as OpenTelemetry's conventions for RPC and HTTP have a server's span say it."""

from __future__ import annotations

import asyncio

from grpc import StatusCode

from outrider.rpc import telemetry as names
from outrider.rpc.errors import Cancelled, Internal, OutriderError
from outrider.rpc.words.request import ServerCall

# Codes that count as a server's own errors; any other is the caller's doing, or no error at all.
SERVER_FAULTS = frozenset(
    {
        StatusCode.UNKNOWN,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.UNIMPLEMENTED,
        StatusCode.INTERNAL,
        StatusCode.UNAVAILABLE,
        StatusCode.DATA_LOSS,
    }
)
HTTP_OK = 200


def grpc_call(method: str) -> ServerCall:
    """A call of "package.Service/Method"."""
    attributes = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method}
    return ServerCall(attributes, names.RPC_RESPONSE_STATUS_CODE, lambda error, _: error.code.name if error else "OK")


def as_outrider_error(error: BaseException | None) -> OutriderError | None:
    """What ended a request, as its caller is told. One who went away ends it by closing the generator, or by a
    cancelled task."""
    if error is None or isinstance(error, OutriderError):
        return error
    if isinstance(error, GeneratorExit | asyncio.CancelledError):
        return Cancelled("the caller went away")
    return Internal(f"unexpected {type(error).__name__}")


def end_attributes(call: ServerCall | None, error: OutriderError | None, answered: bool) -> dict[str, str | int]:
    """What a server's span says of the end: the status of its call, and error.type for a fault of the server."""
    found: dict[str, str | int] = {}
    kind = None if error is None else error.code.name
    if call is not None:
        found[call.status_attribute] = status = call.status_of(error, answered)
        kind = kind if status == HTTP_OK else str(status)  # a stream that had begun has no status for its break
    if error is not None and error.code in SERVER_FAULTS:
        found[names.ERROR_TYPE] = str(kind)
    return found
