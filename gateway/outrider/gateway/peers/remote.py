"""Targets and drafts over gRPC: several addresses behind one Verifier or Drafter. A sequence goes where its prompt's
first tokens send it, unless that replica is busier than the others; one that fails again and again rests."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio
from grpc import StatusCode

from outrider.gateway.peers.addresses import Lookup, look_up
from outrider.gateway.peers.replicas import (
    HANDSHAKE_S,
    Replica,
    ReplicaLink,
    ReplicaPool,
    ReplicaService,
    allowed_by_breaker,
)
from outrider.gateway.peers.routing import choose_adapters, choose_capabilities, choose_model
from outrider.gateway.peers.vocabulary_offer import PUT_S, Offer, introduced
from outrider.gateway.speculation.backends import DrafterLink, Lost, VerifierLink
from outrider.rpc.codec import (
    ADAPTER,
    DRAFT_INFO,
    LEARNING_NEWS,
    PUT_LEARNED,
    RELAYED_DRAFT_STREAM,
    RELOADED,
    RELOADED_WEIGHTS,
    TARGET_INFO,
    TARGET_STREAM,
)
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import (
    Adapter,
    Arithmetic,
    Commit,
    DraftEvent,
    DraftInfo,
    DraftTokens,
    LearningNews,
    Open,
    PutLearned,
    Reloaded,
    TargetEvent,
    TargetInfo,
)
from outrider.rpc.security import ClientTls
from outrider.rpc.servicer import MODEL_KEY
from outrider.rpc.status import from_rpc_error
from outrider.rpc.stream import StreamConfig
from outrider.rpc.words.sampling_params import FRESH_SEED
from outrider.v1 import draft_pb2, draft_pb2_grpc, learning_pb2, learning_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

# A failure with another code (a sequence longer than the draft's context) says nothing of the next sequence. One that
# is full is no faulty one; a draft that has no room, and does not say when it will, is.
TARGET_FAULTS = frozenset(code.value[0] for code in (StatusCode.UNAVAILABLE, StatusCode.INTERNAL))
DRAFT_FAULTS = TARGET_FAULTS | {StatusCode.RESOURCE_EXHAUSTED.value[0]}


async def _target_info(channel: grpc.aio.Channel) -> TargetInfo:
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    return TARGET_INFO.decode(await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))


async def _draft_info(channel: grpc.aio.Channel) -> DraftInfo:
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    return DRAFT_INFO.decode(await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()))


async def reload_model(channel: grpc.aio.Channel, model: str = "", timeout_s: float | None = None) -> Reloaded:
    """Has a draft put a model of its machine (empty: its present folder, read again) in its model's place. Raises
    OutriderError."""
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    asked = draft_pb2.ReloadModelRequest(model=model)
    return RELOADED.decode(await _answer(stub.ReloadModel(asked, timeout=timeout_s)))


async def lessons_of(channel: grpc.aio.Channel) -> AsyncIterator[LearningNews]:
    """What a draft, or a target with a head, hands to who learns, as it comes; first what learns, and what is in use,
    once the stream stands. Raises OutriderError."""
    stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
    try:
        async for message in stub.Learn(learning_pb2.LearnRequest()):
            yield LEARNING_NEWS.decode(message)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def put_learned(
    channel: grpc.aio.Channel, target_digest: str, group: str, path: str, left_out: Sequence[str] = ()
) -> PutLearned:
    """Has the sequences of one target and group be drafted for by a folder's adapter (empty: by what drafts without
    any), but for callers who are `left_out`. Raises OutriderError."""
    stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
    asked = learning_pb2.PutLearnedRequest(target_digest=target_digest, group=group, path=path, left_out=left_out)
    return PUT_LEARNED.decode(await _answer(stub.PutLearned(asked)))


async def reload_weights(
    channel: grpc.aio.Channel, model: str = "", drain_s: int = 0, timeout_s: float | None = None, restart: bool = False
) -> Reloaded:
    """Has a target put a model of its machine (empty: its present folder, read again) in its model's place; what is
    open after `drain_s` ends, to `restart` or not. Raises OutriderError."""
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    asked = target_pb2.ReloadWeightsRequest(model=model, drain_s=drain_s, restart=restart)
    return RELOADED_WEIGHTS.decode(await _answer(stub.ReloadWeights(asked, timeout=timeout_s)))


async def load_adapter(channel: grpc.aio.Channel, name: str, path: str) -> Adapter:
    """Has a target serve an adapter, too, from a folder of its machine. Raises OutriderError."""
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    answer = await _answer(stub.LoadAdapter(target_pb2.LoadAdapterRequest(name=name, path=path)))
    return ADAPTER.decode(answer.adapter)


async def unload_adapter(channel: grpc.aio.Channel, name: str) -> int:
    """Has a target serve it to nobody new; returns how many sequences go on with it. Raises OutriderError."""
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    answer = await _answer(stub.UnloadAdapter(target_pb2.UnloadAdapterRequest(name=name)))
    return int(answer.num_sequences)


async def _answer(call: Awaitable[Any]) -> Any:
    """Raises OutriderError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _propose(model: str, channel: grpc.aio.Channel) -> Any:
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    return stub.Propose(metadata=((MODEL_KEY, model.encode()),))


TARGET_SERVICE = ReplicaService(
    "target",
    TARGET_STREAM,
    _target_info,
    lambda channel: target_pb2_grpc.TargetServiceStub(channel).Verify(),
    progress=Commit,
    faults=TARGET_FAULTS,
)
DRAFT_SERVICE = ReplicaService(
    "draft",
    RELAYED_DRAFT_STREAM,
    _draft_info,
    lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Propose(),
    progress=DraftTokens,
    faults=DRAFT_FAULTS,
)


class RemoteTargets(ReplicaPool[TargetInfo]):
    """A Verifier over one or more target services. They may serve several models, as during a rolling change: new
    sequences go to the one that `choose_model` says, those under way to their own. `check` refuses what cannot be
    served; `on_model` is called when another model is served than before."""

    def __init__(
        self,
        addresses: Sequence[str],
        check: Callable[[TargetInfo], None] = lambda info: None,
        stream_config: StreamConfig | None = None,
        lookup: Lookup = look_up,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(addresses, TARGET_SERVICE, check, stream_config, lookup, tls)
        self.on_model: Callable[[], None] = lambda: None
        self._info: TargetInfo | None = None  # of one target
        self._told: TargetInfo | None = None  # the same with what others of its model have beside it

    @property
    def info(self) -> TargetInfo:
        """What a target of the present model says of itself, with the heads and adapters that any of them has, and what
        it can do with the others. Unavailable before one is chosen."""
        if self._told is None:
            raise Unavailable("no target has answered yet", reason="NO_TARGET", retry_after_ms=1000)
        return self._told

    @property
    def usable(self) -> bool:
        """Whether any target of the present model takes new sequences."""
        return any(model == self._digest for model, usable in self._answers() if usable)

    @property
    def max_open_tokens(self) -> int:
        """Tokens of prompts and max_tokens that the targets of the present model let in; 0: one does not say."""
        present = [replica.info.model for replica in self.replicas if replica.usable and replica.info is not None]
        rooms = [model.max_open_tokens for model in present if model.digest == self._digest]
        return sum(rooms) if all(rooms) else 0

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> VerifierLink | None:
        """Starts a sequence: a fork beside its parent, any other where its prompt sends it among the targets of its
        model and adapter, and of those among the ones that compute `like` the target before, if there are any, and that
        have the head that is asked for. Targets that fail again and again come last."""
        asked = [replica for replica in self.replicas if any(replica.opened(link) for link in refused_by)]
        able = [replica for replica in self._able(request) if replica not in asked]
        infos = {replica: replica.info for replica in able if replica.info is not None}
        digest = request.model_digest or (None if self._told is None else self._told.digest_of(request.adapter))
        if digest is None:  # the adapter is nowhere
            return None
        fitting = [replica for replica, info in infos.items() if info.digest_of(request.adapter) == digest]
        if isinstance(fork_of, ReplicaLink):
            for replica in fitting:
                if replica.holds(fork_of):
                    return replica.open(request, on_event, fork_of)
        sound = allowed_by_breaker(fitting) or fitting
        equal = [replica for replica in sound if infos[replica].model.arithmetic == like]
        heads = [replica for replica in equal or sound if _offers(replica.info, request.named_methods)]
        chosen = self._place(request, heads or equal or sound)
        return None if chosen is None else chosen.open(request, on_event)

    @property
    def _digest(self) -> str | None:
        return None if self._info is None else self._info.model.digest

    def _answers(self) -> list[tuple[str, bool]]:
        """The model of every target that answers, and whether it takes new sequences."""
        present = [(replica.info, replica.usable) for replica in self.replicas if replica.present]
        return [(info.model.digest, usable) for info, usable in present if info is not None]

    def _changed(self) -> None:
        self._choose_model()
        super()._changed()

    def _choose_model(self) -> None:
        answers = self._answers()
        if self._info is None and not self._is_decided([model for model, _ in answers]):
            return
        digest = choose_model(self._digest, answers)
        usable = [replica.info for replica in self.replicas if replica.usable and replica.info is not None]
        fitting = [info for info in usable if info.model.digest == digest]
        if not fitting:
            return
        before = self._digest
        if self._info not in fitting:
            self._info = fitting[0]
        methods = tuple(dict.fromkeys(method for info in fitting for method in info.methods))
        lost = [replica for replica in self.replicas if not (replica.usable or replica.retired or replica.refusal)]
        away = [info.adapters for info in (replica.info for replica in lost) if info and info.model.digest == digest]
        adapters = choose_adapters([info.adapters for info in fitting], away)
        capabilities = choose_capabilities([info.capabilities for info in fitting])
        self._told = replace(self._info, methods=methods, adapters=adapters, capabilities=capabilities)
        if digest != before:
            log.info("targets: new requests go to %s (%s)", self._info.model.name, self._info.model.digest[:12])
            self.on_model()

    def _is_decided(self, models: Sequence[str]) -> bool:
        """Whether no target that has not been tried yet can change the first choice."""
        if not self._looked_up.is_set():
            return False
        most = max(Counter(models).values(), default=0)
        return 2 * most > len(self.replicas) or all(replica.attempted.is_set() for replica in self.replicas)


class RemoteDrafts(ReplicaPool[DraftInfo]):
    """A Drafter over one or more draft services. `check` refuses those that do not fit the target, once they have been
    given what `offer` has for them."""

    def __init__(
        self,
        addresses: Sequence[str],
        check: Callable[[DraftInfo], None] = lambda info: None,
        stream_config: StreamConfig | None = None,
        lookup: Lookup = look_up,
        offer: Offer | None = None,
        tls: ClientTls | None = None,
        model: str = "",
    ) -> None:
        """They draft for the `model` of that name, among others perhaps."""
        service = replace(DRAFT_SERVICE, start_call=partial(_propose, model)) if model else DRAFT_SERVICE
        if offer is not None:
            service = replace(service, get_info=partial(introduced, _draft_info, offer), info_s=HANDSHAKE_S + PUT_S)
        super().__init__(addresses, service, check, stream_config, lookup, tls)

    @property
    def info(self) -> DraftInfo | None:
        """What a draft that can be used said of itself; None while there is none."""
        return next((replica.info for replica in self.replicas if replica.usable), None)

    @property
    def round_trip_us(self) -> float:
        """The longest round trip to a draft that can be used."""
        return max((replica.round_trip_us for replica in self.replicas if replica.usable), default=0.0)

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Starts a sequence at a draft that has its methods, does not rest, and had room of late if any had."""
        able = [replica for replica in self._able(request) if _offers(replica.info, request.named_methods)]
        able, now = allowed_by_breaker(able), time.monotonic()
        chosen = self._place(request, [replica for replica in able if replica.full_until <= now] or able)
        return None if chosen is None else chosen.open(request, on_event)

    def _able(self, request: Open) -> list[Replica[DraftInfo]]:
        """A grammar is the target's to keep: a draft that does not know it is refused more, and no law changes. One
        that learns, and is older than `fresh_seed`, would recall what must not be."""
        able = super()._able(replace(request, sampling=replace(request.sampling, structured_output=None)))
        return able if request.may_recall else [replica for replica in able if not _recalls_all(replica.info)]


def _recalls_all(info: DraftInfo | None) -> bool:
    """Whether a draft learns, and knows of no sequence for which it must not recall that."""
    return info is not None and FRESH_SEED not in info.capabilities and any(one.learns for one in info.methods)


def _offers(info: DraftInfo | TargetInfo | None, methods: Sequence[str]) -> bool:
    """Whether a draft or a target has these methods; every one has its default."""
    known = () if info is None else [method.name for method in info.methods]
    return all(method in known for method in methods)
