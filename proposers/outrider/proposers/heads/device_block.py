"""A block drafter's tokens of many sequences with one wait: the context's pass and the block's captured, and of each
place what its law is made of, between the draws.

A block's pass leaves the logits and states of all its places; a place's pass makes the law of its next token of these
and of the token before it, which a draw has left where it is read (device_draw.py). Every sequence has its whole block:
near the end of a context, where there is no room for one, blocks are launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry, Bucket, StaticBatch, all_buckets, bucket_of, choose_bucket
from outrider.engine.cuda_graphs import CapturedPasses, CapturedSteps
from outrider.engine.kv_cache import KVCache
from outrider.proposers.device_draw import MOST_PASSES, CapturedDraw, CapturedDraws, DeviceDrawing
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.heads.block import BlockChains, BlockGuess, BlockHead
from outrider.proposers.heads.device_head import KINDS


class DeviceBlocks:
    """The captured passes and draws of one block drafter, which does not end where it is unsure. Called from one
    thread.

    The laws lie where the target's captured steps leave their logits: those must have been read."""

    def __init__(
        self,
        head: BlockHead,
        cache: KVCache,  # the head's
        steps: CapturedSteps,  # the target's
        features: Tensor,  # [rows, taps, hidden], which its context is made of
        mass: float,  # that a vector of weights holds
    ) -> None:
        self._head, self._cache, self._logits = head, cache, steps.logits
        self._limits = replace(steps.limits, trees=False)
        self._block_limits = replace(self._limits, max_query_len=head.rows)
        buckets = all_buckets(self._limits)
        blocks = [bucket for bucket in all_buckets(self._block_limits) if bucket.max_query_len > 1]
        plain = [bucket for bucket in buckets if bucket.max_query_len == 1]
        most = max(self._num_places(bucket) for bucket in blocks)
        self._features = features.new_zeros(buckets[0].rows, *features.shape[1:])  # [most rows, taps, hidden]
        logits = self._logits.new_zeros(most, head.config.num_outputs)
        self._guess = BlockGuess(logits, features.new_zeros(most, features.shape[-1]))  # of all places, block by block
        self._memory = features.new_zeros(plain[0].rows, head.memory_width)  # [most sequences, width]
        device = steps.max_model_len, steps.block_size, steps.graphs, self._logits.device
        self._blocks, self._passes = CapturedPasses(blocks, *device), CapturedPasses(buckets, *device)
        for bucket in blocks:
            self._blocks.capture_bucket(bucket, self._block)
        for bucket in buckets:
            places = range(head.most_tokens if bucket in plain else 0)
            self._passes.capture_bucket(bucket, self._fill, *(partial(self._place, place) for place in places))
        self._draws = CapturedDraws(self._passes, plain, self._logits, mass, KINDS)

    def fill(self, entries: Sequence[BatchEntry], features: Tensor) -> bool:  # [rows, taps, hidden]
        """Stores the context of committed tokens; False where no graph holds them, and nothing is done."""
        bucket = bucket_of(self._limits, entries)
        if bucket is None or not self._passes.has(bucket):
            return False
        self._features[: len(features)].copy_(features)
        self._passes.prepare(bucket, entries)
        self._passes.replay(bucket)
        return True

    def holds(self, rows: Sequence[DeviceDrawing], blocks: Sequence[BatchEntry]) -> bool:
        """Whether the next tokens of these sequences, whose blocks are those, can be drawn without the host."""
        is_whole = all(len(block.token_ids) == self._head.rows for block in blocks)
        return is_whole and self._find(rows) is not None

    def draw(
        self,
        rows: Sequence[DeviceDrawing],
        blocks: Sequence[BatchEntry],  # of each its last committed token and masks
        before: Sequence[BatchEntry],  # of each its last committed token, with the blocks of all that it draws
        counts: Sequence[int],  # how many tokens each draws
    ) -> list[list[DraftedToken]]:
        """The next tokens of every sequence: fewer where logits were not finite. One wait for MOST_PASSES of them."""
        found = self._find(rows)
        if found is None:
            raise ValueError(f"{len(rows)} sequences: no captured draw holds them")
        block_bucket, bucket, taken = found
        self._blocks.prepare(block_bucket, [replace(block, num_logits=self._head.most_tokens) for block in blocks])
        self._blocks.replay(block_bucket)
        self._passes.prepare(bucket, before)
        ends = [entry.start + count for entry, count in zip(before, counts, strict=True)]
        drawn: list[list[DraftedToken]] = [[] for _ in rows]
        for start in range(0, max(counts), MOST_PASSES):
            places = range(start, min(max(counts), start + MOST_PASSES))
            self._draws.upload(taken, rows, ends)
            for place in places:
                self._passes.replay(bucket, 1 + place)  # behind the context's pass
                taken.replay()
            for tokens, more in zip(drawn, self._draws.read(taken, rows, len(places)), strict=True):
                tokens += more if len(tokens) == start else []
        return [tokens[:count] for tokens, count in zip(drawn, counts, strict=True)]

    def _find(self, rows: Sequence[DeviceDrawing]) -> tuple[Bucket, Bucket, CapturedDraw] | None:
        """The bucket of the blocks of these sequences, that of a row of each, and the draw."""
        size, count = self._head.rows, len(rows)
        block_bucket = choose_bucket(self._block_limits, count * size, count, size)
        bucket = choose_bucket(self._limits, count, count, 1)
        taken = self._draws.find(bucket, rows)
        if block_bucket is None or not self._blocks.has(block_bucket) or bucket is None or taken is None:
            return None
        return block_bucket, bucket, taken

    def _num_places(self, bucket: Bucket) -> int:
        """That the blocks of a bucket have; padding has none."""
        return min(bucket.rows, bucket.sequences * self._head.most_tokens)

    def _fill(self, batch: StaticBatch) -> None:
        self._head.fill(batch, self._features[: len(batch.token_ids)], self._cache)

    def _block(self, batch: StaticBatch) -> None:
        count = min(len(batch.token_ids), len(batch.context_lens) * self._head.most_tokens)
        guess = self._head.draft(replace(batch, logit_rows=batch.logit_rows[:count]), self._cache)
        self._guess.logits[:count].copy_(guess.logits)
        self._guess.hidden[:count].copy_(guess.hidden)

    def _place(self, place: int, batch: StaticBatch) -> None:
        """Leaves the laws of a place of every sequence, behind the tokens that the batch has."""
        count = len(batch.token_ids)
        rows = torch.arange(count, device=self._logits.device) * self._head.most_tokens + place
        places = rows.clamp(max=len(self._guess.logits) - 1)  # a sequence that pads has none
        memory = self._memory[:count] if place and self._head.memory_width else None
        chains = BlockChains(places, batch.token_ids.long(), memory, lambda logits: logits)
        logits, memory = self._head.at(self._guess, chains)
        self._logits[:count].copy_(logits)
        if memory is not None:
            self._memory[:count].copy_(memory)
