"""Client channels: one per peer and process, opened inside the running loop and kept (grpc.aio leaks a little for
each channel that is opened and closed)."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from outrider.wire.address import dial_target

# Log probabilities of a whole vocabulary are the largest message; gRPC's default of 4 MiB would refuse them.
MAX_MESSAGE_BYTES = 64 << 20

ChannelOption = tuple[str, Any]


def channel_options() -> list[ChannelOption]:
    """The options of every client channel."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Trailers hold an error's details; the default of 8 KiB is tight for many violations.
        ("grpc.max_metadata_size", 32 * 1024),
        ("grpc.absolute_max_metadata_size", 64 * 1024),
        # A peer that vanished without a FIN is noticed even with no stream open. Above the server's minimum of 10 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # Without streams no pings: a server may otherwise answer ENHANCE_YOUR_CALM.
        ("grpc.keepalive_permit_without_calls", 0),
        # A restarted service is found again within a second, not after gRPC's default of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # One connection per channel, not shared between channels of a process: each has its own flow control.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def connect(address: str, *, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to "host:port", ":port" (this machine) or "unix:path". It connects when first used."""
    target = dial_target(address)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=channel_options())
    return grpc.aio.secure_channel(target, credentials, options=channel_options())
