"""Clients that open TLS connections and shake no hands: each costs a descriptor for a bounded time, and one of them
keeps nobody out."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakSet

import httpx
import pytest
from support.certificates import Authority
from support.fakes import ToyTarget, until
from support.gateways import toy_tokenizer

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.http import handshakes, hardening, shares
from outrider.gateway.http import server as http_server
from outrider.gateway.http.server import HttpServer
from outrider.rpc.security import ServerTls
from outrider.rpc.server import GC_THRESHOLD

OTHER = "127.0.0.9"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def https(authority: Authority) -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    """A gateway over HTTPS that lets 12 shake hands at once, 3 of them of one host, and a client that trusts it."""
    engine = GenerationEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig(max_active=2, max_waiting=2))
    server = HttpServer(engine, "127.0.0.1:0", tls=ServerTls(authority.issue("server")), grace_s=1)
    await server.start()
    trusted = ssl.create_default_context(cafile=authority.path)
    async with httpx.AsyncClient(base_url=f"https://{server.address}", verify=trusted, timeout=30) as client:
        yield server, client
    await server.stop()


async def connect(server: HttpServer, host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Without a word of TLS."""
    name, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(name, int(port), local_addr=(host, 0))


def under_way(server: HttpServer) -> int:
    return server._handshakes._held


async def test_no_client_s_handshakes_keep_others_out(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_BESIDE", 8)
    monkeypatch.setattr(hardening, "HEAD_S", 60.0)
    monkeypatch.setattr(shares, "is_local", lambda who: who == "127.0.0.1")
    async with https(authority) as (server, client):
        held = [await connect(server, OTHER) for _ in range(3)]
        await until(lambda: under_way(server) == 3)
        for _ in range(5):
            reader, writer = await connect(server, OTHER)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        assert (await client.get("/livez")).status_code == 200
        assert under_way(server) == 3, "the client's is over"
        held[0][1].close()
        await until(lambda: under_way(server) == 2)
        held.append(await connect(server, OTHER))
        await until(lambda: under_way(server) == 3)
        for _, writer in held:
            writer.close()
        await until(lambda: under_way(server) == 0)


async def test_a_handshake_that_does_not_come_ends_its_connection(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a connection that has shaken hands goes on."""
    monkeypatch.setattr(hardening, "HEAD_S", 0.3)
    async with https(authority) as (server, client):
        assert (await client.get("/livez")).status_code == 200
        reader, writer = await connect(server, OTHER)
        writer.write(b"\x16\x03\x01")  # a beginning
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert under_way(server) == 0
        assert (await client.get("/livez")).status_code == 200


async def test_a_client_that_has_shaken_hands_and_asks_nothing_is_ended(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardening, "HEAD_S", 0.3)
    async with https(authority) as (server, _):
        name, _, port = server.address.rpartition(":")
        trusted = ssl.create_default_context(cafile=authority.path)
        reader, writer = await asyncio.open_connection(name, int(port), ssl=trusted)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        await until(lambda: not server._server.server_state.connections)


@pytest.fixture
def services_collector() -> Iterator[None]:
    """Cycles of garbage lie as long as in a service."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD)
    yield
    gc.set_threshold(*before)


async def test_what_a_connection_held_goes_with_it(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, services_collector: None
) -> None:
    """Before the collector comes, whatever the client did; and one that says nothing never had any."""
    made, objects = list[handshakes._Tls](), WeakSet[ssl.SSLObject]()
    connection_made = handshakes._Tls.connection_made

    def noted(tls: handshakes._Tls, transport: asyncio.BaseTransport) -> None:
        made.append(tls)
        objects.add(tls._sslobj)
        connection_made(tls, transport)

    monkeypatch.setattr(handshakes._Tls, "connection_made", noted)
    async with https(authority) as (server, client):
        for num_made, word in enumerate((b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n")):
            reader, writer = await connect(server, OTHER)
            writer.write(word)
            await until(lambda: under_way(server) == 1 or reader.at_eof())  # noqa: B023
            await until(lambda: len(made) == num_made)  # noqa: B023
            writer.close()
            await until(lambda: under_way(server) == 0)
        assert (await client.get("/livez", headers={"connection": "close"})).status_code == 200
        await until(lambda: not server._server.server_state.connections)
        assert len(made) == 3
        for tls in made:
            assert len(tls._ssl_buffer) == 0
        made.clear()
        assert not objects


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many as two thousand connections have ends."""
    present, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(present, 4096)), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (present, most))


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def silent(server: HttpServer, host: str) -> socket.socket:
    """As `connect`, for thousands."""
    client = socket.socket()
    client.setblocking(False)
    client.bind((host, 0))
    name, _, port = server.address.rpartition(":")
    await asyncio.get_running_loop().sock_connect(client, (name, int(port)))
    return client


@pytest.mark.parametrize("word", [b"", b"\x16"], ids=["silent", "a byte"])
async def test_many_who_shake_no_hands_take_no_memory(
    word: bytes, authority: Authority, prove: bool, services_collector: None, descriptors: None
) -> None:
    """Nor does anybody else wait for them, or find the gateway not ready."""
    rounds, number, most_bytes = (50, 1000, 100 << 20) if prove else (2, 100, 25 << 20)
    async with https(authority) as (server, other):
        waits, loop = list[float](), asyncio.get_running_loop()

        async def ask() -> None:
            while True:
                began = loop.time()
                assert (await other.get("/readyz")).status_code == 200
                waits.append(loop.time() - began)
                await asyncio.sleep(0.01)

        asking = asyncio.create_task(ask())
        await until(lambda: waits)
        before = resident()
        for round_ in range(rounds):  # each from another host: one has too few ports for all
            clients = [await silent(server, f"127.0.1.{round_ + 1}") for _ in range(number)]
            await until(lambda: under_way(server) == number)
            for client in clients:
                client.send(word)
            await asyncio.sleep(0.1)
            for client in clients:
                client.close()
            await until(lambda: under_way(server) == 0)
            assert resident() - before < most_bytes
        assert not asking.done(), "it was always ready"
        asking.cancel()
        if prove:
            assert sorted(waits)[len(waits) * 99 // 100] < 0.25
