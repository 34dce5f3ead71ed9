"""A head beside the model: it drafts right after the step that made its features, and no wire is between.

After a step the head computes a row for every token whose position before is certain now: of prompts, too, so that its
keys and values lie in every block that the target's do, and are found with it in the prefix cache. Then it draws, depth
by depth for all sequences at once, as many tokens as their credit asks for. What they leave in the cache stands in the
places of the next window, and is computed anew from the target's own states when that was judged. The states at the
last place of every block are kept beside it: whoever finds the block goes on from them.

Where the target's steps are captured, so are the head's passes and the draws between them: a step's tokens are read
once, behind the last depth. Trees, and sequences whose sampling is more than numbers, are launched depth by depth.

A sequence that is decoded plainly has a row a step, and no use for it yet: such rows wait, with the states that they
are made of, until a chain is wanted or their block is full, and are then computed in one pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.engine.batch import Batch, BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.kv_cache_manager import KVCacheManager
from outrider.engine.model_runner import ModelRunner
from outrider.engine.profile import StepProfile
from outrider.engine.staging import index_on
from outrider.engine.token_tree import TokenTree
from outrider.engine.worker import require_device
from outrider.proposers.drawing import Drawer
from outrider.proposers.heads.block import BlockHead
from outrider.proposers.heads.device_block import DeviceBlocks
from outrider.proposers.heads.device_head import DeviceHead
from outrider.proposers.heads.head import Head, MaskRow
from outrider.proposers.heads.loading import AnyHead
from outrider.proposers.tree import GrowingTree, grow
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.target_service.heads.block_drafts import draft_blocks, fit_block
from outrider.target_service.heads.learning import HeadLearning
from outrider.target_service.heads.lines import HeadLine, WaitingRows, apart, draw_at_once
from outrider.target_service.outputs import ComputedStep
from outrider.target_service.parts import EnginePart
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import HeadChain, TargetSequence

log = logging.getLogger(__name__)


class HeadDrafter(EnginePart):
    """One head and its cache."""

    lets_follow = False  # it reads a pass's hidden states once its step is committed

    def __init__(
        self,
        head: AnyHead,
        runner: ModelRunner,
        cache: KVCacheManager,
        drawer: Drawer,
        tree: TokenTree | None = None,  # what it drafts for greedy and coupled sequences; None: chains
        clock: Callable[[], float] = time.monotonic,  # the engine's
        learning: HeadLearning | None = None,  # what of others' texts was learned
    ) -> None:
        """Raises ValueError for a tree that the head cannot draft, or the model not verify."""
        model = runner.model
        check_tree(tree, head, model.takes_trees)
        self.head, self.tree = head, tree
        self.num_steps = self.num_drafted = 0  # since the start: steps that it was behind, and tokens drawn
        self.seconds = 0.0  # that they took
        self._runner, self._manager, self._drawer, self._clock = runner, cache, drawer, clock
        num_blocks, size = runner.cache.num_blocks, runner.block_size
        self._cache = KVCache.allocate(head.layers, num_blocks, model.dtype, model.device, size)
        shape = (num_blocks if head.layers else 0, len(head.taps), head.hidden_size)
        self._ends = torch.zeros(shape, dtype=model.dtype, device=model.device)  # [blocks, taps, hidden]
        self._learning = learning
        self._waiting: WeakKeyDictionary[TargetSequence, WaitingRows] = WeakKeyDictionary()
        self.captured: DeviceHead | None = None  # None: every pass is launched
        self.blocks: DeviceBlocks | None = None  # the same of a block drafter

    def measured(self, costs: StepProfile, context_us: float, experts: ExpertCosts | None = None) -> None:
        """Warms up, and captures what it can."""
        self.capture(*self.warm_up())

    def committed(self, step: ComputedStep) -> None:
        """A head that fails costs its drafts alone: what is not drafted is decoded plainly."""
        try:
            self.run(step)
        except Exception:
            require_device(self._runner.model.device)
            log.exception("the head failed; the step's sequences go on without its drafts")
        ended = self._clock()
        for target in (scheduled.target for scheduled in step.scheduled):
            if target.head_chain is not None:
                target.ready_since = max(target.ready_since, ended)  # it did not wait: it was drafted for

    def stats(self) -> Mapping[str, Any]:
        """What it drafted, and how long that took."""
        return {"head_steps": self.num_steps, "head_seconds": self.seconds, "head_drafted": self.num_drafted}

    @torch.inference_mode()
    def run(self, step: ComputedStep) -> None:
        """Computes what the step has made certain, and gives the sequences that may have one a chain."""
        began = time.perf_counter()
        if self._runner.hidden_states is None:
            raise ValueError(f"the target taps no layer; {self.head.name} reads {list(self.head.taps)}")
        states = self._runner.hidden_states[..., : self.head.hidden_size]  # [rows, taps, hidden]
        lines = list(self._lines(step, states))
        self._keep_ends(lines, states)
        lines = [line for line in lines if line.first < line.end and (self.head.layers or line.count)]  # with rows
        lines = [line for line in lines if not self._waits(line, states)]
        if not lines:
            return
        try:
            self._draft(lines, states)
        finally:
            seconds = time.perf_counter() - began
            self.num_steps, self.seconds = self.num_steps + 1, self.seconds + seconds
        for line in lines:
            line.target.head_end = line.end if line.keeps else 0
            self._hold(line, max(1, round(seconds * 1e6)))

    def capture(self, features: Tensor, state: Tensor) -> None:  # [rows, taps, hidden], [rows, width]
        """Captures the head's passes, of the shapes that `warm_up` gives, behind captured steps of the target. Where
        that fails, they stay launched."""
        steps, head = self._runner.captured, self.head
        if steps is None or (not isinstance(head, BlockHead) and head.mask is not None):
            return
        before = steps.graphs.reserved_bytes()
        try:
            with torch.inference_mode():
                if isinstance(head, BlockHead):
                    self.blocks = DeviceBlocks(head, self._cache, steps, features, self._drawer.mass)
                else:
                    self.captured = DeviceHead(head, self._cache, steps, state, features, self._drawer.mass)
        except Exception:
            require_device(self._runner.model.device)
            log.exception("the passes of %s could not be captured; they are launched", self.head.name)
            return
        taken = (steps.graphs.reserved_bytes() - before) >> 20
        log.info("captured the passes of %s in %d MiB", self.head.name, taken)

    @torch.inference_mode()
    def warm_up(self) -> tuple[Tensor, Tensor]:  # [1, taps, hidden], [1, width]
        """Computes a row, and one behind it, while nothing is open: what is compiled or allocated once is no
        sequence's. Returns what the first pass took, and the state that it gave."""
        head, table = self.head, self._manager.pool.allocate(1)
        try:
            device, size = self._ends.device, self._runner.block_size
            features = self._ends.new_zeros(1, len(self.head.taps), self.head.hidden_size)
            batch = build_batch([BatchEntry([0], 1, table, 1)], size, device)
            if isinstance(head, BlockHead):
                head.fill(batch, features, self._cache)
                block = build_batch([BatchEntry([0], 2, table, 1)], size, device)
                return features, head.draft(block, self._cache).hidden
            _, state = head.first(batch, features, self._cache)
            if head.mask is None and head.most_tokens > 1:
                head.next(1, build_batch([BatchEntry([0], 2, table, 1)], size, device), state, self._cache)
        finally:
            self._manager.pool.release(table)
        return features, state

    def _hold(self, line: HeadLine, draft_us: int) -> None:
        """The sequence has the chain that was drawn, if one was."""
        piece = line.piece()
        if piece.ids:
            line.target.chains.add(piece)
            line.target.head_chain = HeadChain(line.number, draft_us)
            self.num_drafted += len(piece.ids)

    def _lines(self, step: ComputedStep, states: Tensor) -> Iterator[HeadLine]:
        """Sequences that live on, with the rows whose position before is certain, but for those whose row can wait."""
        offsets = accumulate((scheduled.num_rows for scheduled in step.scheduled), initial=0)
        for scheduled, offset in zip(step.scheduled, offsets, strict=False):
            target = scheduled.target
            if target.finished or not target.sequence.block_table:
                continue
            end = target.sequence.num_computed_tokens + 1
            count = self._count(target) if scheduled.samples else 0
            if not count and self._waits_on(scheduled, states[offset : offset + 1]):
                continue
            if not self.head.layers:
                line = HeadLine(target, scheduled, offset, end - 1, end, count, False, number=target.next_chain)
            else:
                end, count = self._reserved(target, end, count)
                first = self._first(scheduled)
                line = HeadLine(target, scheduled, offset, first, end, count, True, number=target.next_chain)
                self._take_waiting(line)
                line.adapter = None if self._learning is None else self._learning.adapter_of(target)
            if count > 0:
                target.next_chain += 1
                if self.tree is not None and target.chains.takes_trees:
                    line.tree = GrowingTree(self.tree.cut(count))
            yield line

    def _take_waiting(self, line: HeadLine) -> None:
        """The rows that wait come first. Where its blocks were taken meanwhile, they are none that are wanted."""
        waiting = self._waiting.pop(line.target, None)
        if waiting is not None and waiting.first == line.target.head_end and waiting.end == line.first:
            line.waiting, line.first = waiting, waiting.first

    def _waits_on(self, scheduled: ScheduledSequence, state: Tensor) -> bool:  # [1, taps, hidden]
        """Whether the step's row waits with those before it, within a block: what plain decoding costs of a head, all
        but a step a block."""
        target, computed = scheduled.target, scheduled.target.sequence.num_computed_tokens
        waiting = self._waiting.get(target) if scheduled.num_rows == 1 else None
        if waiting is None or waiting.first != target.head_end or waiting.end != computed:
            return False
        if waiting.first < computed // self._runner.block_size * self._runner.block_size:
            return False
        waiting.states.append(state.clone())
        return True

    def _waits(self, line: HeadLine, states: Tensor) -> bool:
        """Whether the rows can wait for those of the next step: nothing is drawn, and no block of the cache, which
        others may find, lacks them."""
        size = self._runner.block_size
        num_full = line.target.sequence.num_computed_tokens // size
        waits = line.keeps and not line.count and line.scheduled.num_rows == 1 and line.first >= num_full * size
        if waits:
            held = WaitingRows(line.first, [self._features([line], states)])
            self._waiting[line.target], line.target.head_end = held, line.first
        return waits

    def _first(self, scheduled: ScheduledSequence) -> int:
        """The place of the first row to compute: behind those that are there. Where blocks were found, the states at
        their ends are, too; elsewhere in a block they are not, and that place is left out."""
        start = scheduled.start
        is_end = start > 0 and start % self._runner.block_size == 0
        return start if is_end and scheduled.target.head_end != start + 1 else start + 1

    def _count(self, target: TargetSequence) -> int:
        """How many tokens to draw: as many as the next window may have."""
        if target.open.method != self.head.name or target.chains.live() is not None or not target.wants_tokens:
            return 0
        room = min(target.until - target.committed, target.tokens_left)
        most = len(self.tree) if self.tree is not None and target.chains.takes_trees else self.head.most_tokens
        return min(target.max_window, most, room)

    def _reserved(self, target: TargetSequence, end: int, count: int) -> tuple[int, int]:
        """The end of the rows and the number of tokens that there are blocks for. The place of the last token drawn is
        not needed: nothing is drawn behind it. A block has all of its rows, however many tokens are wanted."""
        free, size = self._manager.pool.num_free, self._runner.block_size
        room = (len(target.sequence.block_table) + free) * size  # places
        if room < end:
            return end - 1, 0
        if isinstance(self.head, BlockHead):
            places = min(room, self._runner.model.max_model_len) - target.committed
            is_tree = self.tree is not None and target.chains.takes_trees
            count, behind = fit_block(self.head, count, places, is_tree)
        else:
            count = max(0, min(count, room - target.committed + 1))
            behind = count - 1
        self._manager.extend(target.sequence, num_tokens=max(end, target.committed + behind if count else 0))
        return end, count

    def _keep_ends(self, lines: Sequence[HeadLine], states: Tensor) -> None:
        """The states at the last places of blocks that are computed and committed."""
        if not self.head.layers:
            return
        size = self._runner.block_size
        blocks: list[int] = []
        rows: list[int] = []
        for line in lines:
            start = line.scheduled.start
            for position in range(start + (-start - 1) % size, line.target.sequence.num_computed_tokens, size):
                blocks.append(line.target.sequence.block_table[position // size])
                rows.append(line.offset + position - start)
        if blocks:
            self._ends[index_on(blocks, states.device)] = states[index_on(rows, states.device)]

    def _features(self, lines: Sequence[HeadLine], states: Tensor) -> Tensor:  # [rows, taps, hidden]
        """The states of the position before each row's place: the step's, or what a found block ends with."""
        size, device = self._runner.block_size, states.device
        rows: list[int] = []
        found: list[int] = []  # rows of places behind a found block
        blocks: list[int] = []  # that end before them
        waited: list[tuple[int, WaitingRows]] = []  # rows of steps before, and where they begin
        for line in lines:
            if line.waiting is not None:
                waited.append((len(rows), line.waiting))
            elif line.first == line.scheduled.start:
                found.append(len(rows))
                blocks.append(line.target.sequence.block_table[(line.first - 1) // size])
            rows += [max(0, line.offset + place - 1 - line.scheduled.start) for place in range(line.first, line.end)]
        features = states[index_on(rows, device)]
        if found:
            features[index_on(found, device)] = self._ends[index_on(blocks, device)]
        for start, before in waited:
            features[start : start + before.end - before.first] = torch.cat(before.states)
        return features

    def _draft(self, lines: Sequence[HeadLine], states: Tensor) -> None:
        """Where nobody draws, what is kept alone."""
        head = self.head
        if isinstance(head, BlockHead):
            self._fill(lines, states)
            most = self._runner.model.max_model_len
            draft_blocks(head, lines, self._cache, self._drawer, most, self.blocks)
        elif self.captured is None and not any(line.count for line in lines):
            self._fill(lines, states)
        elif head.mask is not None:
            self._draft_at_once(head, lines, states, head.mask)
        else:
            self._draft_in_turn(head, lines, states)

    def _fill(self, lines: Sequence[HeadLine], states: Tensor) -> None:
        """What later rows need of these."""
        entries, features = [line.first_entry() for line in lines], self._features(lines, states)
        if self.blocks is None or not self.blocks.fill(entries, features):
            self.head.fill(self._batch(entries), features, self._cache)

    def _batch(self, entries: Sequence[BatchEntry]) -> Batch:
        slots = None if self._learning is None else self._learning.slots_for(entries)
        return build_batch(entries, self._runner.block_size, self._runner.model.device, slots)

    def _draft_in_turn(self, head: Head, lines: Sequence[HeadLine], states: Tensor) -> None:
        """One pass a depth, for all that draw so deep; for trees others than for chains."""
        logits, state = self._first_pass(head, lines, states)
        wanting = [line for line in lines if line.count]  # by row of logits
        are_chains = all(line.tree is None and line.adapter is None for line in wanting)
        if wanting and are_chains and self.captured is not None and self.captured.holds(wanting):
            before = [line.last_entry(self._runner.block_size) for line in wanting]
            drawn = self.captured.draw(wanting, before, [line.count for line in wanting], logits, state)
            for line, tokens in zip(wanting, drawn, strict=True):
                line.drawn += tokens
            return
        trees = [(index, line) for index, line in enumerate(wanting) if line.tree is not None]
        if trees:
            self._draft_trees(head, dict(trees), logits, state)
        chains = [index for index, line in enumerate(wanting) if line.tree is None]
        if trees and chains:
            logits, state = logits[chains], state[chains]
        self._draft_chains(head, [wanting[index] for index in chains], logits, state)

    def _first_pass(self, head: Head, lines: Sequence[HeadLine], states: Tensor) -> tuple[Tensor, Tensor]:
        """Of those that draw the logits, [lines, vocab], and states, [lines, width], until the next captured pass."""
        entries, features = [line.first_entry() for line in lines], self._features(lines, states)
        has_adapters = any(line.adapter is not None for line in lines)  # which no captured pass reads
        found = None if self.captured is None or has_adapters else self.captured.first(entries, features)
        if found is not None:
            return found
        return head.first(self._batch(entries), features, self._cache)

    def _draft_chains(self, head: Head, going: list[HeadLine], logits: Tensor, state: Tensor) -> None:
        """One pass a depth, of which the host reads what was drawn; [lines, vocab] and [lines, width]."""
        depth = 0
        while going:
            kept = [index for index, token in enumerate(self._drawer.draw(logits, going)) if going[index].take(token)]
            going, depth = [going[index] for index in kept], depth + 1
            if going:
                batch = self._batch([line.next_entry() for line in going])
                logits, state = head.next(depth, batch, state[index_on(kept, state.device)], self._cache)

    def _draft_trees(self, head: Head, lines: Mapping[int, HeadLine], logits: Tensor, state: Tensor) -> None:
        """One pass a level; by row of `logits`, [rows, vocab], and `state`, [rows, width], the lines whose roots they
        are."""
        device = state.device
        forks = {row: line.fork(line.tree) for row, line in lines.items() if line.tree is not None}
        line_of = {id(line.tree): line for line in lines.values()}
        before: dict[int, Tensor] = {}  # by tree the states behind which its nodes so far stand, [nodes, width]
        depth = 0
        while forks:
            grown = grow(forks, self._drawer.draw(logits[list(forks)], list(forks.values())))
            entries: list[BatchEntry] = []
            states: list[Tensor] = []
            forks, row, depth = {}, 0, depth + 1
            for one in grown:
                line, key = line_of[id(one.tree)], id(one.tree)
                fresh = state[torch.tensor(one.rows, device=device)]  # [nodes of the level, width]
                if line.keeps:
                    before[key] = fresh = torch.cat([before[key], fresh]) if depth > 1 else fresh
                states.append(fresh)
                entries += line.level_entries(one.tree)
                forks |= one.forks(row)
                row += len(one.tree.level)
            if forks:
                logits, state = head.next(depth, self._batch(entries), torch.cat(states), self._cache)

    def _draft_at_once(self, head: Head, lines: Sequence[HeadLine], states: Tensor, mask: MaskRow) -> None:
        """One pass for all depths."""
        device = states.device
        parts = torch.split(self._features(lines, states), [line.end - line.first for line in lines])
        masks = [mask.features.expand(line.num_masks, -1, -1) for line in lines]
        features = torch.cat([part for pair in zip(parts, masks, strict=True) for part in pair])  # [rows, taps, hidden]
        batch = build_batch([line.first_entry(mask.token_id) for line in lines], self._runner.block_size, device)
        logits, _ = head.first(batch, features, self._cache)  # [tokens of all lines, vocab]
        offsets = accumulate((line.count for line in lines), initial=0)
        going = [(line, offset) for line, offset in zip(lines, offsets, strict=False) if line.count]
        free, going = apart(going)
        places = [offset + place for line, offset in free for place in range(line.count)]
        if free:
            draw_at_once([line for line, _ in free], logits[index_on(places, device)], self._drawer)
        while going:
            rows = torch.tensor([offset + len(line.drawn) for line, offset in going], device=device)
            drawn = self._drawer.draw(logits[rows], [line for line, _ in going])
            going = [pair for pair, token in zip(going, drawn, strict=True) if pair[0].take(token)]


def check_tree(tree: TokenTree | None, head: AnyHead, takes_trees: bool) -> None:
    """Raises ValueError for a tree that the head cannot draft, or the model not verify."""
    problem = None
    if tree is not None and not takes_trees:
        problem = "this target's model verifies chains alone"
    elif tree is not None and not isinstance(head, BlockHead) and head.mask is not None:
        problem = f"this {head.name} head drafts all tokens in one pass, which makes chains alone"
    elif tree is not None and tree.depth > head.most_tokens:
        problem = f"is {tree.depth} tokens deep; {head.name} drafts {head.most_tokens} in a row here"
    if problem is not None:
        raise ValueError(f"speculative_token_tree: {problem}")
