"""What holds for every HTTP request: the application carries it as its state."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from outrider.gateway.admission import MAX_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Bounds and times of the HTTP interface."""

    max_body_bytes: int = MAX_REQUEST_BYTES
    sse_keep_alive_s: float = 15.0  # silence after which a stream of events says that it lives; 0: never


def options_of(request: Request) -> HttpOptions:
    """The options of the application that the request came to."""
    options: HttpOptions = request.app.state.options
    return options
