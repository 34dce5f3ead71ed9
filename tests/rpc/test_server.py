"""Servers: addresses, health that follows the device, reflection, and the graceful end on signals."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.rpc import server as server_module
from outrider.rpc.channel import connect, dial_target, listen_target
from outrider.rpc.errors import InvalidArgument, Unavailable
from outrider.rpc.server import MAX_WATCHES, HealthMonitor, Server, build_server, serve_until_signal
from outrider.v1 import target_pb2, target_pb2_grpc

SERVICE = "outrider.v1.TargetService"
Serving = health_pb2.HealthCheckResponse.ServingStatus.Name


async def health_of(channel: grpc.aio.Channel, service: str = SERVICE) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    return str(Serving((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)).status))


async def becomes(channel: grpc.aio.Channel, status: str, service: str = SERVICE) -> None:
    async with asyncio.timeout(30):
        while await health_of(channel, service) != status:  # noqa: ASYNC110  # another process changes it
            await asyncio.sleep(0.01)


def test_addresses() -> None:
    assert [listen_target(text) for text in (":5", "h:0", "unix:/a")] == ["[::]:5", "h:0", "unix:/a"]
    assert [dial_target(text) for text in (":5", "[::1]:7", "unix:/a")] == ["localhost:5", "[::1]:7", "unix:/a"]
    for bad in ("", "host", "host:", "host:x", "host:70000", "::1:50051", "unix:", "h:-1", "h:٣"):
        with pytest.raises(InvalidArgument, match="address"):
            listen_target(bad)
    with pytest.raises(InvalidArgument, match="above 0"):
        dial_target("host:0")


async def test_health_follows_the_probe_and_the_device() -> None:
    answered, alive = asyncio.Event(), True
    attempts = 0

    async def probe() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RuntimeError("not yet")
        await answered.wait()

    ready = True
    health = HealthMonitor([SERVICE], probe=probe, is_alive=lambda: alive, is_ready=lambda: ready, poll_s=0.01)
    server = build_server("localhost:0", [SERVICE], lambda _: None, health=health)
    await server.start()
    channel = connect(server.address)
    assert (await health_of(channel), await health_of(channel, "")) == ("NOT_SERVING", "SERVING")
    answered.set()
    await becomes(channel, "SERVING")
    assert attempts == 2 and health.ready
    ready = False
    await becomes(channel, "NOT_SERVING")
    assert await health_of(channel, "") == "SERVING", "what is not ready is alive"
    ready = True
    await becomes(channel, "SERVING")
    alive = False
    await becomes(channel, "NOT_SERVING")
    await becomes(channel, "NOT_SERVING", "")
    alive = True
    await becomes(channel, "SERVING")
    await health.drain()
    assert (await health_of(channel), await health_of(channel, "")) == ("NOT_SERVING", "SERVING") and not health.ready
    await asyncio.sleep(0.05)
    assert await health_of(channel) == "NOT_SERVING", "it drains for good"
    await channel.close()
    await server.stop()


async def test_health_has_an_address_of_its_own_that_answers_until_the_end() -> None:
    """In plaintext, with nothing but health, and while running calls end."""
    asked, release = asyncio.Event(), asyncio.Event()

    class Held(target_pb2_grpc.TargetServiceServicer):
        async def GetTargetInfo(self, request: Any, context: Any) -> Any:
            asked.set()
            await release.wait()
            return target_pb2.GetTargetInfoResponse(max_window=7)

    server = build_server(
        "localhost:0",
        [SERVICE],
        lambda grpc_server: target_pb2_grpc.add_TargetServiceServicer_to_server(Held(), grpc_server),
        health_address="localhost:0",
    )
    await server.start()
    async with connect(server.address) as channel, connect(server.health_address) as probe:
        await becomes(probe, "SERVING")
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
            await target_pb2_grpc.TargetServiceStub(probe).GetTargetInfo(target_pb2.GetTargetInfoRequest())
        call = target_pb2_grpc.TargetServiceStub(channel).GetTargetInfo(target_pb2.GetTargetInfoRequest())
        await asked.wait()
        stopping = asyncio.create_task(server.stop(10))
        await becomes(probe, "NOT_SERVING")
        assert await health_of(probe, "") == "SERVING", "what drains is alive"
        release.set()
        assert (await call).max_window == 7
        await asyncio.wait_for(stopping, 30)
    with pytest.raises(Unavailable, match=r"cannot listen on 192\.0\.2\.1:1"):
        build_server("localhost:0", [SERVICE], lambda _: None, health_address="192.0.2.1:1")


async def test_so_many_may_watch_health_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one address: another has a count of its own."""
    monkeypatch.setattr(server_module, "HEALTH_SHARE", 1.0)
    server = build_server("localhost:0", [SERVICE], lambda _: None, health_address="localhost:0")
    await server.start()
    async with connect(server.address) as channel, connect(server.health_address) as probe:
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(MAX_WATCHES)]
        for watch in watches:
            assert (await watch.read()).status
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Watch(request).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request)).status
        elsewhere = health_pb2_grpc.HealthStub(probe)
        watches.append(elsewhere.Watch(request))
        assert (await watches[-1].read()).status and (await elsewhere.Check(request)).status
        watches[0].cancel()
        async with asyncio.timeout(30):
            while True:
                watches[0] = stub.Watch(request)
                try:
                    assert (await watches[0].read()).status
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
        for watch in watches:
            watch.cancel()
    await server.stop()


async def test_a_watch_that_ends_costs_the_others_nothing() -> None:
    """Nor does one that reads nothing; of a service that comes later it tells, too."""
    is_alive = True
    server = build_server(
        "localhost:0",
        [SERVICE],
        lambda _: None,
        health=HealthMonitor([SERVICE], is_alive=lambda: is_alive, poll_s=0.01),
    )
    await server.start()
    async with connect(server.address) as channel:
        stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=SERVICE)
        ended, unread, watch = (stub.Watch(request) for _ in range(3))
        for one in (ended, watch):
            assert Serving((await one.read()).status) == "SERVING"
        other = stub.Watch(health_pb2.HealthCheckRequest(service="later"))
        assert Serving((await other.read()).status) == "SERVICE_UNKNOWN"
        ended.cancel()
        await health_of(channel, SERVICE)  # the server has heard of it
        is_alive = False
        assert Serving((await asyncio.wait_for(watch.read(), 30)).status) == "NOT_SERVING"
        server.health.servicer.set("later", health_pb2.HealthCheckResponse.SERVING)
        assert Serving((await asyncio.wait_for(other.read(), 30)).status) == "SERVING"
        for one in (unread, watch, other):
            one.cancel()
    await server.stop()


async def test_reflection_is_off_unless_it_is_asked_for() -> None:
    server = build_server("localhost:0", [SERVICE], lambda _: None)
    await server.start()
    async with connect(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([])).read()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop()


async def test_a_connection_of_age_takes_no_new_calls_and_loses_none() -> None:
    server = build_server("localhost:0", [SERVICE], lambda _: None, max_connection_age_s=0.3)
    await server.start()
    async with connect(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status
        for _ in range(10):
            assert await health_of(channel, "") == "SERVING"
            await asyncio.sleep(0.1)
        assert not watch.done()
        watch.cancel()
    await server.stop()


METHOD = f"/{SERVICE}/GetTargetInfo"


@asynccontextmanager
async def echoing(**options: Any) -> AsyncIterator[Server]:
    """A server whose one method gives back the bytes that it is given."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    def register(server: Any) -> None:
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"GetTargetInfo": handler}),))

    server = build_server("127.0.0.1:0", [SERVICE], register, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def test_metadata_beyond_the_bound_are_refused() -> None:
    async with echoing() as server, connect(server.address) as channel:
        ask = channel.unary_unary(METHOD)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(b"x", metadata=(("much", "x" * (17 << 10)),), timeout=30)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(b"x", metadata=(("little", "x" * (7 << 10)),), timeout=30) == b"x"


async def test_a_call_beyond_those_of_a_connection_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes nothing from other connections."""
    monkeypatch.setattr(server_module, "MAX_STREAMS", 2)
    async with echoing() as server, connect(server.address) as channel, connect(server.address) as other:
        assert await channel.unary_unary(METHOD)(b"x", timeout=30) == b"x"  # it knows the bound
        held = [channel.stream_stream(METHOD)() for _ in range(2)]
        waiting = asyncio.ensure_future(channel.unary_unary(METHOD)(b"x", timeout=30))
        for _ in range(5):
            assert await other.unary_unary(METHOD)(b"x", timeout=30) == b"x"
        assert not waiting.done()
        held[0].cancel()
        assert await waiting == b"x"
        held[1].cancel()


async def test_a_client_that_is_gone_without_a_word_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine that lost its power: no FIN, and no answer to a ping."""
    monkeypatch.setattr(server_module, "KEEPALIVE_S", 0.5)
    monkeypatch.setattr(server_module, "PING_S", 2.0)
    begun, ended, silent = asyncio.Event(), asyncio.Event(), False

    async def hold(request: bytes, context: Any) -> bytes:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return request

    def register(server: Any) -> None:
        handler = grpc.unary_unary_rpc_method_handler(hold)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"GetTargetInfo": handler}),))

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not silent:
                    writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served, serving = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(relay(reader, serving), relay(served, writer))

    server = build_server("127.0.0.1:0", [SERVICE], register)
    await server.start()
    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    try:
        async with proxy, connect(f"{host}:{port}") as channel:
            call = channel.unary_unary(METHOD)(b"x")
            await asyncio.wait_for(begun.wait(), 30)
            await asyncio.sleep(1.5)
            assert not ended.is_set(), "who answers pings is there"
            silent = True
            await asyncio.wait_for(ended.wait(), 20)
            call.cancel()
    finally:
        await server.stop(0)


async def ends(reader: asyncio.StreamReader) -> float:
    """Seconds until the peer has closed the connection."""
    began = time.monotonic()
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
    return time.monotonic() - began


async def test_a_connection_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_S", 0.3)
    async with echoing() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await ends(reader)
        writer.close()


async def test_more_connections_than_a_server_takes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there go on, and one that goes makes room."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    async with echoing() as server, connect(server.address) as channel:
        assert await channel.unary_unary(METHOD)(b"x", timeout=30) == b"x"
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        assert all([await reader.read(1) for reader, _ in held])  # settings: they are let in
        refused, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(refused.read(1), 30) == b""
        writer.close()
        assert await channel.unary_unary(METHOD)(b"x", timeout=30) == b"x"
        for _, writer in held:
            writer.close()
        async with connect(server.address) as another:
            assert await another.unary_unary(METHOD)(b"x", timeout=30, wait_for_ready=True) == b"x"


def test_a_service_takes_more_descriptors_than_a_shell_gives() -> None:
    present, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(256, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        server_module._allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(server_module.DESCRIPTORS, most), most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        server_module._allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most), "never fewer"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (present, most))


async def test_a_connection_without_a_call_ends_and_one_with_a_stream_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing passes on it but what keeps it; the next call opens another."""
    monkeypatch.setattr(server_module, "IDLE_S", 0.3)
    async with echoing() as server, connect(server.address) as used, connect(server.address) as idle:
        watch = health_pb2_grpc.HealthStub(used).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status
        assert await idle.unary_unary(METHOD)(b"x", timeout=30) == b"x"
        async with asyncio.timeout(30):
            while idle.get_state() is grpc.ChannelConnectivity.READY:
                await idle.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert await idle.unary_unary(METHOD)(b"x", timeout=30) == b"x"
        assert not watch.done() and used.get_state() is grpc.ChannelConnectivity.READY
        watch.cancel()


async def test_a_compressed_message_is_refused() -> None:
    """However little it holds: what it would inflate to is not known."""
    async with echoing() as server, grpc.aio.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(METHOD)
        for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ask(bytes(1 << 10), compression=algorithm, timeout=30)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await ask(bytes(1 << 10), timeout=30) == bytes(1 << 10)


async def test_a_compressed_answer_is_refused() -> None:
    """As of a draft that would have its gateways hold gigabytes."""

    async def answer(request: bytes, context: Any) -> bytes:
        context.set_compression(grpc.Compression.Gzip)
        await context.send_initial_metadata(())
        return bytes(1 << 10)

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"GetTargetInfo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"Compression algorithm .*gzip"):
            await channel.unary_unary(METHOD)(b"", timeout=30)
    await server.stop(0)


async def test_a_port_in_use_is_refused_and_unix_sockets_work(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    first = build_server("localhost:0", [], lambda _: None)
    assert first.port > 0 and first.address == f"localhost:{first.port}"
    with pytest.raises(Unavailable, match="cannot listen"):
        build_server(first.address, [], lambda _: None)
    second = build_server(address, [SERVICE], lambda _: None)
    await second.start()
    channel = connect(address)
    await becomes(channel, "SERVING")
    await channel.close()
    await second.stop()
    await first.grpc_server.stop(None)


async def test_a_peer_that_is_slow_to_answer_is_waited_for() -> None:
    """As one far away, or on a busy machine: the first call is no failure."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(0.15)
            writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served, serving = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(relay(reader, serving), relay(served, writer))

    server = build_server("127.0.0.1:0", [SERVICE], lambda _: None)
    await server.start()
    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = proxy.sockets[0].getsockname()
    async with proxy, connect(f"{host}:{port}") as channel:
        assert await health_of(channel) == "SERVING"
    await server.stop()


@asynccontextmanager
async def child(hold_s: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    path = Path(__file__).with_name("serve_child.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[2] / root) for root in ("protos", "rpc"))
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), str(hold_s), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
    channel = connect(line.removeprefix("child listening on ").strip())
    try:
        await becomes(channel, "SERVING")
        yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await channel.close()


async def asked(process: asyncio.subprocess.Process) -> None:
    """A call has reached the child."""
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"asked\n"


async def test_sigterm_drains_and_lets_running_calls_end() -> None:
    async with child(hold_s=0.3) as (process, channel):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        call = stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert Serving((await watch.read()).status) == "SERVING"
        await asked(process)
        process.send_signal(signal.SIGTERM)
        assert Serving((await asyncio.wait_for(watch.read(), 30)).status) == "NOT_SERVING"
        watch.cancel()
        assert (await call).max_window == 7
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.read(), 30)).decode().split() == ["draining", "stopped"]
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_second_signal_ends_at_once() -> None:
    async with child(hold_s=60) as (process, channel):
        stub = target_pb2_grpc.TargetServiceStub(channel)
        call = stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
        await asked(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"draining\n"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 130
        with pytest.raises(grpc.aio.AioRpcError):
            await call


async def test_reflection_lists_the_services() -> None:
    async with child(hold_s=0) as (_, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        answer = await call.read()
        assert SERVICE in {service.name for service in answer.list_services_response.service}
        call.cancel()


async def test_the_process_ends_where_the_work_behind_its_server_does() -> None:
    """As a device that is lost: the error is raised, and the address is free for the next process."""
    work: Future[None] = Future()
    server = build_server("127.0.0.1:0", [SERVICE], lambda grpc_server: None)
    serving = asyncio.create_task(serve_until_signal(server, name="test", work=work))
    async with grpc.aio.insecure_channel(server.address) as channel:
        await becomes(channel, "SERVING")
    work.set_exception(RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        await asyncio.wait_for(serving, 30)
    await build_server(server.address, [SERVICE], lambda grpc_server: None).stop()
