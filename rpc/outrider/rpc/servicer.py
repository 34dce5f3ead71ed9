"""Between gRPC and the thread that owns a model, alike for draft and target: a stream's frames become commands of the
engine, what the engine says becomes frames again, and the end of a stream releases what it opened.

Two commands are all that an engine takes. Messages come in whole frames, since what a frame says holds together."""

from __future__ import annotations

import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from outrider.rpc.codec import StreamKind
from outrider.rpc.errors import InvalidArgument, Unavailable
from outrider.rpc.messages import MAX_NAME_CHARS, Close, to_failure
from outrider.rpc.stream import FrameStream, MessageBatch, Outboxes, server_stream

MODEL_KEY = "outrider-model-bin"  # in a stream's metadata: the name of the model that a gateway serves by it

Message = TypeVar("Message")
Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class Deliver(Generic[Message, Event]):
    """Validated messages of a stream, in order, and where their answers go."""

    stream: int
    messages: Sequence[Message]
    sink: Callable[[Event], None]  # called on the engine's thread; the engine says when all of a step is there
    received: float | None = None  # on the engine's clock: a command waits while a step runs
    model: str = ""  # what the stream's gateway calls what it serves, where that has a name


@dataclass(frozen=True, slots=True)
class Detach:
    """A stream ended: everything that it opened is released."""

    stream: int


def model_of(context: Any) -> str:
    """The name of the model that a call is for; empty where it says none."""
    found = dict(context.invocation_metadata() or ()).get(MODEL_KEY, b"")
    return bytes(found).decode(errors="replace")[:MAX_NAME_CHARS]


class EngineThread(Protocol):
    """The thread that runs an engine, as a servicer sees it."""

    @property
    def is_alive(self) -> bool:
        """Whether it still takes commands."""

    def submit(self, command: Any) -> None:
        """Queues a Deliver or a Detach. Raises RuntimeError once the thread has ended."""

    def step_age_s(self) -> float:
        """For how long the step under way has run; 0 between steps."""


class EngineServicer(ABC):
    """One engine, many gateways' streams. All methods belong to the event loop."""

    role: ClassVar[str]  # in messages: draft, target
    service: ClassVar[str]  # its full name
    kind: ClassVar[StreamKind]

    def __init__(self, thread: EngineThread, outboxes: Outboxes) -> None:
        self._thread, self._outboxes = thread, outboxes
        self._streams: set[FrameStream] = set()
        self._draining = False
        self.max_media_bytes = 0  # of a sequence, that are taken
        self.info_version = 1 + secrets.randbits(31)  # of another process another: none is taken for this one
        self._numbers = itertools.count(1)

    @abstractmethod
    def validate(self, message: Any) -> None:
        """Raises InvalidArgument for a message that the engine shall not see."""

    @abstractmethod
    def register(self, server: Any) -> None:
        """Adds itself to a grpc.aio server."""

    async def serve(self, context: Any) -> None:
        """Serves one stream until it ends; then everything that it opened is released."""
        if not self._thread.is_alive:
            raise self._device_dead()
        number, model = next(self._numbers), model_of(context)

        def on_messages(batch: MessageBatch) -> None:
            messages = [self._checked(stream, message) for message in batch]
            try:
                self._thread.submit(Deliver(number, messages, sink, time.monotonic(), model))
            except RuntimeError as error:
                raise self._device_dead() from error

        def on_unsent(sequence_id: int) -> None:
            with suppress(RuntimeError):
                self._thread.submit(Deliver(number, [Close(sequence_id)], sink))

        stream = server_stream(
            self.kind,
            context,
            on_messages=on_messages,
            on_unsent=on_unsent,
            step_age_ms=self._step_age_ms,
            info_version=lambda: self.info_version,
            max_media_bytes=self.max_media_bytes,
        )
        sink = partial(self._outboxes.put, stream)
        self._streams.add(stream)
        try:
            async with stream:
                if self._draining:
                    stream.drain()
                await stream.wait_closed()
        finally:
            self._streams.discard(stream)
            with suppress(RuntimeError):
                self._thread.submit(Detach(number))

    def drain(self) -> None:
        """No new sequences; every stream ends after its last one."""
        self._draining = True
        for stream in self._streams:
            stream.drain()

    def _checked(self, stream: FrameStream, message: Any) -> Any:
        """The message; if it is not valid its sequence fails, and the engine lets go of it."""
        try:
            self.validate(message)
        except InvalidArgument as error:
            stream.send(to_failure(message.sequence_id, error))
            return Close(message.sequence_id)
        return message

    def _device_dead(self) -> Unavailable:
        return Unavailable(f"the {self.role}'s device thread has ended", reason="DEVICE_DEAD")

    def _step_age_ms(self) -> int:
        return round(self._thread.step_age_s() * 1000)
