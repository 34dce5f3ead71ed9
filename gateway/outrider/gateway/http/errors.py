"""Errors in OpenAI's shape. They are the gateway's own, as gRPC clients get them; only fields that HTTP calls by
another name are renamed (`field_names`)."""

from __future__ import annotations

import math
from typing import Any

import grpc
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.rpc.errors import (
    OTHER_MODEL,
    TOO_LONG,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unauthenticated,
    Violation,
)

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    403: "permission_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error",
    504: "timeout_error",
}  # fmt: skip
# Of what no violation is given.
_PARAMS = {"MODEL_NOT_FOUND": "model", "ADAPTER_NOT_FOUND": "model", OTHER_MODEL: "system_fingerprint"}


def http_status(error: OutriderError) -> int:
    """The status of an error. What no waiting helps, as a request larger than the cache, is the request's fault."""
    if isinstance(error, ResourceExhausted) and not error.retry_after_ms:
        return 400
    return _STATUS.get(error.code, 500)


def error_body(error: OutriderError) -> dict[str, Any]:
    """OpenAI's error object; `param` is the first field that is wrong."""
    status = http_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": _param(error), "code": _code(error)}}


def error_response(error: OutriderError) -> Response:
    """The answer, with a time to come back where there is one."""
    headers = {"www-authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
    if error.retry_after_ms:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    return JSONResponse(error_body(error), http_status(error), headers)


def plain_error(status: int, message: str) -> Response:
    """An error of HTTP itself: no such path, a wrong method, a body too large."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


async def on_outrider_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of what is raised on purpose."""
    if isinstance(error, OutriderError):
        return error_response(error)
    raise error


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler of its own refusals."""
    response = plain_error(getattr(error, "status_code", 500), str(getattr(error, "detail", "")))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    """Starlette's handler of all else; the server logs it, the caller learns nothing of it."""
    return plain_error(500, f"unexpected {type(error).__name__}; see the gateway's log")


def invalid(field: str, problem: str) -> InvalidArgument:
    """A refusal of one field."""
    return InvalidArgument.of([Violation(field, problem)])


def _param(error: OutriderError) -> str | None:
    if error.reason in _PARAMS:
        return _PARAMS[error.reason]
    return error.violations[0].field if error.violations else None


def _code(error: OutriderError) -> str | None:
    if isinstance(error, InvalidArgument):
        return error.reason.lower() if error.reason == TOO_LONG else None
    if isinstance(error, Unauthenticated):
        return "invalid_api_key"  # as OpenAI has it
    if http_status(error) == 429:
        return "rate_limit_exceeded"
    return error.reason.lower()
