"""Targets and drafts over gRPC: several addresses behind one Verifier or Drafter. A sequence goes where its prompt's
first tokens send it, unless that replica is busier than the others; a draft that fails again and again rests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc.aio
from grpc import StatusCode

from outrider.gateway.backends import DrafterLink, Lost, VerifierLink
from outrider.gateway.breaker import Breaker
from outrider.gateway.peer import Peer, PeerLink, PeerService
from outrider.gateway.placement import affinity_key, choose
from outrider.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from outrider.wire.capabilities import lacking
from outrider.wire.codec_frames import DRAFT_STREAM, TARGET_STREAM
from outrider.wire.codec_info import decode_draft_info, decode_target_info
from outrider.wire.errors import FailedPrecondition, Unavailable
from outrider.wire.messages import Arithmetic, DraftEvent, DraftInfo, Failure, Open, Piece, TargetEvent, TargetInfo
from outrider.wire.stream import StreamConfig

Info = TypeVar("Info")

# A failure with another code (a sequence longer than the draft's context) says nothing of the next sequence.
FAULTS = {code.value[0] for code in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED, StatusCode.INTERNAL)}


async def _target_info(channel: grpc.aio.Channel) -> TargetInfo:
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    return decode_target_info(await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest()))


async def _draft_info(channel: grpc.aio.Channel) -> DraftInfo:
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    return decode_draft_info(await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()))


def _verify(channel: grpc.aio.Channel) -> Any:
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    return stub.Verify()


def _propose(channel: grpc.aio.Channel) -> Any:
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    return stub.Propose()


TARGET_SERVICE = PeerService(
    "target", TARGET_STREAM, _target_info, _verify, lambda info: info.model, lambda info: info.capabilities
)
DRAFT_SERVICE = PeerService(
    "draft", DRAFT_STREAM, _draft_info, _propose, lambda info: info.model, lambda info: info.capabilities
)


class RemotePeers(Generic[Info]):
    """Peers of one kind. `async with` keeps their connections up in the background."""

    def __init__(
        self,
        addresses: Sequence[str],
        service: PeerService[Info],
        admit: Callable[[str, Info], None],
        stream_config: StreamConfig | None = None,
    ) -> None:
        self.peers = [Peer(address, service, admit, self._changed, stream_config) for address in addresses]
        self._service = service
        self._tasks: list[asyncio.Task[None]] = []
        self._change = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(peer.run()) for peer in self.peers]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def usable(self) -> bool:
        """Whether any peer takes new sequences."""
        return any(peer.usable for peer in self.peers)

    async def wait_usable(self) -> None:
        """Waits until a peer takes new sequences."""
        while not self.usable:
            self._change.clear()
            await self._change.wait()

    async def wait_admitted(self) -> FailedPrecondition | None:
        """Waits until a peer takes new sequences, or one is refused; returns why."""
        while not self.usable and self.refusal is None:
            self._change.clear()
            await self._change.wait()
        return self.refusal

    async def wait_attempted(self) -> FailedPrecondition | None:
        """Waits for the end of every peer's first attempt; returns what speaks against one that answered."""
        await asyncio.gather(*(peer.attempted.wait() for peer in self.peers))
        return self.refusal

    @property
    def refusal(self) -> FailedPrecondition | None:
        """Why a peer that answered must not be used."""
        return next((peer.refusal for peer in self.peers if peer.refusal is not None), None)

    def _place(self, request: Open, peers: Iterable[Peer[Info]]) -> Peer[Info] | None:
        """One of the peers that can be used and do all that is asked, by the prompt and by how busy they are."""
        usable = {peer.address: peer for peer in peers if peer.usable and self._suits(peer, request)}
        if len(usable) == 1:
            return next(iter(usable.values()))
        name = choose(affinity_key(request.prompt_ids, request.salt), {name: usable[name].load for name in usable})
        return None if name is None else usable[name]

    def _suits(self, peer: Peer[Info], request: Open) -> bool:
        return peer.info is not None and not lacking(
            self._service.capabilities_of(peer.info), request.sampling, request.acceptance
        )

    def _changed(self) -> None:
        self._change.set()


class RemoteTargets(RemotePeers[TargetInfo]):
    """A Verifier over one or more target services, which must all serve the same model."""

    def __init__(
        self,
        addresses: Sequence[str],
        check: Callable[[TargetInfo], None] = lambda info: None,
        stream_config: StreamConfig | None = None,
    ) -> None:
        super().__init__(addresses, TARGET_SERVICE, self._admit, stream_config)
        self._check = check
        self._info: TargetInfo | None = None
        self._first_address = ""

    @property
    def info(self) -> TargetInfo:
        """What the first target said of itself. Unavailable before one answered."""
        if self._info is None:
            raise Unavailable("no target has answered yet", reason="NO_TARGET", retry_after_ms=1000)
        return self._info

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> VerifierLink | None:
        """Starts a sequence: a fork beside its parent, any other where its prompt sends it among the targets of its
        model, and of those among the ones that compute `like` the target before, if there are any."""
        asked = [peer for peer in self.peers if any(peer.opened(link) for link in refused_by)]
        able = [peer for peer in self.peers if peer.usable and peer not in asked]
        models = {peer: peer.info.model for peer in able if peer.info is not None}
        fitting = [peer for peer, model in models.items() if request.model_digest in ("", model.digest)]
        if isinstance(fork_of, PeerLink):
            for peer in fitting:
                if peer.holds(fork_of):
                    return peer.open(request, on_event, fork_of)
        equal = [peer for peer in fitting if models[peer].arithmetic == like]
        chosen = self._place(request, equal or fitting)
        return None if chosen is None else chosen.open(request, on_event)

    def _admit(self, address: str, info: TargetInfo) -> None:
        self._check(info)
        if self._info is None:
            self._info, self._first_address = info, address
        elif info.model.digest != self._info.model.digest:
            raise FailedPrecondition(
                f"target {address} serves {info.model.name} ({info.model.digest[:12]}), target {self._first_address} "
                f"{self._info.model.name} ({self._info.model.digest[:12]}): all targets must serve the same model",
                reason="DIFFERENT_TARGETS",
            )


class RemoteDrafts(RemotePeers[DraftInfo]):
    """A Drafter over one or more draft services. `check` refuses those that do not fit the target."""

    def __init__(
        self,
        addresses: Sequence[str],
        check: Callable[[DraftInfo], None] = lambda info: None,
        stream_config: StreamConfig | None = None,
    ) -> None:
        super().__init__(addresses, DRAFT_SERVICE, lambda address, info: check(info), stream_config)
        self._breakers = {address: Breaker() for address in addresses}

    @property
    def info(self) -> DraftInfo | None:
        """What a draft that can be used said of itself; None while there is none."""
        return next((peer.info for peer in self.peers if peer.usable), None)

    @property
    def round_trip_us(self) -> float:
        """The longest round trip to a draft that can be used."""
        return max((peer.round_trip_us for peer in self.peers if peer.usable), default=0.0)

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Starts a sequence at a draft that has not failed again and again lately."""
        now = time.monotonic()
        chosen = self._place(request, (peer for peer in self.peers if self._breakers[peer.address].allows(now)))
        if chosen is None:
            return None
        breaker = self._breakers[chosen.address]
        breaker.started(now)
        return chosen.open(request, _observed(on_event, breaker))


def _observed(on_event: Callable[[DraftEvent | Lost], None], breaker: Breaker) -> Callable[[DraftEvent | Lost], None]:
    """Tells the breaker how the sequence fares, until that is known."""

    def observe(event: DraftEvent | Lost) -> None:
        match event:
            case Piece():
                breaker.succeeded()
            case Lost():
                breaker.failed(time.monotonic())
            case Failure(code=code) if code in FAULTS:
                breaker.failed(time.monotonic())
        on_event(event)

    return observe
