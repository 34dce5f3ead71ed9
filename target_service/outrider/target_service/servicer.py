"""TargetService over gRPC: frames to commands of the device thread, its answers back to frames. No logic of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from outrider.engine.worker import DeviceStopped, Worker
from outrider.rpc.codec import encode_target_info
from outrider.rpc.errors import InvalidArgument, Unavailable
from outrider.rpc.frames import TARGET_STREAM
from outrider.rpc.messages import Close, Credit, DraftTokens, Load, TargetCommand, TargetInfo, to_failure
from outrider.rpc.stream import FrameStream, MessageBatch, Outboxes, ServedStreams, server_stream
from outrider.rpc.validate import validate_credit, validate_piece
from outrider.target_service.engine import StreamCommand, StreamEnded, TargetEngineCommand
from outrider.v1 import target_pb2, target_pb2_grpc

SERVICE = "outrider.v1.TargetService"


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """One engine, many gateways' streams."""

    def __init__(
        self, thread: Worker[TargetEngineCommand], outboxes: Outboxes, info: TargetInfo, load: Callable[[], Load]
    ) -> None:
        self._thread, self._outboxes, self._info, self._load = thread, outboxes, info, load
        self._streams = ServedStreams()
        self._numbers = itertools.count(1)

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        """Serves one stream until it ends; then everything that it opened is released."""
        number = next(self._numbers)

        def on_messages(batch: MessageBatch) -> None:
            for message in batch:
                self._submit(number, stream, message)

        stream = server_stream(TARGET_STREAM, context, on_messages=on_messages, step_age_ms=self._step_age_ms)
        try:
            await self._streams.serve(stream)
        finally:
            with suppress(DeviceStopped):
                self._thread.submit(StreamEnded(number))

    async def GetTargetInfo(self, request: Any, context: Any) -> target_pb2.GetTargetInfoResponse:
        """Describes the model, its limits and its load."""
        return encode_target_info(replace(self._info, load=self._load()))

    def drain(self) -> None:
        """No new sequences; every stream ends after its last one."""
        self._streams.drain()

    def _submit(self, number: int, stream: FrameStream, message: Any) -> None:
        try:
            _validate(message)
        except InvalidArgument as error:
            stream.send(to_failure(message.sequence_id, error))
            command = StreamCommand(number, Close(message.sequence_id), _ignore)
        else:
            command = StreamCommand(number, message, lambda event: self._outboxes.put(stream, event), time.monotonic())
        try:
            self._thread.submit(command)
        except DeviceStopped as error:
            raise Unavailable("the target's device thread has ended", reason="DEVICE_DEAD") from error

    def _step_age_ms(self) -> int:
        return round(self._thread.step_age_s() * 1000)


def _validate(message: TargetCommand) -> None:
    """Bounds of what is not an Open; an Open is judged by the engine, which knows the vocabulary and its parent."""
    if isinstance(message, DraftTokens):
        validate_piece(message)
    elif isinstance(message, Credit):
        validate_credit(message)


def _ignore(event: object) -> None:
    """The sink of a sequence that was told of its end already."""


def register(servicer: TargetServicer, server: Any) -> None:
    """Adds the servicer to a grpc.aio server."""
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
