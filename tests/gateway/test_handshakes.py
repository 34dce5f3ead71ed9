"""Clients that open TLS connections and shake no hands: each costs a descriptor for a bounded time, and one of them
keeps nobody out."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.certificates import Authority
from support.fakes import ToyTarget, until
from support.gateways import toy_tokenizer

from outrider.gateway.engine import EngineConfig
from outrider.gateway.http import app, shares
from outrider.gateway.http.app import HttpServer
from outrider.gateway.http.handshakes import Handshakes
from outrider.gateway.metered import MeteredEngine
from outrider.rpc.security import ServerTls

OTHER = "127.0.0.9"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def https(authority: Authority) -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    """A gateway over HTTPS that lets 12 shake hands at once, 3 of them of one host, and a client that trusts it."""
    engine = MeteredEngine(toy_tokenizer(), ToyTarget(), None, EngineConfig(max_active=2, max_waiting=2))
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
    assert isinstance(server._socket, Handshakes)
    return len(server._socket._under_way)


async def test_no_client_s_handshakes_keep_others_out(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CONNECTIONS_BESIDE", 8)
    monkeypatch.setattr(app, "HEAD_S", 60.0)
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
        assert server._socket._shares._held == 0  # type: ignore[attr-defined]


async def test_a_handshake_that_does_not_come_ends_its_connection(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a connection that has shaken hands goes on."""
    monkeypatch.setattr(app, "HEAD_S", 0.3)
    async with https(authority) as (server, client):
        assert (await client.get("/livez")).status_code == 200
        reader, writer = await connect(server, OTHER)
        writer.write(b"\x16\x03\x01")  # a beginning
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert under_way(server) == 0
        assert (await client.get("/livez")).status_code == 200
