"""Continuous batching over ragged windows: which sequences run in the next step, with how many rows, and who gives
up blocks. Every step takes each sequence that may run, with its window or one plain token, and chunks of prompts
beside them. There is no prefill phase: a sequence only has tokens that are not computed yet. The oldest sequence is in
every step; where the rows do not suffice for all others, those that were passed over come next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from outrider.engine.batch import BatchEntry, PreparedAdapter
from outrider.engine.kv_cache_manager import KVCacheManager, OutOfBlocks
from outrider.engine.sampler import SamplingRows, is_numeric_only
from outrider.engine.scheduler import Scheduler
from outrider.engine.token_tree import MOST_NODES, depths_of, path_to
from outrider.planner.estimates import Lag
from outrider.target_service.adapters import AdapterTurns
from outrider.target_service.draft_buffer import EMPTY_WINDOW, Window
from outrider.target_service.forced import with_forced
from outrider.target_service.goodput import Goodput, GoodputRequest
from outrider.target_service.sequence import SequenceKey, TargetSequence

PROMPT_SHARE = 0.7  # of the time of the windows in a step, that prompts may add to it
LEAST_PROMPT_ROWS = 1 / 8  # of a step's rows: few windows cost so little time that their share would keep prompts small


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """What one sequence does in a step, and which rows of it are the sequence's."""

    target: TargetSequence
    committed: int  # the committed length before the step
    start: int  # position of the first row
    num_rows: int
    window: Window
    takes_next: bool  # draws a token after the window: bonus, plain, or where a drafted one is refused
    num_logits: int  # rows from the end that want logits
    first_logit: int = 0  # place of the first of these among those of all sequences of the step
    first_row: int = 0  # place of the first row among those of all sequences of the step
    end: int = field(init=False)  # position after the last row
    samples: bool = field(init=False)  # the last committed token is computed, so that tokens can be committed
    num_verify_rows: int = field(init=False)  # at the end, that judge the window or give the next token

    def __post_init__(self) -> None:
        self.end = self.start + self.num_rows
        self.samples = self.end >= self.committed
        self.num_verify_rows = self.end - self.committed + 1 if self.samples else 0

    @property
    def verify_rows(self) -> range:
        """The rows of the step's logits that judge the window or give the next token."""
        end = self.first_logit + self.num_logits
        return range(end - self.num_verify_rows, end)

    @property
    def sampling_rows(self) -> list[SamplingRows]:
        """The sampling state at every one of them."""
        drafted, parents, sampler = self.window.ids, self.window.parents, self.target.sampler
        if not parents or is_numeric_only(sampler):
            return [SamplingRows(sampler, drafted if self.takes_next else drafted[:-1])]
        paths = [[drafted[node] for node in path_to(parents, node)] for node in range(-1, len(parents))]
        return [SamplingRows(sampler, path, first=len(path)) for path in paths]

    @property
    def row_depths(self) -> Sequence[int]:
        """How many drafted tokens each of them follows."""
        return [0, *depths_of(self.window.parents)] if self.window.parents else range(self.num_verify_rows)

    @property
    def num_drafted(self) -> int:
        """Tokens of the window that a draft proposed."""
        return len(self.window.ids) - self.window.num_forced

    @property
    def num_further(self) -> int:
        """Rows that a shorter window would save at most. In rejection mode one drafted token always stays: a cut then
        puts tokens off and gives up none. A sequence's first window is whole: it shows what its draft is worth. So are
        trees, of which acceptance by position does not say what a node is worth."""
        stays = not self.target.acceptance.tested or (self.target.rejects and self.num_drafted == 1)
        return 0 if stays or self.window.parents else self.num_verify_rows - 1 - self.window.num_forced

    def goodput_request(self) -> GoodputRequest:
        """What the choice of windows takes of it. A prompt's rows are not the window's."""
        further = self.num_further
        sure = self.num_verify_rows - further
        return GoodputRequest(self.target.acceptance, sure, sure - 1, further, self.committed)

    def cut_to(self, further: int) -> int:
        """The longest window with so many of those rows, or fewer. In rejection mode the target's own token does not
        follow a cut window, so k drafted tokens take k rows."""
        if further >= self.num_further:
            return self.num_drafted
        return min(further + 1, self.num_drafted - 1) if self.target.rejects else further

    @property
    def draft_us(self) -> int:
        """What drafting the window took, where a head did; what is left of its chain took nothing more."""
        chain = self.target.head_chain
        return chain.draft_us if chain is not None and chain.number == self.window.chain else 0

    def batch_entry(self) -> BatchEntry:
        """The rows as the runner takes them; the sequence's tokens include the window by then."""
        sequence = self.target.sequence
        ids = sequence.tokens[self.start : self.end]
        ids += [0] * (self.num_rows - len(ids))  # what the device alone has
        adapter = None if self.target.adapter is None else self.target.adapter.prepared
        return BatchEntry(ids, self.start, sequence.block_table, self.num_logits, self.window.parents, adapter)

    @property
    def follows_plainly(self) -> bool:
        """Whether a plain token of it may follow another one that nobody has read yet: where it drafts nothing, and
        none of its parameters looks at earlier tokens."""
        target = self.target
        return (
            self.num_logits == 1
            and not self.window.ids
            and not target.max_window
            and not (target.is_suspect or target.wants_constraint or target.adapter)
            and is_numeric_only(target.sampler)
            and target.open.sampling.logprobs is None
        )

    @property
    def is_last(self) -> bool:
        """Whether its credit, or the request, ends with a plain token of this step."""
        after = self.committed + 1
        return self.target.until <= after or self.target.tokens_left_at(after) <= 0

    @property
    def stands(self) -> bool:
        """Whether its sequence has the tokens and blocks that it was planned for: it may have ended, or been preempted,
        since."""
        target = self.target
        return not target.finished and target.admitted and target.committed == self.committed + len(self.window.ids)


@dataclass(frozen=True, slots=True)
class Cuts:
    """What of their windows sequences that share a step verify."""

    limits: Mapping[SequenceKey, int] = field(default_factory=dict)  # drafted tokens, at most
    shapes: Mapping[SequenceKey, ScheduledSequence] = field(default_factory=dict)  # what each does with rows enough

    def whole(self, target: TargetSequence, budget: int) -> ScheduledSequence | None:
        """What a sequence does that is not cut, unless it was preempted since; None else."""
        shape = self.shapes.get(target.key)
        if shape is None or shape.num_rows > budget or shape.start != target.sequence.num_computed_tokens:
            return None
        return shape if self.limits[target.key] >= shape.num_drafted else None


@dataclass(frozen=True, slots=True)
class RowShares:
    """How the rows of a step are divided."""

    windows: int  # rows of sequences past their prompt, all together
    prompts: int  # rows of the others; with those of `windows` they may be more than a step has
    cuts: Cuts


class TargetScheduler(Scheduler[TargetSequence]):
    """Owns the running sequences of a target and chooses each step."""

    def __init__(
        self, cache: KVCacheManager, max_rows: int = 512, max_window: int = 128, cut_windows: bool = True
    ) -> None:
        super().__init__(cache, max_rows)
        self.max_window = max_window
        self.max_forced = 0  # of a window's tokens, those that a grammar forces
        self.cut_windows = cut_windows
        self.goodput: Goodput | None = None  # limits prompts by time, and cuts windows where sequences share a step
        self.turns: AdapterTurns[PreparedAdapter] | None = None  # of adapters, where the model takes any
        self.sequences: dict[SequenceKey, TargetSequence] = {}
        self.num_rows_cut = self._num_steps = 0  # since the start
        self._lag = Lag()  # of all sequences
        self._suspect_ran = False  # in the last step

    def add(self, target: TargetSequence) -> None:
        """Takes a new sequence."""
        self.sequences[target.key] = target
        target.lag = Lag(self._lag)

    def release(self, target: TargetSequence) -> None:
        """Takes a sequence's blocks, and with them a head's rows."""
        super().release(target)
        target.head_end = 0

    def remove(self, target: TargetSequence) -> None:
        """Releases a sequence's blocks and forgets it."""
        self.sequences.pop(target.key, None)
        self.cache.release(target.sequence)

    def dues(self, now: float) -> list[float]:
        """When each sequence with credit may run."""
        return [due for target in self.sequences.values() if (due := target.due(now)) is not None]

    def cohort(self, now: float) -> tuple[list[TargetSequence], list[TargetSequence]]:
        """Who could be in the next step, and who in the same one if the chains came that they wait for. None, where a
        prompt or a suspect could: these are not held up."""
        ready, missing = [], []
        for target in self.sequences.values():
            if (due := target.due(now)) is None:
                continue
            if target.is_suspect or self._is_prompt(target):
                if due <= now:
                    return [], []
            elif due <= now:
                ready.append(target)
            else:
                missing.append(target)
        return (ready, self._that_fit(ready, missing)) if ready and missing else ([], [])

    def _that_fit(self, ready: Sequence[TargetSequence], missing: Sequence[TargetSequence]) -> list[TargetSequence]:
        """Those that are missing whose adapters and rows have room beside the ready ones."""
        there = {target.adapter.prepared for target in ready if target.adapter is not None}
        wanted = there.union(target.adapter.prepared for target in missing if target.adapter is not None)
        if self.turns is not None and len(wanted) > self.turns.most:
            missing = [target for target in missing if target.adapter is None or target.adapter.prepared in there]
        left = self.max_rows - sum(target.last_rows for target in ready)
        totals = accumulate(target.last_rows for target in missing)
        return [target for target, total in zip(missing, totals, strict=True) if total <= left]

    def plan(self, ready: Sequence[TargetSequence]) -> list[ScheduledSequence]:
        """A step of sequences that are ready, in their order, with prompts and windows each within their share of the
        rows. Blocks are reserved and windows appended; if it raises, no longer."""
        ready = self._in_turn(ready)
        prompts = {target.key: target for target in ready if self._is_prompt(target)}
        shares = self._divide([target for target in ready if target.key not in prompts], list(prompts.values()))
        budget, left = self.max_rows, {False: shares.windows, True: shares.prompts}
        step: list[ScheduledSequence] = []
        num_logits = 0
        self._num_steps += 1
        try:
            for target in ready:
                is_prompt = target.key in prompts
                rows = min(budget, left[is_prompt])
                scheduled = self._enter(target, rows, shares.cuts, step) if rows > 0 else None
                if scheduled is not None:
                    scheduled.first_logit, scheduled.first_row = num_logits, self.max_rows - budget
                    step.append(scheduled)
                    num_logits += scheduled.num_logits
                    budget -= scheduled.num_rows
                    left[is_prompt] -= scheduled.num_rows
                    target.last_step, target.last_rows = self._num_steps, scheduled.num_rows
        except Exception:
            self.roll_back(step)
            raise
        return step

    def follow(self, step: Sequence[ScheduledSequence], now: float) -> dict[int, ScheduledSequence]:
        """The step after one of which nothing was read yet, by places in that one: a plain token more of each that goes
        on, whose row is that of the token which the device has. None where one cannot go on so, or others could be in
        that step, too."""
        members = {scheduled.target.key for scheduled in step}
        others = (target for target in self.sequences.values() if target.key not in members)
        going = {place: one for place, one in enumerate(step) if one.stands and not one.is_last}
        if (
            not all(one.samples for one in step)
            or not all(one.follows_plainly for one in going.values())
            or any((due := target.due(now)) is not None and due <= now for target in others)
        ):
            return {}
        try:
            for one in going.values():
                self.cache.extend(one.target.sequence, num_tokens=one.committed + 1)
        except OutOfBlocks:
            return {}
        self._num_steps += 1
        for one in going.values():
            one.target.last_step, one.target.last_rows = self._num_steps, 1
        return {
            place: ScheduledSequence(one.target, one.committed + 1, one.committed, 1, EMPTY_WINDOW, True, 1, row, row)
            for row, (place, one) in enumerate(going.items())
        }

    def _in_turn(self, ready: Sequence[TargetSequence]) -> Sequence[TargetSequence]:
        """The sequences whose adapters may be in one step; the first stays."""
        wanted = [target.adapter.prepared for target in ready if target.adapter is not None]
        if self.turns is None or not wanted:
            return ready
        first = ready[0].adapter
        chosen = self.turns.choose(wanted, None if first is None else first.prepared)
        return [target for target in ready if target.adapter is None or target.adapter.prepared in chosen]

    def roll_back(self, step: Iterable[ScheduledSequence]) -> None:
        """Takes the windows of a step that failed off their sequences again."""
        for scheduled in step:
            self.cache.truncate(scheduled.target.sequence, scheduled.committed)

    def runnable(self, now: float) -> list[TargetSequence]:
        """Who may be in the next step, in order: the oldest, which always advances; windows, those that ran last at the
        end; prompts by age. A suspect is in steps of its own, which take turns with those of all others."""
        ready = self._ready(now)
        suspects = [target for target in ready if target.is_suspect]
        others = [target for target in ready if not target.is_suspect]
        self._suspect_ran = bool(suspects) and not (others and self._suspect_ran)
        return [min(suspects, key=lambda target: (target.last_step, target.arrival))] if self._suspect_ran else others

    def _ready(self, now: float) -> list[TargetSequence]:
        ready = [t for t in self.sequences.values() if (due := t.due(now)) is not None and due <= now]
        computing: dict[SequenceKey, int] = {}  # per group of forks the oldest whose prompt is not computed
        for target in self.sequences.values():
            if (
                target.group is not None
                and target.wants_tokens
                and target.sequence.num_computed_tokens < target.prompt_len - 1
            ):
                computing[target.group] = min(target.arrival, computing.get(target.group, target.arrival))
        # The others of a group wait for the oldest and then find its prompt in the prefix cache.
        ready = [t for t in ready if t.group is None or t.arrival <= computing.get(t.group, t.arrival)]

        oldest = min(ready, key=lambda target: target.seniority, default=None)

        def order(target: TargetSequence) -> tuple[bool, bool, int, int, int]:
            is_prompt = self._is_prompt(target)
            last_step = 0 if is_prompt else target.last_step
            return (target is not oldest, is_prompt, target.open.priority, last_step, target.arrival)

        return sorted(ready, key=order)

    def _is_prompt(self, target: TargetSequence) -> bool:
        return target.committed - target.sequence.num_computed_tokens > self.max_window or not target.admitted

    def _divide(self, windows: Sequence[TargetSequence], prompts: Sequence[TargetSequence]) -> RowShares:
        """Half of the rows are the prompts', if they want them, and what windows leave; less where that takes more time
        than the sequences past their prompt can be held up for. It looks at counts, times and earlier verifications
        alone, never at drafted tokens."""
        if not prompts:
            return RowShares(self.max_rows, 0, self._cut(windows, self.max_rows))
        num_decoding = sum(t.wants_tokens and not self._is_prompt(t) for t in self.sequences.values())
        if not num_decoding:
            entering, _ = self._look_up(prompts, self.max_rows)
            return RowShares(0, self.max_rows, self._cut(entering, self.max_rows))
        oldest_is_prompt = min((*windows, *prompts), key=lambda target: target.seniority) in prompts
        entering, reserved = self._look_up(prompts, (self.max_rows + oldest_is_prompt) // 2)
        for_windows = self.max_rows - reserved
        cuts = self._cut([*windows, *entering], for_windows)
        shapes = [self._shape(t, self.max_rows, cuts.limits.get(t.key, self.max_window)) for t in windows]
        wanted = min(for_windows, sum(shape.num_rows for shape in shapes))
        for_prompts = self.max_rows - wanted
        if self.goodput is not None and len(prompts) < num_decoding:  # else more wait than are held up
            context = sum(target.committed for target in windows)
            in_time = self.goodput.rows_beside(max(wanted, num_decoding), PROMPT_SHARE, context, num_decoding)
            for_prompts = min(for_prompts, max(1, in_time, int(LEAST_PROMPT_ROWS * self.max_rows)))
        return RowShares(for_windows, for_prompts, cuts)

    def _look_up(self, prompts: Iterable[TargetSequence], most: int) -> tuple[list[TargetSequence], int]:
        """The prompts that fill `most` rows, once what the prefix cache holds of them is left out, and their rows."""
        entering, rows = [], 0
        for target in prompts:
            if rows >= most:
                break
            self._look_for_prefix(target)
            entering.append(target)
            rows += target.committed - target.sequence.num_computed_tokens
        return entering, min(rows, most)

    def _cut(self, targets: Sequence[TargetSequence], max_rows: int) -> Cuts:
        """What each of those that share a step shall verify in it, with `max_rows` for all."""
        if self.goodput is None or not self.cut_windows or len(targets) < 2:
            return Cuts()
        shapes = [self._shape(target, self.max_rows, self.max_window) for target in targets]
        windows = [shape for shape in shapes if shape.samples]
        further = self.goodput.choose([shape.goodput_request() for shape in windows], max_rows)
        self.num_rows_cut += sum(shape.num_further for shape in windows) - sum(further)
        return Cuts(
            {shape.target.key: shape.cut_to(rows) for shape, rows in zip(windows, further, strict=True)},
            {shape.target.key: shape for shape in windows},
        )

    def _look_for_prefix(self, target: TargetSequence) -> None:
        """A prompt whose log probabilities are wanted is computed whole. What a sequence finds of its own, once it was
        preempted, was no other's."""
        if target.admitted:
            return
        found = self.admit(target, use_prefix=target.open.sampling.prompt_logprobs is None)
        if not target.last_step:
            target.num_cached_ids = min(found, target.prompt_len)

    def _enter(
        self, target: TargetSequence, budget: int, cuts: Cuts, step: Iterable[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """Gives a sequence its rows and blocks, preempting others if it must; None if it has to wait."""
        self._look_for_prefix(target)
        if target.chains.live() is None and not target.chains.draft_is_idle and target.patience > 0:
            # This round decodes a plain token because the wait ran out; it is not repeated until a piece arrives.
            target.patience_spent = True
        scheduled = cuts.whole(target, budget)
        if scheduled is None:
            scheduled = self._shape(target, budget, cuts.limits.get(target.key, self.max_window))
        everyone, in_step = self.sequences.values(), [other.target for other in step]
        if self.reserve(target, scheduled.end, everyone, in_step, scheduled.window.ids):
            return scheduled
        if not target.sequence.num_computed_tokens:
            self.release(target)
        return None

    def _shape(self, target: TargetSequence, budget: int, max_window: int) -> ScheduledSequence:
        """How many rows: a chunk of what is not computed, or all of it and the window."""
        committed, start = target.committed, target.sequence.num_computed_tokens
        missing = committed - start  # at least 1: the last token's logits are always to come
        wants_prompt = target.wants_prompt_logprobs
        if missing > budget:
            num_logits = budget if wants_prompt else 0
            return ScheduledSequence(target, committed, start, budget, EMPTY_WINDOW, False, num_logits)
        room = min(target.until - committed, target.tokens_left_at(committed))
        limit = min(target.max_window, max_window, room, budget - missing)
        window = target.chains.window(limit, most_rows=MOST_NODES + 1 - missing, depth=room - 1)
        if self.max_forced and (own := target.sampler.constraint) is not None:
            window = with_forced(target, own, window, self.max_forced, min(self.max_window, room, budget - missing))
        num_drafted = len(window.ids)
        takes_next = room > num_drafted and not (num_drafted > 0 and window.goes_on and target.rejects)
        takes_next = takes_next or bool(window.parents)  # a tree leaves room for it
        # Without a bonus the last drafted token's row is not needed: it is computed with the next step.
        num_rows = missing + num_drafted - (0 if takes_next else 1)
        num_logits = num_rows if wants_prompt else num_rows - missing + 1
        return ScheduledSequence(target, committed, start, num_rows, window, takes_next, num_logits)
