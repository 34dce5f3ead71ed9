"""Whether an address can be listened on, before anything expensive is made for it."""

from __future__ import annotations

import errno
import socket

from outrider.wire.address import listen_target
from outrider.wire.errors import Unavailable

# Others are left to gRPC, which knows more ways: without IPv6, it falls back from [::].
_REFUSED = (errno.EADDRINUSE, errno.EACCES)


def require_free(address: str) -> None:
    """Raises Unavailable for an address that is in use: a large model takes minutes to load before it would be bound,
    and gRPC then writes lines of its own."""
    target = listen_target(address)
    host, _, port = target.rpartition(":")
    if target.startswith("unix:") or port == "0":
        return
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _refusal(address, error) from error
    family, kind, protocol, _, place = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        if error.errno in _REFUSED:
            raise _refusal(address, error) from error


def _refusal(address: str, error: OSError) -> Unavailable:
    return Unavailable(f"cannot listen on {address}: {error.strerror}", reason="ADDRESS_IN_USE")
