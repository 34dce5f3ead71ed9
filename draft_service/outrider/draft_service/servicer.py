"""DraftService over gRPC: what EngineServicer leaves to the draft."""

from __future__ import annotations

from typing import Any

from outrider.rpc.codec import DRAFT_INFO, DRAFT_STREAM
from outrider.rpc.messages import (
    Commit,
    Credit,
    DraftCommand,
    DraftInfo,
    Open,
    validate_commit,
    validate_credit,
    validate_open,
)
from outrider.rpc.sampling_params import ALL_LOGPROBS
from outrider.rpc.servicer import EngineServicer, EngineThread
from outrider.rpc.stream import Outboxes
from outrider.v1 import draft_pb2, draft_pb2_grpc

# Ids and lengths are the target's: what the draft itself cannot hold is no client error, and the engine's to judge.
_ANY_ID, _ANY_LENGTH = 2**32 - 1, 2**31 - 1


class DraftServicer(EngineServicer, draft_pb2_grpc.DraftServiceServicer):
    """A DraftEngine's streams, and what it says of itself."""

    role, kind, service = "draft", DRAFT_STREAM, "outrider.v1.DraftService"

    def __init__(self, thread: EngineThread, outboxes: Outboxes, info: DraftInfo) -> None:
        super().__init__(thread, outboxes)
        self._info = info

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        """Serves one gateway's stream until it ends."""
        await self.serve(context)

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        """Describes the model and the methods."""
        return DRAFT_INFO.encode(self._info)

    def validate(self, message: DraftCommand) -> None:
        """Bounds that are the draft's own; raises InvalidArgument."""
        if isinstance(message, Open):
            validate_open(message, _ANY_ID, _ANY_LENGTH, ALL_LOGPROBS)
        elif isinstance(message, Credit):
            validate_credit(message)
        elif isinstance(message, Commit):
            validate_commit(message, _ANY_ID)

    def register(self, server: Any) -> None:
        """Adds itself to a grpc.aio server."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)
