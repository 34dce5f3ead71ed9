"""Connections of a gRPC server, bounded by host. gRPC bounds them in all: it does not tell whose they are, and takes no
sockets that somebody else has accepted. But they are descriptors of this process, which are looked through while it has
more than one host may: nothing stands between callers and their server, and else next to nothing is paid."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from outrider.rpc.beats import next_beat

log = logging.getLogger(__name__)

DESCRIPTORS = "/dev/fd"  # this process's own, on Linux and macOS
LOOK_S = 0.3
_RECEIVED = slice(128, 136)  # of Linux's tcp_info: the bytes that have come


async def bound_hosts(ports: Sequence[int], most: int) -> None:
    """Again and again: ends what a host has beyond `most` connections to these ports, first those that have said least:
    silent ones go, and those that calls run on stay."""
    while True:
        await next_beat(LOOK_S)
        with suppress(OSError):  # no descriptor is left to look by
            if len(os.listdir(DESCRIPTORS)) > most:
                await asyncio.to_thread(_end_those_beyond, ports, most)


def _end_those_beyond(ports: Sequence[int], most: int) -> None:
    held = defaultdict[str, list[tuple[int, int]]](list)  # by host: bytes received, descriptor
    for descriptor in map(int, os.listdir(DESCRIPTORS)):
        with suppress(OSError), _socket(descriptor) as found:  # it may be none, or gone
            if _is_of(found, ports):
                held[found.getpeername()[0]].append((_num_received(found), descriptor))
    for host, connections in held.items():
        beyond = sorted(connections)[: max(0, len(connections) - most)]
        for _, descriptor in beyond:
            with suppress(OSError), _socket(descriptor) as found:
                if _is_of(found, ports) and found.getpeername()[0] == host:  # by now it may be another's
                    found.shutdown(socket.SHUT_RDWR)
        if beyond:
            host = host.removeprefix("::ffff:")  # of IPv4, at a socket for both families
            log.warning("%s had %d connections; allowed: %d, the others are ended", host, len(connections), most)


@contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket]:
    """It stays its owner's. OSError where it is none."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _is_of(found: socket.socket, ports: Sequence[int]) -> bool:
    return found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] in ports


def _num_received(connection: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    return int.from_bytes(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[_RECEIVED], sys.byteorder)
