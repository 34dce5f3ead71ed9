"""DraftService over gRPC: frames to commands of the device thread, its pieces back to frames. No logic of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from outrider.draft_service.engine import Attach, Deliver, Detach, DraftEngineCommand
from outrider.engine.worker import DeviceStopped, Worker
from outrider.rpc.codec import encode_draft_info
from outrider.rpc.errors import InvalidArgument, Unavailable
from outrider.rpc.frames import DRAFT_STREAM
from outrider.rpc.messages import Close, Commit, Credit, DraftCommand, DraftEvent, DraftInfo, Open, to_failure
from outrider.rpc.stream import FrameStream, MessageBatch, Outboxes, ServedStreams, server_stream
from outrider.rpc.validate import ALL_LOGPROBS, validate_commit, validate_credit, validate_open
from outrider.v1 import draft_pb2, draft_pb2_grpc

SERVICE = "outrider.v1.DraftService"
# Ids and lengths are the target's: what the draft itself cannot hold is no client error, and the engine's to judge.
_ANY_ID, _ANY_LENGTH = 2**32 - 1, 2**31 - 1


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One engine, many gateways' streams."""

    def __init__(self, thread: Worker[DraftEngineCommand], outboxes: Outboxes, info: DraftInfo) -> None:
        self._thread, self._outboxes, self._info = thread, outboxes, info
        self._streams = ServedStreams()
        self._numbers = itertools.count(1)

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        """Serves one stream until it ends; then everything that it opened is released."""
        number = next(self._numbers)

        def on_messages(batch: MessageBatch) -> None:
            self._submit(Deliver(number, [_checked(stream, message) for message in batch]))

        def sink(events: Sequence[DraftEvent]) -> None:
            for event in events:
                self._outboxes.put(stream, event)
            self._outboxes.flush()

        stream = server_stream(DRAFT_STREAM, context, on_messages=on_messages, step_age_ms=self._step_age_ms)
        self._submit(Attach(number, sink))
        try:
            await self._streams.serve(stream)
        finally:
            with suppress(DeviceStopped):
                self._thread.submit(Detach(number))

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        """Describes the model and the methods."""
        return encode_draft_info(self._info)

    def drain(self) -> None:
        """No new sequences; every stream ends after its last one."""
        self._streams.drain()

    def _submit(self, command: DraftEngineCommand) -> None:
        try:
            self._thread.submit(command)
        except DeviceStopped as error:
            raise Unavailable("the draft's device thread has ended", reason="DEVICE_DEAD") from error

    def _step_age_ms(self) -> int:
        return round(self._thread.step_age_s() * 1000)


def _checked(stream: FrameStream, message: Any) -> DraftCommand:
    """The message; if it is not valid its sequence fails, and the engine lets go of it."""
    try:
        _validate(message)
    except InvalidArgument as error:
        stream.send(to_failure(message.sequence_id, error))
        return Close(message.sequence_id)
    command: DraftCommand = message
    return command


def _validate(message: DraftCommand) -> None:
    if isinstance(message, Open):
        validate_open(message, _ANY_ID, _ANY_LENGTH, ALL_LOGPROBS)
    elif isinstance(message, Credit):
        validate_credit(message)
    elif isinstance(message, Commit):
        validate_commit(message, _ANY_ID)


def register(servicer: DraftServicer, server: Any) -> None:
    """Adds the servicer to a grpc.aio server."""
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
