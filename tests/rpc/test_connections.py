"""Hosts with many connections to a gRPC server: they keep what they may have, and nobody out."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc import connections
from outrider.rpc import server as server_module
from outrider.rpc.server import HealthMonitor, Server, build_server

OTHER = "127.0.0.9"


@pytest.fixture
def descriptors(prove: bool) -> Iterator[None]:
    """As many as the connections of a test have ends."""
    present, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(present, 16_384 if prove else 2048)), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (present, most))


@asynccontextmanager
async def serving(health_address: str = "") -> AsyncIterator[Server]:
    server = build_server("127.0.0.1:0", [], lambda _: None, health=HealthMonitor([]), health_address=health_address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def dial(address: str) -> socket.socket:
    name, _, port = address.rpartition(":")
    return socket.create_connection((name, int(port)), source_address=(OTHER, 0), timeout=30)


def channel_to(address: str, number: int = 0) -> grpc.aio.Channel:
    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200), ("number", number)]
    return grpc.aio.insecure_channel(address, options=options)


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)).status)


def is_open(client: socket.socket) -> bool:
    """What the server has said is read away."""
    client.setblocking(False)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


@pytest.mark.parametrize("at", ["calls", "health"])
async def test_a_host_keeps_what_it_may_have_and_a_new_caller_is_served(
    at: str, prove: bool, descriptors: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silent ones end first, at either address; the connections of whom they came before go on."""
    number = 5000 if prove else 150
    if not prove:
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 100)
        monkeypatch.setattr(server_module, "MAX_OF_HOST", 25)
    async with serving("127.0.0.1:0") as server:
        address = server.address if at == "calls" else server.health_address
        async with channel_to(address) as used, channel_to(address, 1) as new:
            assert await check(used) == health_pb2.HealthCheckResponse.SERVING
            clients = [await asyncio.to_thread(dial, address) for _ in range(number)]
            began = asyncio.get_running_loop().time()
            assert await check(new) == health_pb2.HealthCheckResponse.SERVING
            waited = asyncio.get_running_loop().time() - began
            assert waited < (1.0 if prove else 8.0), "gRPC itself ends who says nothing after ten seconds"
            async with asyncio.timeout(8):
                while sum(map(is_open, clients)) > server_module.MAX_OF_HOST:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await check(used) == health_pb2.HealthCheckResponse.SERVING
            assert any(OTHER in record.getMessage() for record in caplog.records)
            for client in clients:
                client.close()


def test_who_has_said_least_ends_first_and_others_ports_are_nobodys_business() -> None:
    listening, beside = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    clients = [socket.create_connection(listening.getsockname()) for _ in range(4)]
    accepted = [listening.accept()[0] for _ in clients]
    stranger = socket.create_connection(beside.getsockname())
    for number, client in enumerate(clients):
        client.sendall(b"x" * (number % 3))  # 0, 1, 2, 0 bytes
        if number % 3:
            assert accepted[number].recv(9)
    connections._end_those_beyond([listening.getsockname()[1]], 2)
    assert [is_open(client) for client in (*clients, stranger)] == [False, True, True, False, True]
    for one in (*clients, *accepted, stranger, listening, beside):
        os.fstat(one.fileno())  # none was closed
        one.close()
