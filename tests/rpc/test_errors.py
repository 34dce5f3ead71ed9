"""Errors cross real gRPC with their details, for every kind of method, and bugs do not leak prompts."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc._cython.cygrpc import ExecuteBatchError

from outrider.rpc import errors, messages
from outrider.rpc import status as statuses
from outrider.rpc.channel import connect
from outrider.rpc.messages import Failure
from outrider.rpc.server import build_server
from outrider.v1 import generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc

CLASSES = [
    errors.InvalidArgument,
    errors.ResourceExhausted,
    errors.FailedPrecondition,
    errors.NotFound,
    errors.Unavailable,
    errors.ProtocolError,
    errors.DeadlineExceeded,
    errors.Cancelled,
    errors.Internal,
]
FULL: dict[str, Any] = {
    "reason": "NO_BLOCKS",
    "retry_after_ms": 1_250,
    "violations": (errors.Violation("sampling.top_p", "is 2; allowed: at most 1"),),
}


class Raiser(target_pb2_grpc.TargetServiceServicer, generation_pb2_grpc.GenerationServiceServicer):
    """Raises `error` from a unary, a server-streaming and a bidirectional method."""

    error: BaseException

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(text="first")
        raise self.error

    async def Verify(self, requests: Any, context: Any) -> None:
        await context.read()
        raise self.error


@pytest.fixture(scope="module")
async def raiser() -> AsyncIterator[tuple[Raiser, grpc.aio.Channel]]:
    servicer = Raiser()

    def register(server: Any) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    server = build_server("localhost:0", ["outrider.v1.TargetService"], register)
    await server.start()
    channel = connect(server.address)
    yield servicer, channel
    await channel.close()
    await server.stop()


async def call(kind: str, channel: grpc.aio.Channel) -> None:
    target = target_pb2_grpc.TargetServiceStub(channel)
    if kind == "unary":
        await target.GetTargetInfo(target_pb2.GetTargetInfoRequest(), timeout=60)
    elif kind == "server stream":
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async for _ in stub.Generate(generation_pb2.GenerateRequest(), timeout=60):
            pass
    else:
        stream = target.Verify(timeout=60)
        await stream.write(target_pb2.VerifyRequest())
        await stream.read()
        await stream.code()
        await stream.read()


async def raised(kind: str, channel: grpc.aio.Channel) -> errors.OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(kind, channel)
    return statuses.from_rpc_error(caught.value)


@pytest.mark.parametrize("kind", ["unary", "server stream", "bidi"])
async def test_details_are_read_back(raiser: tuple[Raiser, grpc.aio.Channel], kind: str) -> None:
    servicer, channel = raiser
    servicer.error = errors.ResourceExhausted("no free blocks", **FULL)
    error = await raised(kind, channel)
    assert type(error) is errors.ResourceExhausted and error.message == "no free blocks"
    assert (error.reason, error.retry_after_ms, error.violations) == tuple(FULL.values())


@pytest.mark.parametrize("kind", ["unary", "server stream", "bidi"])
async def test_a_bug_is_internal_logged_and_not_described(
    raiser: tuple[Raiser, grpc.aio.Channel], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, channel = raiser
    servicer.error = KeyError("the secret prompt")
    error = await raised(kind, channel)
    assert type(error) is errors.Internal and "secret" not in str(error)
    assert any(record.exc_info and "unexpected error" in record.message for record in caplog.records)


async def test_timeouts_and_peers_errors_are_translated(raiser: tuple[Raiser, grpc.aio.Channel]) -> None:
    servicer, channel = raiser
    servicer.error = TimeoutError()
    assert type(await raised("unary", channel)) is errors.DeadlineExceeded
    servicer.error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(), "no such model"
    )
    assert type(await raised("unary", channel)) is errors.NotFound


async def test_a_call_that_ended_while_it_was_written_to_is_no_bug(
    raiser: tuple[Raiser, grpc.aio.Channel], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, channel = raiser
    servicer.error = ExecuteBatchError("Failed")
    error = await raised("server stream", channel)
    assert type(error) is errors.Unavailable and error.reason == "CALL_ENDED" and not caplog.records


UNREADABLE = {
    "no tag": ("TargetService/GetTargetInfo", b"\xff"),
    "cut off": ("GenerationService/Generate", b"\x0a\x05x"),
    "no UTF-8": ("GenerationService/Generate", b"\x0a\x01\xff"),
}


@pytest.mark.parametrize("problem", UNREADABLE)
async def test_a_request_that_cannot_be_read_is_named(raiser: tuple[Raiser, grpc.aio.Channel], problem: str) -> None:
    servicer, channel = raiser
    servicer.error = KeyError("not reached")
    method, raw = UNREADABLE[problem]
    call = channel.unary_stream(f"/outrider.v1.{method}", request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(raw, timeout=60).read()
    error = statuses.from_rpc_error(caught.value)
    assert type(error) is errors.InvalidArgument and [one.field for one in error.violations] == ["request"]


async def test_a_hundred_thousand_violations_fit_in_a_trailer(raiser: tuple[Raiser, grpc.aio.Channel]) -> None:
    servicer, channel = raiser
    servicer.error = errors.InvalidArgument.of(
        errors.Violation(f"logit_bias[{i}]", "is inf; allowed: a finite number") for i in range(100_000)
    )
    error = await raised("unary", channel)
    assert len(error.violations) == errors.MAX_VIOLATIONS


@pytest.mark.parametrize("cls", CLASSES)
def test_statuses_round_trip(cls: type[errors.OutriderError]) -> None:
    error = statuses.from_status(statuses.to_status(cls("message")))
    assert type(error) is cls and (error.message, error.reason) == ("message", cls.default_reason)
    failure = messages.to_failure(7, cls("message", retry_after_ms=5))
    assert failure == Failure(7, cls.code.value[0], "message", cls.default_reason, 5)
    assert type(messages.from_failure(failure)) is cls


def test_unknown_codes_and_details_do_no_harm() -> None:
    status = statuses.make_status(11, "out of range")
    status.details.add().Pack(error_details_pb2.DebugInfo(detail="x"))
    error = statuses.from_status(status)
    assert type(error) is errors.Internal and error.reason == "OUT_OF_RANGE"
    assert errors.status_code(4711) is grpc.StatusCode.UNKNOWN
    mangled = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata((statuses.STATUS_DETAILS_KEY, b"\xff\xff")),
        "gone",
    )
    assert type(statuses.from_rpc_error(mangled)) is errors.Unavailable


def test_a_deadline_of_grpc_s_own_has_our_words() -> None:
    late = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "Deadline Exceeded"
    )
    assert statuses.from_rpc_error(late).message == "the request's time ran out"


async def test_a_call_that_ends_while_it_is_written_to_is_unavailable(
    raiser: tuple[Raiser, grpc.aio.Channel],
) -> None:
    """grpc.aio loses the status of some of these calls."""
    servicer, channel = raiser
    servicer.error = errors.Unavailable("draining")

    async def write_on() -> type[errors.OutriderError]:
        stream = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            with suppress(asyncio.InvalidStateError):  # it has ended
                while True:
                    await stream.write(target_pb2.VerifyRequest())
            await stream.read()
        return type(statuses.from_rpc_error(caught.value))

    kinds = await asyncio.gather(*(write_on() for _ in range(200)))
    assert set(kinds) == {errors.Unavailable}


async def test_a_dead_address_is_unavailable() -> None:
    channel = connect("localhost:1")
    error = await asyncio.wait_for(raised("unary", channel), 30)
    assert type(error) is errors.Unavailable
    await channel.close()


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 MiB"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("shape mismatch"), False),
        (OSError(errno.EPIPE, "Broken pipe"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_who_lacks_memory_is_told_when_to_come_back(error: Exception, lacks: bool) -> None:
    found = errors.unexpected(error, "a step failed", "STEP_FAILED")
    assert (found.reason, found.retry_after_ms) == (("NO_MEMORY", 1000) if lacks else ("STEP_FAILED", 0))
    assert isinstance(found, errors.Unavailable if lacks else errors.Internal)
