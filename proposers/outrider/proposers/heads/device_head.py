"""A head's tokens of many sequences with one wait: its passes captured, and the draws between them.

The first pass computes what is committed, of any number of rows a sequence; each one that follows the token that was
drawn before it, where the draw has left it (device_draw.py). Sequences may draw more tokens than others: who has all of
its own stands still, stores nothing, and what is drawn of it is not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from outrider.engine.batch import BatchEntry, Bucket, StaticBatch, all_buckets, bucket_of, choose_bucket
from outrider.engine.cuda_graphs import CapturedPasses, CapturedSteps
from outrider.engine.kv_cache import KVCache
from outrider.proposers.device_draw import MOST_PASSES, CapturedDraw, CapturedDraws, DeviceDrawing, DrawKind
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.heads.head import Head

KINDS = tuple(DrawKind(races, weighs, ranks=False) for races in (False, True) for weighs in (False, True))


class DeviceHead:
    """The captured passes and draws of one head, which does not draft all tokens at once. Called from one thread.

    Its logits lie where the target's captured steps leave theirs: those must have been read."""

    def __init__(
        self,
        head: Head,
        cache: KVCache,  # the head's
        steps: CapturedSteps,  # the target's
        state: Tensor,  # [rows, width], one that a pass gave
        features: Tensor,  # [rows, taps, hidden], which it was given
        mass: float,  # that a vector of weights holds
    ) -> None:
        self._head, self._cache, self._logits = head, cache, steps.logits
        longest = steps.limits.max_query_len if head.layers else 1
        self._limits = replace(steps.limits, max_query_len=longest, trees=False)
        buckets = all_buckets(self._limits)
        most = buckets[0].rows
        self._features = features.new_zeros(most, *features.shape[1:])  # [most rows, taps, hidden]
        self._state = state.new_zeros(most, state.shape[1])  # [most rows, width]
        self._passes = CapturedPasses(buckets, steps.max_model_len, steps.block_size, steps.graphs, steps.logits.device)
        for bucket in buckets:
            self._passes.capture_bucket(bucket, *self._passes_of(bucket))
        plain = [bucket for bucket in buckets if bucket.max_query_len == 1]
        self._draws = CapturedDraws(self._passes, plain, self._logits, mass, KINDS)

    def first(
        self,
        entries: Sequence[BatchEntry],
        features: Tensor,  # [rows, taps, hidden]
    ) -> tuple[Tensor, Tensor] | None:  # [rows that want logits, vocab] float32, [the same rows, width]
        """What the head's first pass gives, until another one; None where no graph holds it."""
        bucket = bucket_of(self._limits, entries)
        if bucket is None or not self._passes.has(bucket):
            return None
        self._features[: len(features)].copy_(features)
        num_logits = len(self._passes.prepare(bucket, entries).logit_rows)
        self._passes.replay(bucket)
        return self._logits[:num_logits], self._state[:num_logits]

    def holds(self, rows: Sequence[DeviceDrawing]) -> bool:
        """Whether the next tokens of these sequences can be drawn without the host."""
        return self._find(rows) is not None

    def draw(
        self,
        rows: Sequence[DeviceDrawing],
        before: Sequence[BatchEntry],  # of each its last committed token, with the blocks of all that it draws
        counts: Sequence[int],  # how many tokens each draws
        logits: Tensor,  # [rows, vocab] float32: the first pass's, as `first` gives them or the head itself
        state: Tensor,  # [rows, width], likewise
    ) -> list[list[DraftedToken]]:
        """The next tokens of every sequence: fewer where logits were not finite. One wait for MOST_PASSES of them."""
        found = self._find(rows)
        if found is None:
            raise ValueError(f"{len(rows)} sequences: no captured draw holds them")
        bucket, taken = found
        if logits.data_ptr() != self._logits.data_ptr():
            self._keep(logits, state)
        self._passes.prepare(bucket, before)
        ends = [entry.start + count for entry, count in zip(before, counts, strict=True)]
        drawn: list[list[DraftedToken]] = [[] for _ in rows]
        for start in range(0, max(counts), MOST_PASSES):
            depths = range(start, min(max(counts), start + MOST_PASSES))
            self._draws.upload(taken, rows, ends)
            self._launch(bucket, taken, depths)
            for tokens, more in zip(drawn, self._draws.read(taken, rows, len(depths)), strict=True):
                tokens += more if len(tokens) == start else []
        return [tokens[:count] for tokens, count in zip(drawn, counts, strict=True)]

    def _launch(self, bucket: Bucket, taken: CapturedDraw, depths: range) -> None:
        """A draw for each depth, with the pass before it."""
        for depth in depths:
            if depth:
                self._passes.replay(bucket, min(depth, self._head.stages))
            taken.replay()

    def _find(self, rows: Sequence[DeviceDrawing]) -> tuple[Bucket, CapturedDraw] | None:
        """The draw of these sequences, and the bucket of the passes that follow it."""
        bucket = choose_bucket(self._limits, len(rows), len(rows), 1)
        taken = self._draws.find(bucket, rows)
        return None if bucket is None or taken is None else (bucket, taken)

    def _passes_of(self, bucket: Bucket) -> list[Callable[[StaticBatch], None]]:
        """The first, and where every sequence has one row those that may follow."""
        depths = range(1, self._head.stages + 1) if bucket.max_query_len == 1 else ()
        return [self._first, *(partial(self._next, depth) for depth in depths)]

    def _first(self, batch: StaticBatch) -> None:
        rows = len(batch.token_ids)
        most_logits = min(len(batch.context_lens), rows)  # one of a sequence
        batch = replace(batch, logit_rows=batch.logit_rows[:most_logits])
        self._keep(*self._head.first(batch, self._features[:rows], self._cache))

    def _next(self, depth: int, batch: StaticBatch) -> None:
        self._keep(*self._head.next(depth, batch, self._state[: len(batch.token_ids)], self._cache))

    def _keep(self, logits: Tensor, state: Tensor) -> None:  # [n, vocab] float32, [n, width]
        self._logits[: len(logits)].copy_(logits)
        self._state[: len(state)].copy_(state)
