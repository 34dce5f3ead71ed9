"""Calls whose request does not come, or is none: refused by who they are, ended in bounded time, told why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from itertools import islice
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client.resume import may_repeat
from outrider.rpc import interceptors
from outrider.rpc.channel import connect
from outrider.rpc.errors import OutriderError, PermissionDenied, ResourceExhausted
from outrider.rpc.interceptors import Gate, Room
from outrider.rpc.server import Server, build_server
from outrider.rpc.status import from_rpc_error

SERVICE = "outrider.v1.TargetService"
KINDS = {"Echo": grpc.unary_unary_rpc_method_handler, "Repeat": grpc.unary_stream_rpc_method_handler}
METHODS = pytest.mark.parametrize("method", [f"/{SERVICE}/{name}" for name in KINDS])


@asynccontextmanager
async def echoing(**options: Any) -> AsyncIterator[Server]:
    """A server that gives back the bytes that it is given."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def repeat(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request

    handlers = {name: KINDS[name](handler) for name, handler in (("Echo", echo), ("Repeat", repeat))}

    def register(server: Any) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    server = build_server("127.0.0.1:0", [SERVICE], register, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def half_open(channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
    """A call that sends its head, and no request."""
    return channel.stream_stream(method)(metadata=metadata)


@asynccontextmanager
async def of_host(host: str, port: int) -> AsyncIterator[str]:
    """An address whose connections come to that port from another of this machine's."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served, serving = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
        await asyncio.gather(relay(reader, serving), relay(served, writer))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"


async def answer(call: Any) -> bytes:
    """The first message. Raises OutriderError."""
    try:
        async with asyncio.timeout(60):
            message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    assert isinstance(message, bytes)
    return message


async def ask(channel: grpc.aio.Channel, method: str, request: bytes = b"x") -> bytes:
    return await answer(channel.unary_stream(method)(request, timeout=30))


async def refusal(call: Any) -> OutriderError:
    with pytest.raises(OutriderError) as error:
        await answer(call)
    return error.value


@METHODS
async def test_calls_whose_request_does_not_come_make_room(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is full of them serves again, probes of health too."""
    monkeypatch.setattr(interceptors, "MESSAGE_S", 0.5)
    async with echoing(max_concurrent_rpcs=4) as server, connect(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for error in await asyncio.gather(*(refusal(half_open(channel, method)) for _ in range(4))):
            assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "NO_REQUEST")
        assert await ask(channel, method) == b"x"
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status


@METHODS
async def test_who_may_not_call_is_refused_before_its_request_comes(method: str) -> None:
    async def check(method: str, context: Any) -> None:
        raise PermissionDenied("shut")

    async with echoing(interceptors=[Gate(check)]) as server, connect(server.address) as channel:
        assert isinstance(await refusal(half_open(channel, method)), PermissionDenied)


@METHODS
async def test_a_call_without_a_request_is_told_so(method: str) -> None:
    async with echoing() as server, connect(server.address) as channel:
        call = half_open(channel, method)
        await call.done_writing()
        assert [violation.field for violation in (await refusal(call)).violations] == ["request"]


@METHODS
async def test_what_gives_a_call_up_early_is_no_error_here(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """By a client that goes away before it has asked, and by gRPC, of a request beyond the bound."""
    async with echoing(max_message_bytes=1024) as server, connect(server.address) as channel:

        async def give_up() -> None:
            call = half_open(channel, method)
            await asyncio.sleep(0.002)
            call.cancel()
            error = await refusal(channel.unary_stream(method)(bytes(2048), timeout=30))
            assert (error.code, error.retry_after_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 0)

        with caplog.at_level(logging.WARNING):
            await asyncio.gather(*(give_up() for _ in range(20)))
            assert await ask(channel, method) == b"x"
        assert not caplog.records


async def test_a_full_server_says_when_to_come_back_and_that_it_lives() -> None:
    """To those who may call: others take nobody's place."""
    method, known = f"/{SERVICE}/Echo", (("token", "known"),)

    async def check(method: str, context: Any) -> None:
        if method.startswith(f"/{SERVICE}/") and known[0] not in context.invocation_metadata():
            raise PermissionDenied("shut")

    async with echoing(max_concurrent_rpcs=2, interceptors=[Gate(check)]) as server, connect(server.address) as channel:
        for _ in range(3):
            assert isinstance(await refusal(half_open(channel, method)), PermissionDenied)
        held = [half_open(channel, method, known) for _ in range(2)]
        for _ in range(3):
            error = await refusal(half_open(channel, method, known))
            assert (error.reason, error.retry_after_ms) == ("TOO_MANY_CALLS", 1000) and may_repeat(error)
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)).status
        for call in held:
            await call.write(b"x")
            assert await answer(call) == b"x"
            assert await call.read() is grpc.aio.EOF
        call = half_open(channel, method, known)
        await call.write(b"x")
        assert await answer(call) == b"x"


def test_a_caller_has_a_share_of_the_room_that_others_leave() -> None:
    room, held = Room(8, 0.75, ". More by a token"), ExitStack()

    def fill(who: str) -> tuple[int, str]:
        """How many are let in, and why no more are."""
        for count in range(9):
            try:
                held.enter_context(room.place(who))
            except ResourceExhausted as error:
                assert error.retry_after_ms
                assert error.message.endswith(". More by a token") == (error.reason == "CALLER_SHARE")
                return count, error.reason
        raise AssertionError("no bound")

    assert [fill(who) for who in ("a", "b", "a", "c", "d")] == [
        (6, "CALLER_SHARE"),
        (1, "CALLER_SHARE"),
        (0, "CALLER_SHARE"),
        (1, "TOO_MANY_CALLS"),
        (0, "TOO_MANY_CALLS"),
    ]
    held.close()
    assert fill("d") == (6, "CALLER_SHARE"), "those who left take nothing"


@pytest.mark.parametrize(("method", "most"), [("Check", 64), ("Watch", 32)])
@pytest.mark.parametrize("own", [False, True], ids=["beside", "alone"])
async def test_who_may_only_ask_for_health_keeps_no_other_host_from_it(method: str, most: int, own: bool) -> None:
    """Nor from calls, however many it asks for, on the address of all calls and on that of health alone."""
    async with echoing(health_address="127.0.0.1:0") as server, AsyncExitStack() as stack:
        port = int((server.health_address if own else server.address).rpartition(":")[2])
        many = await stack.enter_async_context(connect(f"127.0.0.1:{port}"))
        other = await stack.enter_async_context(connect(await stack.enter_async_context(of_host("127.0.0.2", port))))
        calls = [half_open(many, f"/grpc.health.v1.Health/{method}") for _ in range(200)]
        codes = [await code for code in islice(asyncio.as_completed([call.code() for call in calls]), 200 - most)]
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        stub, request = health_pb2_grpc.HealthStub(other), health_pb2.HealthCheckRequest()
        watch = stub.Watch(request, timeout=30)
        assert (await stub.Check(request, timeout=30)).status and (await watch.read()).status
        if not own:
            assert await ask(many, f"/{SERVICE}/Echo") == b"x"
        for call in calls:
            call.cancel()
        watch.cancel()


async def test_a_probe_whose_request_does_not_come_ends_soon() -> None:
    async with echoing() as server, connect(server.address) as channel:
        error = await asyncio.wait_for(refusal(half_open(channel, "/grpc.health.v1.Health/Check")), 15)
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "NO_REQUEST")


async def test_grpcs_own_refusal_of_too_many_calls_may_be_tried_again() -> None:
    """It has no details; that of a message beyond the bound has none, too, and may not."""

    async def wait(request: bytes, context: Any) -> bytes:
        reached.set()
        await asyncio.sleep(60)
        return request

    reached = asyncio.Event()
    server = grpc.aio.server(maximum_concurrent_rpcs=1, options=[("grpc.max_receive_message_length", 100)])
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        too_long = await refusal(channel.unary_stream(f"/{SERVICE}/Echo")(bytes(200), timeout=30))
        assert too_long.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not may_repeat(too_long)
        held = channel.unary_stream(f"/{SERVICE}/Echo")(b"x")
        await reached.wait()
        error = await refusal(channel.unary_stream(f"/{SERVICE}/Echo")(b"x", timeout=30))
        assert (error.reason, error.retry_after_ms) == ("TOO_MANY_CALLS", 1000) and may_repeat(error)
        held.cancel()
    await server.stop(0)


async def test_an_odd_second_request_is_not_read() -> None:
    async with echoing() as server, connect(server.address) as channel:
        call = half_open(channel, f"/{SERVICE}/Repeat")
        for _ in range(2):
            await call.write(b"x")
        assert await answer(call) == b"x"
        assert await asyncio.wait_for(call.read(), 4) is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK
