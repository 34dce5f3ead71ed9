"""Addresses as the command line takes them: "host:port", ":port", "unix:path".

Client channels: one per peer and process, opened inside the running loop and kept (grpc.aio leaks a little for
each channel that is opened and closed)."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from outrider.rpc.errors import InvalidArgument, Violation


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


# Log probabilities of a whole vocabulary are the largest message; gRPC's default of 4 MiB would refuse them.
MAX_MESSAGE_BYTES = 64 << 20

ChannelOption = tuple[str, Any]

# Of both ends, what is compressed is refused: gRPC bounds what comes over the wire, and some of its releases inflate a
# message of a few KiB to gigabytes before they look at its length.
NO_COMPRESSION: ChannelOption = ("grpc.compression_enabled_algorithms_bitset", 1)


def channel_options() -> list[ChannelOption]:
    """The options of every client channel."""
    return [
        NO_COMPRESSION,
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Trailers hold an error's details; the default of 8 KiB is tight for many violations.
        ("grpc.max_metadata_size", 32 * 1024),
        ("grpc.absolute_max_metadata_size", 64 * 1024),
        # A peer that vanished without a FIN is noticed even with no stream open. Above the server's minimum of 10 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),  # the kernel's
        ("grpc.http2.ping_timeout_ms", 20_000),  # as of a process that stands still
        # Without streams no pings: a server may otherwise answer ENHANCE_YOUR_CALM.
        ("grpc.keepalive_permit_without_calls", 0),
        # A restarted service is found again within a second, not after gRPC's default of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # The least time that an attempt gets, whatever its name: a far or busy peer takes tenths of a second to answer.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        # One connection per channel, not shared between channels of a process: each has its own flow control.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def connect(
    address: str, *, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """A channel to "host:port", ":port" (this machine) or "unix:path". It connects when first used. `server_name` is
    what a certificate must have in the host's place."""
    return _connect(grpc.aio, address, credentials, server_name)


def connect_blocking(
    address: str, *, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.Channel:
    """The same for calls that block their thread."""
    return _connect(grpc, address, credentials, server_name)


def _connect(library: Any, address: str, credentials: grpc.ChannelCredentials | None, server_name: str) -> Any:
    target, options = dial_target(address), channel_options()
    if credentials is None:
        return library.insecure_channel(target, options=options)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return library.secure_channel(target, credentials, options=options)
