"""A target and a draft service on the loopback, put together as `outrider target` and `outrider draft` do, the
gateway's connections to them, and what is watched inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.toys import until

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_health, build_model_method
from outrider.draft_service.engine import Attach, Deliver, DraftEngine, Sink
from outrider.draft_service.engine import EngineCommand as DraftCommand
from outrider.draft_service.servicer import SERVICE, DraftServicer, register
from outrider.engine.kv_cache_manager import CachedSequence, SequenceCache
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import RunnerOptions
from outrider.engine.worker import DeviceThread
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.messages import Commit, DraftEvent, DraftInfo, DraftMethod, ModelInfo, Piece
from outrider.rpc.server import Server, build_server
from outrider.rpc.stream import Outboxes
from outrider.target_service.boot import TargetService, build
from outrider.target_service.scheduler import StepEntry
from outrider.target_service.settings import TargetSettings

NGRAM = (1, 3)  # shortest and longest n-gram that is looked up


@dataclass(slots=True)
class CacheWatch:
    """Counts what a cache does: prompts found on arrival, sequences that lost their blocks and were computed again."""

    cached_ids: int = 0
    preemptions: int = 0
    _seen: set[CachedSequence] = field(default_factory=set)
    _robbed: set[CachedSequence] = field(default_factory=set)

    def forget(self) -> None:
        """Counts anew."""
        self.cached_ids = self.preemptions = 0

    def watch(self, cache: SequenceCache) -> None:
        """Puts itself in front of the cache's two verbs that say it."""
        admit, release = cache.admit, cache.release

        def watched_admit(sequence: CachedSequence, use_prefix: bool = True) -> int:
            found = admit(sequence, use_prefix)
            if sequence not in self._seen:
                self._seen.add(sequence)
                self.cached_ids += found
            if sequence in self._robbed:
                self._robbed.remove(sequence)
                self.preemptions += 1
            return found

        def watched_release(sequence: CachedSequence) -> None:
            if sequence.block_table:
                self._robbed.add(sequence)
            release(sequence)

        cache.admit, cache.release = watched_admit, watched_release  # type: ignore[method-assign]


@dataclass(slots=True)
class StepWatch:
    """Counts what the target's steps hold."""

    most_open: int = 0  # sequences at once
    most_in_step: int = 0
    chunks: int = 0  # of prompts, not reaching their ends

    def watch(self, service: TargetService) -> None:
        """Puts itself in front of the scheduler."""
        scheduler = service.engine.scheduler
        plan = scheduler.plan

        def watched_plan(now: float) -> list[StepEntry]:
            self.most_open = max(self.most_open, len(scheduler.sequences))
            entries = plan(now)
            self.most_in_step = max(self.most_in_step, len(entries))
            self.chunks += sum(not entry.samples for entry in entries)
            return entries

        scheduler.plan = watched_plan  # type: ignore[method-assign]


@dataclass(slots=True)
class DraftWatch:
    """Counts what a draft does during verifications."""

    ahead: int = 0  # times that a chain held more than a window
    branches: int = 0  # times that a sequence had any
    taken: int = 0  # branches that a commit agreed with when the chain did not
    _sent: set[tuple[int, int, int]] = field(default_factory=set)  # streams, sequences and numbers of branches

    def forget(self) -> None:
        """Counts anew."""
        self.ahead = self.branches = self.taken = 0

    def watch(self, engine: DraftEngine) -> None:
        """Puts itself in front of the engine and of every stream's sink."""
        handle, step = engine.handle, engine.step

        def watched(command: DraftCommand) -> None:
            if isinstance(command, Attach):
                command = replace(command, sink=self._counting(command))
            handle(command)
            for message in command.messages if isinstance(command, Deliver) else ():
                key = (command.stream, message.sequence_id)
                if isinstance(message, Commit) and key in engine.sequences:
                    taken = (*key, engine.sequences[key].chain)
                    self.taken += taken in self._sent
                    self._sent.discard(taken)

        def watched_step(now: float) -> float | None:
            wait = step(now)
            for draft in engine.sequences.values():
                self.ahead += len(draft.sequence) - draft.committed > draft.piece_len
                self.branches += len(draft.branches) > 0
            return wait

        engine.handle, engine.step = watched, watched_step  # type: ignore[method-assign]

    def _counting(self, command: Attach) -> Sink:
        def sink(events: Many[DraftEvent]) -> None:
            for event in events:
                if isinstance(event, Piece) and event.parent is not None:
                    self._sent.add((command.stream, event.sequence_id, event.chain))
            command.sink(events)

        return sink


@dataclass(slots=True)
class Draft:
    """A draft service that can be ended at once."""

    server: Server
    engine: DraftEngine
    thread: DeviceThread[DraftCommand]
    cache: SequenceCache
    watch: CacheWatch
    pieces: DraftWatch
    killed: bool = False

    async def kill(self) -> None:
        """No grace: running calls are broken off."""
        self.killed = True
        await self.server.stop()
        await until(lambda: not self.engine.sequences)  # the end of a stream releases what it opened
        await asyncio.to_thread(self.thread.stop)


def build_draft(loaded: LoadedModel, num_blocks: int) -> Draft:
    """With both methods."""
    method = build_model_method(loaded, RunnerOptions(num_blocks=num_blocks))
    engine, pieces = DraftEngine(make_methods([method, NgramProposer(*NGRAM)])), DraftWatch()
    pieces.watch(engine)
    thread: DeviceThread[DraftCommand] = DeviceThread(engine, "draft-device", 1)
    model = ModelInfo("draft", loaded.digest, loaded.vocab_size, loaded.max_model_len)
    info = DraftInfo(model, (DraftMethod("draft_model"), DraftMethod("ngram")))
    servicer = DraftServicer(thread, Outboxes(asyncio.get_running_loop()), info)
    health = build_health(engine, thread)
    server = build_server("127.0.0.1:0", [SERVICE], lambda s: register(servicer, s), health=health)
    watch = CacheWatch()
    watch.watch(method.cache)
    return Draft(server, engine, thread, method.cache, watch, pieces)


@dataclass(slots=True)
class Services:
    """One target, one draft, and the gateway's ends."""

    target: TargetService
    draft: Draft
    targets: RemoteTargets
    drafts: RemoteDrafts
    cache: CacheWatch = field(default_factory=CacheWatch)
    steps: StepWatch = field(default_factory=StepWatch)

    def forget(self) -> None:
        """Counts anew; while nothing is open."""
        self.cache.forget()
        self.draft.watch.forget()
        self.draft.pieces.forget()
        self.steps.most_open = self.steps.most_in_step = self.steps.chunks = 0

    async def check_blocks(self) -> None:
        """Nothing is open any more, and no block is lost, held twice or still held, on either side."""
        await until(lambda: not self.target.engine.scheduler.sequences)
        await until(lambda: not self.draft.engine.sequences)
        for pool in (self.target.engine.cache.pool, self.draft.cache.pool):
            pool.check_integrity()  # with no table left every block must be free
            assert pool.num_free == pool.num_blocks


@asynccontextmanager
async def serving(
    target: LoadedModel, draft: LoadedModel, *, num_blocks: int, draft_blocks: int, max_rows: int, cut_windows: bool
) -> AsyncIterator[Services]:
    """Fresh services: empty caches, connected."""
    settings = TargetSettings(
        model=Path("identity"),
        listen="127.0.0.1:0",
        num_blocks=num_blocks,
        threads=1,
        max_rows=max_rows,
        cut_windows=cut_windows,
        batch_invariant=target.model.batch_invariant,
    )
    one, other = build(settings, target), build_draft(draft, draft_blocks)
    await one.server.start()
    await other.server.start()
    try:
        async with RemoteTargets([one.server.address]) as targets, RemoteDrafts([other.server.address]) as drafts:
            await targets.wait_usable()
            await drafts.wait_usable()
            services = Services(one, other, targets, drafts)
            services.cache.watch(one.engine.cache)
            services.steps.watch(one)
            yield services
    finally:
        if not other.killed:
            await other.server.stop()
            await asyncio.to_thread(other.thread.stop)
        await one.stop()
