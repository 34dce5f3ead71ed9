"""Several tokens of many sequences in a row, with one wait: captured passes, and captured draws between them.

A draw takes the next token of every sequence and leaves it where the next pass reads it (device_draw.py), so that the
host launches a pass and a draw for each token and waits for none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.batch import BatchEntry, Bucket
from outrider.engine.cuda_graphs import CapturedSteps
from outrider.proposers.device_draw import CapturedDraw, CapturedDraws
from outrider.proposers.draft_rows import DraftedToken, DraftRows


class DeviceChains:
    """The captured passes and draws of one model. Called from one thread."""

    def __init__(self, steps: CapturedSteps, mass: float) -> None:
        self._steps = steps
        buckets = [bucket for bucket in steps.buckets if bucket.max_query_len == 1]  # the largest first
        self._draws = CapturedDraws(steps, buckets, steps.logits, mass)

    def holds(self, rows: Sequence[DraftRows]) -> bool:
        """Whether the next tokens of these sequences can be drawn without the host."""
        return self._find(rows) is not None

    @torch.inference_mode()
    def run(self, rows: Sequence[DraftRows], num_passes: int) -> list[list[DraftedToken]]:
        """The next tokens of every sequence, up to MOST_PASSES: fewer where logits were not finite. Appended to their
        sequences, whose blocks hold a token more than is drawn."""
        found = self._find(rows)
        if found is None:
            raise ValueError(f"{len(rows)} sequences: no captured draw holds them")
        bucket, taken = found
        self._steps.run([row.batch_entry() for row in rows])
        lengths = [len(row.sequence) for row in rows]
        follow = [
            BatchEntry([0], length - 1, row.sequence.block_table, 1) for row, length in zip(rows, lengths, strict=True)
        ]
        self._steps.prepare(bucket, follow)
        self._draws.upload(taken, rows, [length + num_passes for length in lengths])
        taken.replay()
        for _ in range(num_passes - 1):
            self._steps.replay(bucket)
            taken.replay()
        drafted = self._draws.read(taken, rows, num_passes)
        for row, tokens in zip(rows, drafted, strict=True):
            row.text.append([token.token_id for token in tokens])
            row.sequence.num_computed_tokens = len(row.sequence) - 1
        return drafted

    def _find(self, rows: Sequence[DraftRows]) -> tuple[Bucket, CapturedDraw] | None:
        """The draw of these sequences, and the bucket of all passes but the first, which may have more rows."""
        bucket = self._steps.plain_bucket(len(rows))
        if bucket is None or not self._steps.holds([row.num_rows for row in rows]):
            return None
        if not all(row.draws and row.adapter is None for row in rows):
            return None
        taken = self._draws.find(bucket, rows)
        return None if taken is None else (bucket, taken)
