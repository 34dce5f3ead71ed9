"""TargetService over gRPC: what EngineServicer leaves to the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.rpc.codec import ADAPTER, RELOADED_WEIGHTS, TARGET_INFO, TARGET_STREAM
from outrider.rpc.errors import PermissionDenied, Unavailable
from outrider.rpc.learning.servicer import LearningServicer
from outrider.rpc.messages import (
    Adapter,
    Credit,
    DraftTokens,
    LearnedDraft,
    Load,
    TargetCommand,
    TargetInfo,
    validate_credit,
    validate_piece,
)
from outrider.rpc.servicer import EngineServicer, EngineThread
from outrider.rpc.stream import Outboxes
from outrider.v1 import target_pb2, target_pb2_grpc

if TYPE_CHECKING:
    from outrider.target_service.adapter_changes import AdapterChanges
    from outrider.target_service.reload import WeightReloads


class TargetServicer(EngineServicer, target_pb2_grpc.TargetServiceServicer):
    """A TargetEngine's streams, and what it says of itself."""

    role, kind, service = "target", TARGET_STREAM, "outrider.v1.TargetService"

    def __init__(
        self,
        thread: EngineThread,
        outboxes: Outboxes,
        info: TargetInfo,
        load: Callable[[], Load],
        adapters: AdapterChanges | None = None,
        reloads: WeightReloads | None = None,
    ) -> None:
        """Without `adapters` those that there are stay, without `reloads` the weights."""
        super().__init__(thread, outboxes)
        self.info = info
        self._load, self._adapters, self._reloads = load, adapters, reloads
        self.learning = LearningServicer(self.role, lambda: self._draining)

    async def Verify(self, request_iterator: Any, context: Any) -> None:
        """Serves one gateway's stream until it ends."""
        await self.serve(context)

    async def GetTargetInfo(self, request: Any, context: Any) -> target_pb2.GetTargetInfoResponse:
        """Describes the model, its limits and its load."""
        return TARGET_INFO.encode(replace(self.info, load=self._load(), info_version=self.info_version))

    async def LoadAdapter(self, request: Any, context: Any) -> target_pb2.LoadAdapterResponse:
        """Adds an adapter."""
        added = await self._changes().load(request.name, request.path)
        return target_pb2.LoadAdapterResponse(adapter=ADAPTER.encode(added))

    async def UnloadAdapter(self, request: Any, context: Any) -> target_pb2.UnloadAdapterResponse:
        """Takes an adapter from new sequences."""
        return target_pb2.UnloadAdapterResponse(num_sequences=await self._changes().unload(request.name))

    async def ReloadWeights(self, request: Any, context: Any) -> target_pb2.ReloadWeightsResponse:
        """Puts other weights in the place of the present ones."""
        if self._reloads is None:
            raise PermissionDenied("the target was not started with --allow-reload")
        if self._draining:
            raise Unavailable("the service is draining", reason="DRAINING")
        return RELOADED_WEIGHTS.encode(await self._reloads.reload(request.model, request.drain_s, request.restart))

    def tell_target(self, info: TargetInfo) -> None:
        """New sequences are of other weights: who asks is told so, and who has a stream that it is to ask again."""
        self.info = replace(info, learned=())
        self.info_version += 1

    def tell_learned(self, rows: tuple[LearnedDraft, ...]) -> None:
        """What the head has learned, and is in use."""
        self.info = replace(self.info, learned=rows)

    def tell_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Others are there: who asks is told so, and who has a stream that it is to ask again."""
        self.info = replace(self.info, adapters=tuple(adapters))
        self.info_version += 1

    def _changes(self) -> AdapterChanges:
        if self._adapters is None:
            raise PermissionDenied("the target was not started with --allow-adapter-changes")
        if self._draining:
            raise Unavailable("the service is draining", reason="DRAINING")
        return self._adapters

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
        self.learning.register(server)
