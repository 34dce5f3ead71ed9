"""Addresses as the command line takes them: "host:port", ":port", "unix:path"."""

from __future__ import annotations

from outrider.wire.errors import InvalidArgument, Violation


def listen_target(address: str) -> str:
    """What a server binds: ":port" means every interface."""
    host, port = _split(address)
    return address if host == "unix" else f"{host or '[::]'}:{port}"


def dial_target(address: str) -> str:
    """What a client dials: ":port" means this machine."""
    host, port = _split(address)
    if host == "unix":
        return address
    if port == "0":
        raise _bad(address, "a port above 0 to connect to")
    return f"{host or 'localhost'}:{port}"


def with_port(address: str, port: int) -> str:
    """The address that was bound, with the port that the system chose for port 0."""
    host, _ = _split(address)
    return address if host == "unix" else f"{host}:{port}"


def _split(address: str) -> tuple[str, str]:
    scheme, _, path = address.partition(":")
    if scheme == "unix":
        if not path:
            raise _bad(address, "a path after unix:")
        return "unix", path
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise _bad(address, '"host:port", ":port" or "unix:path", with a port of 0 to 65535')
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise _bad(address, 'IPv6 hosts in brackets, as in "[::1]:50051"')
    return host, port


def _bad(address: str, allowed: str) -> InvalidArgument:
    return InvalidArgument.of([Violation("address", f"is {address[:100]!r}; allowed: {allowed}")])
