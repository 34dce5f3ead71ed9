"""The covering design of the identity proof: which circumstances occur together.

Every pair of levels of any two factors stands in at least one cell, so a defect that needs two circumstances at once
meets them. In the short form batch sizes are not crossed with k and pipelining: nine times all batches would be 1143
prompts.

A target and a draft service on the loopback, put together as `outrider target` and `outrider draft` do, the
gateway's connections to them, and what is watched inside.

Runs a cell of the design on fresh services: what came out, and what happened inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lossless.plain import VOCAB, Arithmetic, PlainOutputs, Prompt, Weights, draft_model, make_prompt, rounded_draft
from support.fakes import until

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.observer import DraftEngineCommand as DraftCommand
from outrider.draft_service.sequence import Sink
from outrider.draft_service.servicer import DraftServicer
from outrider.engine.kv_cache_manager import BLOCK_SIZE, CachedSequence, KVCacheManager
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import RunnerOptions
from outrider.engine.worker import DeviceWorker
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.prediction import PredictionProposer
from outrider.proposers.reencoding import JoinedVocabulary
from outrider.proposers.suffix.proposer import SuffixProposer
from outrider.rpc.engine_service import build_service
from outrider.rpc.messages import Commit, DraftEvent, DraftInfo, DraftMethod, DraftTokens, ModelInfo
from outrider.rpc.server import Server
from outrider.rpc.servicer import Deliver, Detach
from outrider.rpc.settings import ServerSettings
from outrider.rpc.stream import Outboxes
from outrider.rpc.words.sampling_params import TokenOrigin
from outrider.target_service import boot
from outrider.target_service.boot import TargetService, build
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence
from outrider.target_service.settings import TargetSettings

Level = tuple[str, Any]  # a factor and its value
Pair = frozenset[Level]

IN_TURN = "prediction,suffix,draft_model"
LEVELS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "k": (0, 1, 2, 3, 4, 5, 6, 7, 8),
    "weights": ("float32", "int8", "int4"),
    "own": (False, True),
    "ahead": ("sequential", "chains", "branches"),
    "chunked": (False, True),
    "warm": (False, True),
    "preempted": (False, True),
    "killed": (False, True),
    "coupled": (False, True),
    "method": ("draft_model", "ngram", "prediction", "suffix", IN_TURN),
    "cut": (False, True),
}
NOT_CROSSED = {frozenset({"batch", "k"}), frozenset({"batch", "ahead"})}  # in the short form


@dataclass(frozen=True, slots=True)
class Cell:
    """Circumstances in which `batch` prompts are decoded at once."""

    batch: int
    k: int  # most drafted tokens of a window; 0: plain decoding
    ahead: str  # what is drafted during a verification: nothing, more of the chain, or other chains as well
    chunked: bool  # a step has room for a part of a prompt only
    warm: bool  # the first blocks of every prompt are in the prefix cache
    preempted: bool  # too few cache blocks: sequences lose theirs and are computed again
    killed: bool  # the draft service ends in mid-stream
    coupled: bool  # sampled under coupling, else greedy
    # How is drafted: by a model, by the text so far, by a guess that has some tokens wrong, by the text so far and what
    # others were answered, by three of these in turn.
    method: str
    cut: bool  # the target verifies fewer drafted tokens where several sequences share a step and that pays
    weights: Weights = "float32"  # of the target
    own: bool = False  # the model that drafts is the target's own weights rounded to 4 bits

    @property
    def name(self) -> str:
        """For test ids."""
        words = [
            f"k{self.k}",
            f"b{self.batch}",
            self.ahead,
            "chunked" if self.chunked else "whole",
            "warm" if self.warm else "cold",
            "preempted" if self.preempted else "roomy",
            "killed" if self.killed else "alive",
            "coupled" if self.coupled else "greedy",
            self.method.replace(",", "+"),
            "cut" if self.cut else "uncut",
            self.weights,
            "own" if self.own else "other",
        ]
        return "-".join(words)


def cells(crossed: bool, levels: Mapping[str, Sequence[Any]] = LEVELS) -> list[Cell]:
    """The design; always the same one."""
    return [Cell(**row) for row in covering(levels, () if crossed else NOT_CROSSED)]


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    """All pairs of levels that a row, or a part of one, holds."""
    return map(frozenset, combinations(row.items(), 2))


def wanted_pairs(levels: Mapping[str, Sequence[Any]], apart: Collection[frozenset[str]] = ()) -> list[Pair]:
    """Every pair of levels of two factors, except of factors that are kept apart; in a fixed order."""
    return [
        frozenset({(one, a), (other, b)})
        for one, other in combinations(levels, 2)
        if frozenset({one, other}) not in apart
        for a in levels[one]
        for b in levels[other]
    ]


def covering(levels: Mapping[str, Sequence[Any]], apart: Collection[frozenset[str]] = ()) -> list[dict[str, Any]]:
    """Rows that hold every wanted pair. Greedy: a row starts from a pair still missing and takes, factor by factor, the
    level that adds the most missing pairs, of several the one that misses most. Where none adds any, that is the
    smallest batch, and else the level that is rarest in rows like this one, so that triples vary, too."""
    missing = dict.fromkeys(wanted_pairs(levels, apart))
    rows: list[dict[str, Any]] = []
    while missing:
        row = dict(next(iter(missing)))
        for factor in levels:
            if factor not in row:
                row[factor] = max(levels[factor], key=lambda level: _gain(missing, rows, row, (factor, level)))
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append({factor: row[factor] for factor in levels})
    return rows


def _gain(
    missing: Collection[Pair], rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], level: Level
) -> tuple[int, int]:
    added = sum(frozenset({level, fixed}) in missing for fixed in row.items())
    if added:
        return added, sum(level in pair for pair in missing)
    factor, value = level
    if factor == "batch":
        return 0, -value
    alike = (sum(other[name] == value for name, value in row.items()) for other in rows if other[factor] == value)
    return 0, -sum(4**count for count in alike)


MASK = VOCAB - 1  # of a draft in parallel: an id that is also the target's
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

    def watch(self, cache: KVCacheManager) -> None:
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

        def watched_plan(ready: Sequence[TargetSequence]) -> list[ScheduledSequence]:
            self.most_open = max(self.most_open, len(scheduler.sequences))
            entries = plan(ready)
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
            if isinstance(command, Detach):
                handle(command)
                return
            handle(replace(command, sink=self._counting(command)))
            for message in command.messages:
                key = (command.stream, message.sequence_id)
                if isinstance(message, Commit) and key in engine.sequences:
                    taken = (*key, engine.sequences[key].chain.number)
                    self.taken += taken in self._sent
                    self._sent.discard(taken)

        def watched_step(now: float) -> float | None:
            wait = step(now)
            for draft in engine.sequences.values():
                self.ahead += len(draft.text) - draft.committed > draft.limits.piece_len
                self.branches += len(draft.branches) > 0
            return wait

        engine.handle, engine.step = watched, watched_step  # type: ignore[method-assign]

    def _counting(self, command: Deliver[Any, DraftEvent]) -> Sink:
        def sink(event: DraftEvent) -> None:
            if isinstance(event, DraftTokens) and event.parent is not None:
                self._sent.add((command.stream, event.sequence_id, event.chain))
            command.sink(event)

        return sink


@dataclass(slots=True)
class Draft:
    """A draft service that can be ended at once."""

    server: Server
    engine: DraftEngine
    thread: DeviceWorker[DraftCommand]
    cache: KVCacheManager
    watch: CacheWatch
    pieces: DraftWatch
    killed: bool = False

    async def kill(self) -> None:
        """No grace: running calls are broken off."""
        self.killed = True
        await self.server.stop()
        await until(lambda: not self.engine.sequences)  # the end of a stream releases what it opened
        await asyncio.to_thread(self.thread.stop)


def build_draft(loaded: LoadedModel, num_blocks: int, vocabularies: Mapping[str, JoinedVocabulary]) -> Draft:
    """With all methods; a model with a mask token drafts in parallel."""
    by_model = "draft_model" if loaded.mask_token_id is None else "pard"
    method = build_model_method(loaded, RunnerOptions(num_blocks=num_blocks), by_model, dict(vocabularies))
    outboxes, pieces = Outboxes(asyncio.get_running_loop()), DraftWatch()
    suffix = SuffixProposer(suffix_decoding_max_spec_factor=9, suffix_decoding_min_token_prob=0)
    methods = make_methods([method, NgramProposer(*NGRAM), PredictionProposer(), suffix])
    engine = DraftEngine(methods, flush=outboxes.flush)
    pieces.watch(engine)
    thread: DeviceWorker[DraftCommand] = DeviceWorker(engine, "draft-device", 1)
    model = ModelInfo("draft", loaded.digest, loaded.vocab_size, loaded.max_model_len)
    info = DraftInfo(model, tuple(map(DraftMethod, methods)))
    servicer = DraftServicer(thread, outboxes, info)
    server = build_service(ServerSettings(listen="127.0.0.1:0"), engine, thread, servicer).server
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
            await until(lambda pool=pool: pool.num_free == pool.num_blocks)  # released last
            pool.check_integrity()  # with no table left


@asynccontextmanager
async def serving(
    target: LoadedModel,
    draft: LoadedModel,
    vocabularies: Mapping[str, JoinedVocabulary],
    *,
    num_blocks: int,
    draft_blocks: int,
    max_rows: int,
    cut_windows: bool,
    **options: Any,  # further settings of the target
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
        **options,
    )
    # A cell in which sequences are to lose their blocks has more of them open than a target of so few would let in.
    with patch.object(boot, "OVERCOMMIT", MOST_OVERCOMMIT):
        one = build(settings, target)
    other = build_draft(draft, draft_blocks, vocabularies)
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


MOST_OVERCOMMIT = 1 << 10  # tokens open by tokens that the cache holds
WARM_BLOCKS = 2  # of each prompt; what follows them is long enough to be cut in chunks
WHOLE_ROWS = 1 << 16  # a step's room: every prompt at once
AHEAD = {"sequential": (0, 0), "chains": (1, 0), "branches": (2, 6)}  # windows, branches; of branches, too
MAX_UNREAD = 40  # tokens that a sequence may be ahead of its reader
RIVAL_TOKENS = 40
RIVAL_NUMBERS = 50_000  # from here on
CELL_S = 240.0  # a cell that takes longer hangs


@dataclass(frozen=True, slots=True)
class Work:
    """A cell and its prompts. The last one may be the rival of a lone sequence that is to be preempted: a request of
    higher priority that leaves no block over."""

    cell: Cell
    prompts: tuple[Prompt, ...]


@dataclass(slots=True)
class Outcome:
    """Outputs in the order of the prompts, and what happened."""

    outputs: list[list[int]]
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    longest_window: int = 0
    drafts_lost: int = 0  # sequences that lost it in mid-stream
    num_after_draft: int = 0  # plain tokens of these after that
    draft_killed: bool = False
    cached_ids: int = 0
    preemptions: int = 0
    draft_preemptions: int = 0
    drafted_ahead: int = 0
    branches: int = 0
    branches_taken: int = 0
    chunks: int = 0
    most_open: int = 0
    most_in_step: int = 0


@dataclass(slots=True)
class _Run:
    """A cell under way."""

    work: Work
    services: Services
    outcome: Outcome
    vocabulary: str = ""  # of the target, where the draft has another one
    killing: asyncio.Task[None] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # there are tokens of some sequence

    async def decode_all(self) -> None:
        """All at once, but for a rival, which comes to a sequence that has begun; the draft's end comes in the
        middle."""
        await asyncio.gather(*(self.decode(index) for index in range(len(self.work.prompts))))

    async def decode(self, index: int) -> None:
        """One request through the gateway's loop."""
        cell, outcome = self.work.cell, self.outcome
        is_rival = index == cell.batch
        if is_rival:
            await self.begun.wait()
        request = self.work.prompts[index].open(cell.method, priority=-1 if is_rival else 0)
        request = replace(request, tokenizer_fingerprint=self.vocabulary)
        lost: list[str] = []
        drafts, targets = self.services.drafts, self.services.targets
        policy = policy_of(cell)
        async for item in speculate(drafts, targets, request, policy, on_draft_stop=lost.append):
            if isinstance(item, Round):
                outcome.outputs[index] += item.commit.ids
                self.count(item, bool(lost))
                await self.let_rival_in()
                await self.kill_when_due()
        outcome.drafts_lost += bool(lost)

    def count(self, closed: Round, draft_is_lost: bool) -> None:
        """Adds up a round."""
        commit, outcome = closed.commit, self.outcome
        outcome.num_tokens += len(commit.ids)
        outcome.num_drafted += commit.num_drafted
        outcome.num_accepted += commit.num_accepted
        outcome.longest_window = max(outcome.longest_window, commit.num_drafted)
        outcome.num_after_draft += draft_is_lost * commit.origins.count(TokenOrigin.PLAIN)

    async def let_rival_in(self) -> None:
        """Until the target has the rival, too, a lone sequence that it shall preempt is not read, and so not at its
        end."""
        self.begun.set()
        if len(self.work.prompts) > self.work.cell.batch:
            await until(lambda: self.services.steps.most_open > 1)

    async def kill_when_due(self) -> None:
        """Ends the draft once a third of the tokens is there and something was drafted; where no whole window was
        verified yet, two thirds. Meanwhile nobody reads, so no sequence gets to its end."""
        cell, num_wanted = self.work.cell, sum(prompt.sampling.max_tokens for prompt in self.work.prompts)
        thirds = 1 if self.outcome.longest_window == cell.k else 2
        due = 3 * self.outcome.num_tokens >= thirds * num_wanted and (self.outcome.num_drafted or cell.k == 0)
        if cell.killed and due and self.killing is None:
            self.killing = asyncio.create_task(self.services.draft.kill())
        if self.killing is not None:
            await self.killing


def with_guesses(work: Work, plain: PlainOutputs, arithmetic: Arithmetic) -> Work:
    """With what a draft by prediction needs: of each output a guess that replaces a token and lacks another now and
    then. Where others draft as well, it is of the first half."""
    if "prediction" not in work.cell.method:
        return work
    outputs = [plain.of(prompt, arithmetic, work.cell.weights) for prompt in work.prompts]
    guesses = [
        tuple((token + (place % 7 == 3)) % VOCAB for place, token in enumerate(ids) if place % 11 != 5)
        for ids in (output[: len(output) // (1 + (work.cell.method == IN_TURN))] for output in outputs)
    ]
    prompts = [replace(prompt, guess=guess) for prompt, guess in zip(work.prompts, guesses, strict=True)]
    return replace(work, prompts=tuple(prompts))


def policy_of(cell: Cell) -> Policy:
    """The gateway's for every sequence of a cell."""
    windows_ahead, max_branches = AHEAD[cell.ahead]
    return Policy(cell.k, windows_ahead=windows_ahead, max_branches=max_branches, max_unread=MAX_UNREAD)


def assign(design: Sequence[Cell], num_prompts: int, num_tokens: int, truncated: bool = True) -> list[Work]:
    """Deals `num_prompts` different prompts to the places in the cells, half of them greedy and half coupled where
    there are as many places; again from the first one when all are dealt. No prompt is twice in a cell."""
    num_coupled = sum(cell.batch for cell in design if cell.coupled)
    num_greedy = sum(cell.batch for cell in design) - num_coupled
    different = {False: min(num_greedy, max(num_prompts // 2, num_prompts - num_coupled))}
    different[True] = num_prompts - different[False]
    dealt = {False: 0, True: 0}
    works = []
    for cell in design:
        first = dealt[cell.coupled]
        dealt[cell.coupled] += cell.batch
        numbers = [number % different[cell.coupled] for number in range(first, first + cell.batch)]
        prompts = [make_prompt(number, cell.coupled, num_tokens, truncated) for number in numbers]
        if cell.preempted and cell.batch == 1:
            room = blocks_for(prompts[0]) - blocks_of(len(prompts[0].ids)) - 1
            length = room * BLOCK_SIZE - 4
            prompts.append(make_prompt(RIVAL_NUMBERS + first, cell.coupled, RIVAL_TOKENS, truncated, length))
        works.append(Work(cell, tuple(prompts)))
    return works


async def run(work: Work, target: LoadedModel, joined: JoinedVocabulary | None = None) -> Outcome:
    """Decodes the prompts at once, with a draft of another vocabulary where that is mapped. Blocks are checked when all
    is over."""
    cell = work.cell
    max_rows = 24 + 2 * cell.batch if cell.chunked else WHOLE_ROWS
    at_once = min(cell.batch, max_rows // (cell.k + 1))  # sequences that decode in a step with room for `max_rows`
    pools = {"num_blocks": num_blocks(work, at_once), "draft_blocks": num_blocks(work, cell.batch)}
    vocabulary = joined.mapping.target.fingerprint if joined is not None else ""
    vocabularies = {vocabulary: joined} if joined is not None else {}
    draft = rounded_draft(cell.weights) if cell.own else draft_model()
    if cell.method == "pard":
        draft = replace(draft, mask_token_id=MASK)
    async with (
        asyncio.timeout(CELL_S),
        serving(target, draft, vocabularies, max_rows=max_rows, cut_windows=cell.cut, **pools) as services,
    ):
        if work.cell.warm:
            await _warm(work, services, vocabulary)
        services.forget()
        outcome = Outcome([[] for _ in work.prompts])
        await _Run(work, services, outcome, vocabulary).decode_all()
        await services.check_blocks()
    steps, cache = services.steps, services.cache
    outcome.chunks, outcome.most_open, outcome.most_in_step = steps.chunks, steps.most_open, steps.most_in_step
    outcome.cached_ids, outcome.preemptions = cache.cached_ids, cache.preemptions
    outcome.draft_killed, outcome.draft_preemptions = services.draft.killed, services.draft.watch.preemptions
    pieces = services.draft.pieces
    outcome.drafted_ahead, outcome.branches, outcome.branches_taken = pieces.ahead, pieces.branches, pieces.taken
    return outcome


async def _warm(work: Work, services: Services, vocabulary: str) -> None:
    """Decodes two tokens after the first blocks of each prompt; the first prompt last, so that its blocks stay."""
    cell = replace(work.cell, killed=False)
    for prompt in reversed(work.prompts[: work.cell.batch]):
        length = WARM_BLOCKS * BLOCK_SIZE + 1
        start = replace(prompt, ids=prompt.ids[:length], sampling=replace(prompt.sampling, max_tokens=2))
        await _Run(Work(cell, (start,)), services, Outcome([[]]), vocabulary).decode_all()


def blocks_of(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


def blocks_for(prompt: Prompt) -> int:
    """Blocks that a prompt and its output take, and one more."""
    return blocks_of(len(prompt.ids) + prompt.sampling.max_tokens) + 1


def num_blocks(work: Work, at_once: int) -> int:
    """Of a service: enough for all; or, to force preemption, for the longest sequence alone, or for the prompts of as
    many as decode at once and little more."""
    if not work.cell.preempted:
        return 2 * sum(map(blocks_for, work.prompts))
    if work.cell.batch == 1:
        return blocks_for(work.prompts[0])
    of_prompts = sum(blocks_of(len(prompt.ids)) for prompt in work.prompts)
    return max(max(map(blocks_for, work.prompts)) + 1, round(1.1 * of_prompts * at_once / work.cell.batch))


def check_happened(work: Work, outcome: Outcome) -> None:
    """Every circumstance of the cell occurred, and none that is not the cell's: else the cell proves nothing. (Except
    that a machine which stalls for seconds may cost a sequence its draft in any cell.)"""
    cell = work.cell
    assert outcome.longest_window == cell.k or (cell.cut and cell.batch > 1 and outcome.longest_window < cell.k)
    assert (outcome.drafted_ahead > 0) == (cell.ahead != "sequential" and cell.k > 0)
    may_branch = cell.ahead == "branches" and cell.k > 0 and ("draft_model" in cell.method or cell.method == "pard")
    need_not = cell.preempted or cell.method == IN_TURN  # branches yield their blocks; and the model may have no turn
    assert (outcome.branches > 0) == may_branch or (may_branch and need_not)
    assert outcome.most_open == len(work.prompts)
    if cell.batch > 1:
        assert outcome.most_in_step > 1
    if not cell.chunked and not cell.preempted:
        assert 2 * outcome.most_in_step >= cell.batch
    assert (outcome.chunks > 0) == cell.chunked
    assert (outcome.cached_ids > 0) == cell.warm
    if cell.warm and not cell.preempted:
        assert outcome.cached_ids == cell.batch * WARM_BLOCKS * BLOCK_SIZE
    assert (outcome.preemptions > 0) == cell.preempted
    assert outcome.draft_killed == cell.killed
    if cell.killed and cell.k:
        assert outcome.drafts_lost > 0 and outcome.num_after_draft > 0
