"""TargetService over gRPC: what EngineServicer leaves to the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.rpc.codec import TARGET_INFO, TARGET_STREAM
from outrider.rpc.messages import (
    Credit,
    DraftTokens,
    Load,
    TargetCommand,
    TargetInfo,
    validate_credit,
    validate_piece,
)
from outrider.rpc.servicer import EngineServicer, EngineThread
from outrider.rpc.stream import Outboxes
from outrider.v1 import target_pb2, target_pb2_grpc


class TargetServicer(EngineServicer, target_pb2_grpc.TargetServiceServicer):
    """A TargetEngine's streams, and what it says of itself."""

    role, kind, service = "target", TARGET_STREAM, "outrider.v1.TargetService"

    def __init__(self, thread: EngineThread, outboxes: Outboxes, info: TargetInfo, load: Callable[[], Load]) -> None:
        super().__init__(thread, outboxes)
        self._info, self._load = info, load

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        """Serves one gateway's stream until it ends."""
        await self.serve(context)

    async def GetTargetInfo(self, request: Any, context: Any) -> target_pb2.GetTargetInfoResponse:
        """Describes the model, its limits and its load."""
        return TARGET_INFO.encode(replace(self._info, load=self._load(), info_version=self.info_version))

    def validate(self, message: TargetCommand) -> None:
        """Bounds of what is not an Open; an Open is judged by the engine, which knows the vocabulary and its parent.
        Raises InvalidArgument."""
        if isinstance(message, DraftTokens):
            validate_piece(message)
        elif isinstance(message, Credit):
            validate_credit(message)

    def register(self, server: Any) -> None:
        """Adds itself to a grpc.aio server."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
