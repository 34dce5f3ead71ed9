"""The draft's engine, run by the device thread: commands of many streams in, one batched step at a time, pieces out to
the sinks. What the commands before a step and the step itself said leaves when it is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from outrider.draft_service.admission import Methods, ModelMethod, build_sequence, check_ids, readmit
from outrider.draft_service.observer import DraftEngineCommand, DraftObserver
from outrider.draft_service.scheduler import LONG_PREFILL, BranchPlanner, BranchStep, DraftingScheduler
from outrider.draft_service.sequence import DraftSequence, SequenceKey, Sink
from outrider.draft_service.shares import ModelShares
from outrider.engine.batch import PreparedAdapter
from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.engine.model_runner import probe
from outrider.engine.token_tree import TokenTree
from outrider.engine.worker import require_device
from outrider.planner.estimates import OpenWork
from outrider.planner.method_choice import MethodRates
from outrider.proposers.base import LearningProposer, teach
from outrider.proposers.draft_rows import DraftedToken, DraftRows
from outrider.proposers.tree import GrowingTree
from outrider.rpc.errors import DeadlineExceeded, OutriderError, unexpected
from outrider.rpc.learning.lessons import Lessons
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftCommand,
    LearningKey,
    Open,
    to_failure,
)
from outrider.rpc.servicer import Detach
from outrider.rpc.telemetry import BATCH_ROWS, BATCH_SEQUENCES, SPAN_DRAFT_BATCH, StepTracer

logger = logging.getLogger(__name__)

MAX_BRANCH_STEPS = 64  # branches in one pass, over all sequences
STALLED_S = 0.01  # pause when nothing could run though something wants to


class DraftEngine:
    """Run by a DeviceWorker: every method runs on its thread. `flush` is called once after each step; an
    `observer` is told of commands, passes and pieces."""

    def __init__(
        self,
        methods: Methods,
        max_sequences: int = 256,
        max_rows: int = 512,
        *,
        max_open_tokens: int = 0,
        flush: Callable[[], None] = lambda: None,
        tracer: StepTracer | None = None,
        observer: DraftObserver | None = None,
        default_methods: Sequence[str] = (),
        learn_from: Collection[str] = (),
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`default_methods` draft in turn for a sequence that names none; else the first method alone. With a model at
        most `max_open_tokens` are open, of prompts and max_tokens; 0: any number. `learn_from` are the salts whose
        sequences leave lessons. Models that share the room do so by their `weights`."""
        self._methods, self._default_methods = methods, tuple(default_methods)
        self._rates = MethodRates()
        self.lessons, self._learn_from = Lessons(), learn_from
        self._learners = [method for method in methods.values() if isinstance(method, LearningProposer)]
        # Token-only methods hold no blocks.
        self.scheduler = DraftingScheduler(KVCacheManager(BlockPool(0), prefix_cache=False), max_rows)
        self._model: ModelMethod | None = None
        self._branch_planner: BranchPlanner | None = None
        for method in methods.values():
            if isinstance(method, ModelMethod):
                self._draft_with(method)
        self._work = OpenWork(max_sequences, max_open_tokens)
        self._shares, self.num_displaced = ModelShares(max_sequences, max_open_tokens, weights), 0
        self._tracer, self._observer = tracer, observer or DraftObserver()
        self._flush = flush
        self._sequences: dict[SequenceKey, DraftSequence] = {}
        self._in_step: list[DraftSequence] = []
        self._suspects: list[DraftSequence] = []  # were in a step that failed: each runs alone next
        self._arrivals = 0

    @property
    def cache(self) -> KVCacheManager:
        """The model's cache manager."""
        return self.scheduler.cache

    @property
    def model(self) -> ModelMethod:
        """What drafts. ValueError where only methods without a model do."""
        if self._model is None:
            raise ValueError("model: there is none here; allowed: a draft that was started with --model")
        return self._model

    @property
    def sequences_by_model(self) -> dict[str, float]:
        """How many are open, by what their gateways call the model that they serve."""
        return self._shares.counts

    @property
    def sequences(self) -> dict[SequenceKey, DraftSequence]:
        """The open sequences."""
        return self._sequences

    def handle(self, command: DraftEngineCommand) -> None:
        """Applies a command; what it answers leaves with the next step."""
        if isinstance(command, Detach):
            for key in [key for key in self._sequences if key[0] == command.stream]:
                self._release(key)
            return
        for message in command.messages:
            self._apply((command.stream, message.sequence_id), message, command.sink, command.model)
        self._observer.on_command(command, self._sequences)

    def step(self, now: float) -> float | None:
        """Drafts a token for every sequence with the model (a few where passes follow one another on a device, or one
        gives several), and all that is wanted where no model is."""
        self._expire(now)
        self._choose_methods()
        drafts = [self._suspects.pop(0)] if self._suspects else list(self._sequences.values())
        steps = self.scheduler.plan(drafts) if self._model else []
        branch_steps = self._branch_planner.plan(drafts, MAX_BRANCH_STEPS) if self._branch_planner else []
        if self._model and (steps or branch_steps):
            self._draft(self._model, steps, branch_steps)
        self._send_pieces()
        self._observer.on_step(self._sequences.values())
        if steps or branch_steps or self._suspects or any(draft.is_choosing for draft in self._sequences.values()):
            return 0.0
        if self._model and self._prepare(self._model):
            return 0.0
        if any(draft.wants_tokens for draft in self._sequences.values()):
            return STALLED_S
        deadlines = [draft.deadline for draft in self._sequences.values() if draft.deadline is not None]
        return max(min(deadlines) - now, 0.001) if deadlines else None

    def on_error(self, error: Exception) -> None:
        """A step failed: its sequences are rolled back and run again, each alone, and the one that fails so ends. A bug
        before it was planned would meet the next one again: then all fail. Raises DeviceLost if the device is
        unusable."""
        if self._model is not None:
            require_device(self._model.proposer.runner.model.device)
        in_step, self._in_step = self._in_step, []
        for draft in in_step:
            for chain in (draft.chain, *draft.branches):
                chain.roll_back(self.cache)
        if len(in_step) > 1:
            self._suspects = in_step
            return
        for draft in in_step or list(self._sequences.values()):
            self._fail(draft, unexpected(error, f"a draft step failed: {type(error).__name__}"))
        self._send_pieces()

    def held(self) -> dict[str, float]:
        """What is kept of finished sequences, by methods and for who learns of them."""
        found: dict[str, float] = {
            f"{method.name}_{kind}": count for method in self._learners for kind, count in method.held().items()
        }
        if self._learn_from and self._model is not None:
            found |= {"lesson_bytes": self.lessons.num_bytes, "adapters": len(self._model.learned)}
        return found

    def close(self) -> None:
        """Ends the methods that have learned, and what compiles grammars, after the last step."""
        if self._model is not None and self._model.grammars is not None:
            self._model.grammars.close()
        for learner in self._learners:
            learner.close()

    def replace_model(self, method: ModelMethod) -> int:
        """Between two steps, drafts with another model of the same tokenizer. What is open gives up its blocks and goes
        on; returns how many sequences do. Raises what a first pass of it raises, before anything has changed."""
        probe(method.proposer.runner, method.cache.pool)
        grammars = self.model.grammars if method.vocab_size == self.model.vocab_size else None
        method = replace(method, vocabularies=self.model.vocabularies, tree=self.model.tree, grammars=grammars)
        drafts = [draft for draft in self._sequences.values() if draft.model is not None]
        for draft in drafts:
            self.scheduler.release(draft)
        self._methods = {**self._methods, method.name: method}
        self._rates.forget(method.name)
        self._draft_with(method)
        return self._go_on(drafts, method)

    def put_learned(self, key: LearningKey, adapter: PreparedAdapter | None, left_out: Collection[str] = ()) -> int:
        """Between two steps, drafts for a key's sequences with what was learned, but for callers who are `left_out`;
        None: with the model alone. What is open gives up its blocks and goes on; returns how many sequences do."""
        changed = self.model.learned.put(key, adapter, left_out)
        drafts = [draft for draft in self._sequences.values() if draft.teaching and draft.teaching.key in changed]
        for draft in drafts:
            self.scheduler.release(draft)
        return self._go_on(drafts, self.model)

    def _go_on(self, drafts: Sequence[DraftSequence], method: ModelMethod) -> int:
        """Lets sequences without blocks be drafted with other weights; how many can be."""
        num_kept = len(drafts)
        for draft in drafts:
            try:
                readmit(draft, method)
            except OutriderError as error:
                self._fail(draft, error)
                num_kept -= 1
        return num_kept

    def probe(self) -> None:
        """A sign of life. Raises DeviceLost if the device is unusable."""
        if self._model is not None:
            probe(self._model.proposer.runner, self.cache.pool)

    def _draft_with(self, model: ModelMethod) -> None:
        self._model, self.scheduler.cache = model, model.cache
        self._branch_planner = BranchPlanner(model.cache, model.proposer.runner.copy_blocks)

    def _apply(self, key: SequenceKey, message: DraftCommand, sink: Sink, model: str) -> None:
        failure: OutriderError | None = None
        try:
            if isinstance(message, Open):
                self._open(key, message, sink, model)
            elif isinstance(message, Close):
                self._release(key)
                sink(Closed(message.sequence_id))
            elif (draft := self._sequences.get(key)) is not None:
                self._update(draft, message)
        except OutriderError as error:
            failure = error
        except Exception as error:  # a bug met with one sequence: the others of this frame still get their messages
            logger.exception("a %s failed", type(message).__name__)
            failure = unexpected(error)
        if failure is not None:
            self._release(key)
            sink(to_failure(message.sequence_id, failure))

    def _open(self, key: SequenceKey, request: Open, sink: Sink, model: str) -> None:
        now, num_tokens = time.monotonic(), len(request.prompt_ids) + request.sampling.max_tokens
        leaving = self._shares.giving_way(self._work, model, num_tokens)
        if not leaving:
            self._work.check(num_tokens, now)
        parent = self._sequences.get((key[0], request.fork_of)) if request.fork_of is not None else None
        self._arrivals += 1
        names = request.named_methods or self._default_methods
        draft = build_sequence(
            key, request, sink, self._methods, names, self._rates, parent, self._arrivals, now, self._learn_from
        )
        for other in leaving:
            self._displace(other, now)
        self._sequences[key] = draft
        self._work.add(key, num_tokens, now)
        self._shares.add(key, model, num_tokens)

    def _displace(self, key: SequenceKey, now: float) -> None:
        """Another model has less than its share: this one's request goes on without a draft, and comes back later."""
        problem = "the draft is full, and another model has less than its share of it"
        self._fail(self._sequences[key], self._work.refusal(problem, 1, 0, now))
        self.num_displaced += 1

    def _update(self, draft: DraftSequence, message: Commit | Credit) -> None:
        if isinstance(message, Credit):
            draft.limits.grant(message)
            return
        if draft.model is not None and draft.text.is_own:
            check_ids(message.ids, draft.model.vocab_size)
        draft.on_commit(message, self.cache)

    def _choose_methods(self) -> None:
        """Lookups draft all that they have: no forward. What is the model's, the next passes draft."""
        for draft in self._sequences.values():
            if not draft.is_choosing:
                continue
            self._observer.on_start([draft])
            self._in_step = [draft]
            draft.choose()
            self._in_step = []

    def _draft(
        self, model: ModelMethod, steps: list[tuple[DraftSequence, int]], branch_steps: list[BranchStep]
    ) -> None:
        """One pass, or several: the next tokens of every chain, and of every branch."""
        self._in_step = [*{draft: None for draft, _ in (*steps, *branch_steps)}]
        self._observer.on_start(self._in_step)
        started = time.perf_counter_ns()
        lines = [(draft, draft.chain, num_rows) for draft, num_rows in steps]
        lines += [(draft, branch, branch.num_uncomputed) for draft, branch in branch_steps]
        rows = [row for draft, line, num_rows in lines if (row := draft.rows(line, num_rows)) is not None]
        draws = [row.draws for row in rows]
        trees = [draft.tree for draft, _ in steps]
        lengths = [len(row.sequence) for row in rows]
        counts = [1] * len(rows) if any(trees) else self._tokens_at_once(model, rows, steps, branch_steps)
        drafted = model.proposer.run(rows, counts)
        grown = self._grow(model, rows, drafted, {i: tree for i, tree in enumerate(trees) if tree is not None})
        duration_us = (time.perf_counter_ns() - started) // 1000
        self._observer.on_passes(1 if model.proposer.parallel else counts[0], len(rows), duration_us * 1e-6)
        if max(row.num_rows for row in rows) <= LONG_PREFILL:
            self._rates.add_draft(model.name, max(counts), duration_us)
        for (draft, line, _), drew, count, length, tokens in zip(lines, draws, counts, lengths, drafted, strict=True):
            goes_on = len(line.sequence) >= length + count and not draft.ends_behind(line, tokens)
            line.ended = drew and not goes_on
            line.note(tokens)
        for index, tree in grown.items():
            steps[index][0].hold_tree(tree, duration_us)
        for draft, _ in steps:
            draft.chain.draft_us += duration_us
            # Less one: the last committed token may have to be computed again, so its block stays writable.
            self.cache.publish(draft.sequence, draft.text.num_own(draft.committed) - 1)
        self._in_step = []
        if self._tracer is not None:
            self._tracer.record(
                SPAN_DRAFT_BATCH,
                [draft.traceparent for draft, _ in steps],
                time.time_ns() - 1000 * duration_us,
                lambda: {BATCH_ROWS: sum(rows for _, rows in steps), BATCH_SEQUENCES: len(steps)},
            )

    def _grow(
        self,
        model: ModelMethod,
        rows: Sequence[DraftRows],
        drafted: list[list[DraftedToken]],
        shapes: Mapping[int, TokenTree],
    ) -> dict[int, GrowingTree]:
        """Grows the trees, by row, as far as there are blocks. The rows have drawn what stands first, which becomes a
        node and no chain's token."""
        grown: dict[int, GrowingTree] = {}
        roots: list[DraftedToken] = []
        for index, shape in shapes.items():
            row = rows[index]
            length = row.text.num_own(row.num_committed)
            missing = self.cache.blocks_for(length + len(shape)) - len(row.sequence.block_table)
            if drafted[index] and missing <= self.cache.pool.num_free:
                self.cache.extend(row.sequence, num_tokens=length + len(shape))
                row.text.truncate(row.num_committed, self.cache)
                grown[index] = GrowingTree(shape)
                roots += drafted[index]
                drafted[index] = []
        if grown:
            model.proposer.grow([rows[index] for index in grown], roots, list(grown.values()))
        return grown

    def _tokens_at_once(
        self,
        model: ModelMethod,
        rows: Sequence[DraftRows],
        steps: Sequence[tuple[DraftSequence, int]],
        branch_steps: Sequence[BranchStep],
    ) -> list[int]:
        """How many tokens every line takes before it has something else to do, as far as there are blocks."""
        stretches = [draft.stretch for draft, _ in steps]
        stretches += [draft.end_of(branch) - len(branch.text) for draft, branch in branch_steps]
        counts = model.proposer.tokens_at_once(rows, stretches)
        ends = [(row.sequence, len(row.sequence) + count) for row, count in zip(rows, counts, strict=True) if count > 1]
        missing = [self.cache.blocks_for(end) - len(sequence.block_table) for sequence, end in ends]
        if sum(count for count in missing if count > 0) > self.cache.pool.num_free:
            return [1] * len(rows)
        for sequence, end in ends:
            self.cache.extend(sequence, num_tokens=end)
        return counts

    def _prepare(self, model: ModelMethod) -> bool:
        """In a pause, draws one sequence's random numbers for after the verification under way; then commands get
        their turn again."""
        return any(
            model.proposer.prepare(
                draft.model.draft_sampling.of_chain(draft.chain.number, draft.chain.start),
                draft.committed,
                len(draft.text) + draft.limits.piece_len + 1,
            )
            for draft in self._sequences.values()
            if draft.model is not None and draft.limits.until > draft.committed and not draft.finished
        )

    def _expire(self, now: float) -> None:
        for draft in list(self._sequences.values()):
            if draft.deadline is not None and draft.deadline <= now:
                self._fail(draft, DeadlineExceeded("the request's time ran out"))

    def _fail(self, draft: DraftSequence, error: OutriderError) -> None:
        self._release(draft.key)
        draft.sink(to_failure(draft.key[1], error))

    def _release(self, key: SequenceKey) -> None:
        draft = self._sequences.pop(key, None)
        if draft is not None:
            draft.released = True
            self._work.remove(key, time.monotonic())
            self._shares.remove(key)
            self._observer.on_release(key)
            self._suspects = [suspect for suspect in self._suspects if suspect is not draft]
            if draft.committed > draft.prompt_len:
                tokens = draft.text.tokens[: draft.committed]
                teach(self._learners, tokens, draft.context)
                lesson = None if draft.teaching is None else draft.teaching.lesson(tokens, draft.prompt_len)
                if lesson is not None:
                    self.lessons.add(lesson)
            self.scheduler.release(draft)

    def _send_pieces(self) -> None:
        """Hands out the pieces that are due; then all that was said may leave."""
        for draft in self._sequences.values():
            for piece in draft.take_pieces():
                draft.sink(piece)
                self._observer.on_piece(draft, piece)
        self._flush()
