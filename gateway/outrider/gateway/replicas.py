"""The replicas of one service: a peer for each address, which come and go as names are looked up again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

from outrider.gateway.addresses import RESOLVE_S, Addresses, Lookup, look_up
from outrider.gateway.peer import Peer, PeerService
from outrider.gateway.placement import affinity_key, choose
from outrider.wire.capabilities import lacking
from outrider.wire.errors import FailedPrecondition
from outrider.wire.messages import Open
from outrider.wire.stream import StreamConfig

log = logging.getLogger(__name__)

START_S = 2.0  # no longer does the start wait for a name's first answer

Info = TypeVar("Info")


class RemotePeers(Generic[Info]):
    """Peers of one kind. `async with` keeps their connections up in the background. InvalidArgument names what is no
    address."""

    def __init__(
        self,
        addresses: Sequence[str],
        service: PeerService[Info],
        admit: Callable[[Info], None],
        stream_config: StreamConfig | None = None,
        lookup: Lookup = look_up,
    ) -> None:
        self._addresses = Addresses(addresses, lookup)
        self._service, self._admitted, self._stream_config = service, admit, stream_config
        self.peers = [self._new_peer(address) for address in self._addresses.known]  # in the order of the addresses
        self._tasks: dict[Peer[Info], asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()  # of peers that leave, and the one that looks names up
        self._looked_up, self._change = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        self._run_peers()
        if self._addresses.complete:
            self._looked_up.set()
        else:
            self._others.add(asyncio.create_task(self._follow_names()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        """Waits until a peer takes new sequences, or every one has answered and is refused; returns why."""
        while not self.usable and self.refusal is None:
            self._change.clear()
            await self._change.wait()
        return self.refusal

    async def wait_attempted(self) -> FailedPrecondition | None:
        """Waits for the end of every peer's first attempt; returns what speaks against them if every one answered and
        is refused."""
        await self._looked_up.wait()
        await asyncio.gather(*(peer.attempted.wait() for peer in self.peers))
        return self.refusal

    @property
    def refusal(self) -> FailedPrecondition | None:
        """Why none of the peers may be used, once every one has said so much of itself; one that fits is enough."""
        refusals = [peer.refusal for peer in self.peers]
        return None if not refusals or None in refusals or not self._addresses.complete else refusals[0]

    def recheck(self) -> None:
        """Judges the peers again, by what is known now."""
        for peer in self.peers:
            peer.recheck()

    def _able(self, request: Open) -> list[Peer[Info]]:
        """Those that take new sequences and can do all that is asked."""
        return [peer for peer in self.peers if peer.usable and self._suits(peer, request)]

    def _suits(self, peer: Peer[Info], request: Open) -> bool:
        return peer.info is not None and not lacking(
            self._service.capabilities_of(peer.info), request.sampling, request.acceptance
        )

    @staticmethod
    def _place(request: Open, peers: Sequence[Peer[Info]]) -> Peer[Info] | None:
        """One of the peers, by the prompt and by how busy they are."""
        if len(peers) == 1:
            return peers[0]
        named = {peer.address: peer for peer in peers}
        name = choose(affinity_key(request.prompt_ids, request.salt), {peer.address: peer.load for peer in peers})
        return None if name is None else named[name]

    def _changed(self) -> None:
        self._change.set()

    def _new_peer(self, address: str) -> Peer[Info]:
        return Peer(address, self._service, self._admitted, self._changed, self._stream_config)

    async def _follow_names(self) -> None:
        """Each by itself: one with a slow answer holds up no other, and the start for a while only."""
        async with asyncio.TaskGroup() as group:
            for name in self._addresses.names:
                group.create_task(self._follow(name))
            await asyncio.sleep(START_S)
            self._looked_up.set()
            self._changed()

    async def _follow(self, name: str) -> None:
        while True:
            await self._addresses.refresh(name)
            if self._addresses.complete:
                self._looked_up.set()
            self._update()
            await asyncio.sleep(RESOLVE_S)

    def _update(self) -> None:
        """Has a peer for each address. One whose address is gone gets no new sequences, and leaves after its last."""
        before = {peer.address: peer for peer in self.peers}
        named = [before.get(address) or self._new_peer(address) for address in self._addresses.known]
        for peer in self.peers:
            peer.retired = peer not in named
        self.peers = [*named, *(peer for peer in self.peers if peer.retired and peer.num_sequences)]
        for peer in before.values():
            if peer not in self.peers:
                log.info("%s %s: its address is gone", self._service.name, peer.address)
                task = self._tasks.pop(peer)
                task.cancel()
                self._others.add(task)
                task.add_done_callback(self._others.discard)
        self._run_peers()
        self._changed()

    def _run_peers(self) -> None:
        for peer in self.peers:
            if peer not in self._tasks:
                self._tasks[peer] = asyncio.create_task(peer.run())


def rested(peers: Iterable[Peer[Info]]) -> list[Peer[Info]]:
    """Those that have not failed again and again lately."""
    now = time.monotonic()
    return [peer for peer in peers if peer.breaker.allows(now)]
