"""What the proxy of the faults does to connections, and how it knows what passes on them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from chaos.proxy import DOWN, LINGER_NOT, UP, FaultProxy
from support.fakes import (
    DraftServicer,
    TargetServicer,
    ToyDraft,
    ToyTarget,
    expected,
    generate,
    request,
    serving,
    until,
)

from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets

NUM_TOKENS = 60


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def echo_behind() -> AsyncIterator[tuple[FaultProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through the proxy of a service that says everything again."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    proxy = FaultProxy("target")
    await proxy.start()
    proxy.upstream = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    host, _, port = proxy.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    try:
        yield proxy, reader, writer
    finally:
        writer.close()
        await proxy.stop()
        server.close()


async def test_a_reset_is_one() -> None:
    async with echo_behind() as (proxy, reader, _):
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        assert proxy.counts.resets == 1


async def test_what_is_swallowed_is_gone_and_its_connection_is_cut_in_the_end() -> None:
    async with echo_behind() as (proxy, reader, writer):
        proxy.swallows = True
        writer.write(b"lost")
        await until(lambda: proxy.counts.swallowed == 4)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        proxy.heal()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_a_slow_link_loses_nothing() -> None:
    async with echo_behind() as (proxy, reader, writer):
        proxy.delay_s = 0.05
        writer.write(b"slow")
        assert await reader.readexactly(4) == b"slow"
        assert proxy.counts.delayed == 2
        proxy.heal()
        writer.write(b"fast")
        assert await reader.readexactly(4) == b"fast"
        assert proxy.counts.delayed == 2


async def test_the_last_words_of_a_service_come_before_its_end() -> None:
    """Also where somebody spoke to it in the moment in which it went, as gateways do with their heartbeats."""
    loop, words = asyncio.get_running_loop(), b"the last words"
    proxy = FaultProxy("target")
    await proxy.start()
    host, _, port = proxy.address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection((host, int(port))) as client:
        proxy.upstream = f"127.0.0.1:{listening.getsockname()[1]}"
        service, _ = await asyncio.to_thread(listening.accept)
        client.setblocking(False)
        client.send(b"?")
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the proxy has read it, and not yet passed it on
        service.sendall(words)
        service.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        service.close()  # a reset, as where a process ends that has not read everything
        heard = b""
        async with asyncio.timeout(5):
            while data := await loop.sock_recv(client, 1 << 16):
                heard += data
    await proxy.stop()
    assert heard == words


async def test_an_address_of_nobody_ends_the_connection() -> None:
    proxy = FaultProxy("target")
    await proxy.start()
    host, _, port = proxy.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read(1) == b""
    assert proxy.counts.refused == 1
    writer.close()
    await proxy.stop()


POINTS = [
    ("target", UP, "open"),
    ("target", DOWN, "first commit"),
    ("target", UP, "piece"),
    ("target", UP, "credit"),
    ("target", DOWN, "commit"),
    ("draft", UP, "open"),
    ("draft", DOWN, "first piece"),
    ("draft", DOWN, "piece"),
    ("draft", UP, "commit"),
    ("draft", UP, "close"),
]


@pytest.mark.parametrize(("role", "direction", "message"), POINTS)
async def test_every_message_is_told_and_held(role: str, direction: str, message: str) -> None:
    """A request stands still where one of its messages does, comes out as ever once that goes on, and begins again on
    another connection where it is lost."""
    target, draft = ToyTarget(), ToyDraft(wrong_every=3)
    proxies = {"target": FaultProxy("target"), "draft": FaultProxy("draft")}
    async with serving(TargetServicer(target)) as target_server, serving(DraftServicer(draft)) as draft_server:
        for server, proxy in ((target_server, proxies["target"]), (draft_server, proxies["draft"])):
            await proxy.start()
            proxy.upstream = server.address
        async with (
            RemoteTargets([proxies["target"].address]) as targets,
            RemoteDrafts([proxies["draft"].address]) as drafts,
        ):
            await until(lambda: targets.usable and drafts.usable)
            for lost in (False, True):
                watch = proxies[role].watch(direction, message)
                asked = request(NUM_TOKENS)
                running = asyncio.create_task(generate(drafts, targets, asked))
                await asyncio.wait_for(watch.reached.wait(), 30)
                before = proxies[role].counts.connections
                watch.release(lost)
                assert await running == expected(asked.prompt_ids, NUM_TOKENS)
                if lost:
                    await until(lambda before=before: proxies[role].counts.connections > before)
                    await until(lambda: targets.usable and drafts.usable)
        for proxy in proxies.values():
            await proxy.stop()
