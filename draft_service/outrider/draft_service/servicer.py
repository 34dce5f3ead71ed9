"""DraftService over gRPC: what EngineServicer leaves to the draft."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.draft_service.vocabularies import MAX_BYTES, Vocabularies
from outrider.rpc.codec import DRAFT_INFO, DRAFT_STREAM, RELOADED
from outrider.rpc.errors import FailedPrecondition, PermissionDenied, Unavailable
from outrider.rpc.learning.servicer import LearningServicer
from outrider.rpc.messages import (
    Commit,
    Credit,
    DraftCommand,
    DraftInfo,
    LearnedDraft,
    ModelInfo,
    Open,
    validate_commit,
    validate_credit,
    validate_open,
)
from outrider.rpc.servicer import EngineServicer, EngineThread
from outrider.rpc.stream import Outboxes
from outrider.rpc.words.checks import ALL_LOGPROBS
from outrider.v1 import draft_pb2, draft_pb2_grpc

if TYPE_CHECKING:
    from outrider.draft_service.admission import ModelMethod
    from outrider.draft_service.reload import Reloads

# Ids and lengths are the target's: what the draft itself cannot hold is no client error, and the engine's to judge.
_ANY_ID, _ANY_LENGTH = 2**32 - 1, 2**31 - 1


class DraftServicer(EngineServicer, draft_pb2_grpc.DraftServiceServicer):
    """A DraftEngine's streams, and what it says of itself."""

    role, kind, service = "draft", DRAFT_STREAM, "outrider.v1.DraftService"

    def __init__(
        self,
        thread: EngineThread,
        outboxes: Outboxes,
        info: DraftInfo,
        reloads: Reloads | None = None,
        vocabularies: Vocabularies | None = None,
    ) -> None:
        """Without `reloads` a model stays as long as its service; without `vocabularies` it takes none."""
        super().__init__(thread, outboxes)
        self._info, self._reloads, self._vocabularies = info, reloads, vocabularies
        self.learning = LearningServicer(self.role, lambda: self._draining)

    async def Propose(self, request_iterator: Any, context: Any) -> None:
        """Serves one gateway's stream until it ends."""
        await self.serve(context)

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        """Describes the model and the methods."""
        info = replace(self._info, info_version=self.info_version)
        if self._vocabularies is not None:
            rows = self._vocabularies.rows
            model = replace(info.model, mapped_fingerprints=tuple(row.tokenizer_fingerprint for row in rows))
            info = replace(info, model=model, vocabularies=rows, max_vocabulary_bytes=MAX_BYTES)
        return DRAFT_INFO.encode(info)

    async def PutVocabulary(self, request_iterator: Any, context: Any) -> draft_pb2.PutVocabularyResponse:
        """Takes the vocabulary of a target."""
        if self._vocabularies is None:
            raise FailedPrecondition("the draft has no tokenizer of its own to join it with", reason="NO_TOKENIZER")
        await self._vocabularies.take(request_iterator)
        return draft_pb2.PutVocabularyResponse()

    async def ReloadModel(self, request: Any, context: Any) -> draft_pb2.ReloadModelResponse:
        """Puts another model in the place of the present one."""
        if self._reloads is None:
            raise PermissionDenied("the draft was not started with --allow-reload")
        if self._draining:
            raise Unavailable("the service is draining", reason="DRAINING")
        return RELOADED.encode(await self._reloads.reload(request.model))

    @property
    def model(self) -> ModelInfo:
        """That drafts now."""
        return self._info.model

    def tell_learned(self, rows: tuple[LearnedDraft, ...]) -> None:
        """What was learned and is in use."""
        self._info = replace(self._info, learned=rows)

    def tell_method(self, method: ModelMethod) -> None:
        """What a token takes that the next model drafts."""
        rows = [
            replace(row, step_costs=method.step_costs) if row.name == method.name else row for row in self._info.methods
        ]
        self._info = replace(self._info, methods=tuple(rows))

    def tell_model(self, model: ModelInfo) -> None:
        """Another model drafts: who asks is told so, and who has a stream that it is to ask again."""
        self._info = replace(self._info, model=model, learned=())
        self.info_version += 1

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
        self.learning.register(server)
