"""A relay that makes either side of a connection believe that the other one is of another release. It stands on the
wire of real services, so that what is tried is what they do with each other's messages, and not what a stub does.

Older: every message is read and written again with the descriptors of an older protocol, so that no field reaches the
other side that this one did not have; calls that it did not have are unimplemented, and of the capabilities only those
are told that its Open could say. Newer: every message, and each within it, has fields more that nobody knows, frames
have messages of unknown kinds, enums in answers numbers of their own, lists of capabilities and methods one more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from outrider.rpc.channel import MAX_MESSAGE_BYTES, connect

REPOSITORY = Path(__file__).parents[2]
NOW = REPOSITORY / "protos" / "image.binpb"
FIRST = REPOSITORY / "tests" / "gateway" / "data" / "outrider-1.0.binpb"
BEFORE_CONSTRAINTS = Path(__file__).parent / "data" / "before-constraints.binpb"  # had capabilities, and no reasoning
SERVICES = {
    "target": "outrider.v1.TargetService",
    "draft": "outrider.v1.DraftService",
    "gateway": "outrider.v1.GenerationService",
}
FUTURE = 77  # a number that no enum has
FIRST_UNKNOWN = 29_000  # and the fields after it no message has
VARINT, I64, LEN, I32 = 0, 1, 2, 5  # protobuf's wire types


def _field(number: int, wire_type: int, value: bytes) -> bytes:
    """A field on the wire; its number takes three bytes."""
    key = number << 3 | wire_type
    return bytes((key & 127 | 128, key >> 7 & 127 | 128, key >> 14)) + value


UNKNOWN_KIND = _field(FIRST_UNKNOWN, LEN, b"\x02\x08\x01")  # a message, of a kind that nobody knows
UNKNOWN_FIELDS = (
    UNKNOWN_KIND
    + _field(FIRST_UNKNOWN + 1, VARINT, b"\x2a")
    + _field(FIRST_UNKNOWN + 2, I64, bytes(8))
    + _field(FIRST_UNKNOWN + 3, I32, bytes(4))
)


def pool_of(image: Path) -> DescriptorPool:
    """A protocol's descriptors."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(image.read_bytes()).file:
        pool.Add(file)
    return pool


class Release(ABC):
    """How another release's messages differ from what passes."""

    def __init__(self, image: Path = NOW) -> None:
        self._pool = pool_of(image)
        self.changed: Counter[str] = Counter()  # messages that were not passed on as they came, by name

    def service(self, name: str) -> ServiceDescriptor:
        """Its calls."""
        return self._pool.FindServiceByName(name)

    def has(self, message: str, field: str) -> bool:
        """Whether its messages of that name have that field."""
        return field in self._pool.FindMessageTypeByName(f"outrider.v1.{message}").fields_by_name

    def says(self, capability: str) -> bool:
        """Whether a service of that release can name it: "sampling.min_p", "acceptance.block", "reasoning"."""
        first, _, second = capability.partition(".")
        if first == "acceptance":
            rules = self._pool.FindEnumTypeByName("outrider.v1.AcceptanceRule")
            return f"ACCEPTANCE_RULE_{second.upper()}" in rules.values_by_name
        return self.has("SamplingParams", second) if first == "sampling" else self.has("Open", first)

    def translate(self, data: bytes, name: str, is_answer: bool) -> bytes:
        """One message as that release would have sent it. DecodeError where it is none."""
        message = GetMessageClass(self._pool.FindMessageTypeByName(name)).FromString(data)
        self._change(message, is_answer)
        out = message.SerializeToString()
        self.changed[name.rpartition(".")[2]] += out != data
        return out

    @abstractmethod
    def _change(self, message: Any, is_answer: bool) -> None:
        """Makes it one of that release."""


class Older(Release):
    """What an image has, and nothing else."""

    def _change(self, message: Any, is_answer: bool) -> None:
        message.DiscardUnknownFields()
        if hasattr(message, "capabilities"):
            kept = [name for name in message.capabilities if self.says(name)]
            del message.capabilities[:]
            message.capabilities.extend(kept)


class Newer(Release):
    """All of today's, and more."""

    def _change(self, message: Any, is_answer: bool) -> None:
        if hasattr(message, "header") and hasattr(message, "messages"):
            message.messages.add().MergeFromString(UNKNOWN_KIND)
        if hasattr(message, "capabilities"):
            message.capabilities.append("sampling.of_the_future")
        if hasattr(message, "methods") and message.DESCRIPTOR.name == "GetDraftInfoResponse":
            message.methods.add(name="of_the_future", can_run_ahead=True)
        _add_unknown(message, is_answer)


def _add_unknown(message: Any, is_answer: bool) -> None:
    """To a message and all within it; how a token came about becomes a number of its own for every third."""
    for field, value in message.ListFields():
        if field.name == "origins" and is_answer:
            for place in range(0, len(value), 3):
                value[place] = FUTURE
        if field.message_type is None or field.message_type.file.package != "outrider.v1":
            continue
        if not field.message_type.GetOptions().map_entry:
            for each in (value,) if isinstance(value, Message) else value:
                _add_unknown(each, is_answer)
    message.MergeFromString(UNKNOWN_FIELDS)


class Relay:
    """Serves what one service does, at an address of its own, through a release's messages. Any other call, as of
    health, it passes on as it is."""

    def __init__(self, role: str, release: Release) -> None:
        self.release, self._service = release, SERVICES[role]
        self.address = ""
        self._channel: grpc.aio.Channel | None = None
        self._server: Any = None

    async def __aenter__(self) -> Self:
        sizes = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_metadata_size", 32 * 1024)]
        self._server = grpc.aio.server(options=sizes)
        self._server.add_generic_rpc_handlers([_Handlers(self)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(None)
        if self._channel is not None:
            await self._channel.close()

    async def before(self, address: str) -> str:
        """From now on the service is at that address; returns the relay's."""
        if self._channel is not None:
            await self._channel.close()
        self._channel = connect(address)
        return self.address

    def handler(self, path: str) -> grpc.RpcMethodHandler | None:
        """Of a call; None: that release does not have it."""
        service, _, method = path.lstrip("/").partition("/")
        request = answer = ""
        if service == self._service:
            found = self.release.service(service).methods_by_name.get(method)
            if found is None:
                return None
            request, answer = found.input_type.full_name, found.output_type.full_name

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._forward(path, requests, context, (request, answer))

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _forward(self, path: str, requests: AsyncIterator[bytes], context: Any, names: tuple[str, str]) -> None:
        channel = self._channel
        if channel is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is behind the relay yet")
            return

        async def translated() -> AsyncIterator[bytes]:
            async for request in requests:
                yield self.release.translate(request, names[0], False) if names[0] else request

        own = ("grpc-", "user-agent")
        metadata = [(key, value) for key, value in context.invocation_metadata() if not key.startswith(own)]
        call = channel.stream_stream(path)(translated(), timeout=context.time_remaining(), metadata=metadata)
        try:
            async for answer in call:
                await context.write(self.release.translate(answer, names[1], True) if names[1] else answer)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        finally:
            call.cancel()


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        return self._relay.handler(handler_call_details.method)


RELEASES: dict[str, Callable[[], Release]] = {
    "the first protocol": lambda: Older(FIRST),
    "the one before constraints": lambda: Older(BEFORE_CONSTRAINTS),
    "a newer one": Newer,
}
