"""Several tokens of many sequences in a row, with one wait: captured passes, and captured draws between them.

The host launches a pass and a draw for each token and reads the table of all of them at the end. It holds for sequences
whose sampling is numbers alone; what depends on the tokens drawn (penalties, bad words) goes token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.buckets import Bucket
from outrider.engine.device_sampling import OFF, parameters_of, says_all
from outrider.engine.graphs import CapturedSteps
from outrider.engine.staging import StagedColumns, words_of
from outrider.kernels.philox import as_int64
from outrider.proposers.device_draws import KINDS, MOST_RANKED, DrawKind, DrawLayout, draw, draw_columns, slots_of
from outrider.proposers.draft_rows import Drafted, DraftRows, DraftRule

MOST_PASSES = 8


@dataclass(frozen=True, slots=True)
class CapturedDraw:
    """A captured draw: what it reads, what it leaves, and what runs it again."""

    columns: StagedColumns
    layout: DrawLayout
    table: Tensor  # [MOST_PASSES, width] int32
    replay: Callable[[], object]


class DeviceChains:
    """The captured draws of one model. Called from one thread."""

    def __init__(self, steps: CapturedSteps, vocab_size: int, mass: float) -> None:
        self._steps = steps
        self._mass = mass
        buckets = [bucket for bucket in steps.buckets if bucket.max_query_len == 1]  # the largest first
        layouts = {
            (bucket, kind): DrawLayout(bucket.sequences, kind, slots_of(vocab_size))
            for bucket in buckets
            for kind in KINDS
        }
        device = steps.logits.device
        words = max(words_of(draw_columns(bucket.sequences)) for bucket in buckets)
        self._host = steps.graphs.host_buffer(words)
        self._numbers = torch.zeros(words, dtype=torch.int32, device=device)
        size = max(MOST_PASSES * layout.width for layout in layouts.values())
        self._tables = torch.zeros(size, dtype=torch.int32, device=device)
        with torch.inference_mode():
            self._draws = {key: self._capture(key[0], layout) for key, layout in layouts.items()}

    def holds(self, rows: Sequence[DraftRows]) -> bool:
        """Whether the next tokens of these sequences can be drawn without the host."""
        return self._find(rows) is not None

    @torch.inference_mode()
    def run(self, rows: Sequence[DraftRows], num_passes: int) -> list[list[Drafted]]:
        """The next tokens of every sequence, up to MOST_PASSES: fewer where logits were not finite. Appended to their
        sequences, whose blocks hold a token more than is drawn."""
        found = self._find(rows)
        if found is None:
            raise ValueError(f"{len(rows)} sequences: no captured draw holds them")
        bucket, taken = found
        self._steps.run([row.batch_entry() for row in rows])
        follow = [BatchEntry([0], len(row.sequence), row.sequence.block_table, 1) for row in rows]
        self._steps.prepare(bucket, follow)
        self._upload(taken.columns, rows)
        taken.replay()
        for _ in range(num_passes - 1):
            self._steps.replay(bucket)
            taken.replay()
        table = self._steps.graphs.download(taken.table[:num_passes])
        drafted = _read(table, taken.layout, rows)
        for row, tokens in zip(rows, drafted, strict=True):
            row.sequence.tokens.extend(token.token_id for token in tokens)
            row.sequence.num_computed_tokens = len(row.sequence) - 1
        return drafted

    def _find(self, rows: Sequence[DraftRows]) -> tuple[Bucket, CapturedDraw] | None:
        """The draw of these sequences, and the bucket of all passes but the first, which may have more rows."""
        bucket = self._steps.plain_bucket(len(rows))
        if bucket is None or not self._steps.holds([row.num_rows for row in rows]):
            return None
        if not all(row.draws and says_all(row.sampler) and row.num_alternatives < MOST_RANKED for row in rows):
            return None
        rules, ranks = {row.law.rule for row in rows}, any(row.num_alternatives for row in rows)
        taken = self._draws.get((bucket, DrawKind(DraftRule.COUPLED in rules, DraftRule.REJECTION in rules, ranks)))
        return None if taken is None else (bucket, taken)

    def _capture(self, bucket: Bucket, layout: DrawLayout) -> CapturedDraw:
        steps = self._steps
        columns = StagedColumns(draw_columns(bucket.sequences), self._host, self._numbers)
        table = self._tables[: MOST_PASSES * layout.width].view(MOST_PASSES, layout.width)
        batch, logits = steps.batch_of(bucket), steps.logits[: bucket.rows]
        steps.prepare(bucket, [])

        def step() -> None:
            draw(logits, batch, columns, layout.kind, table, steps.block_size, self._mass)

        self._upload(columns, [])  # no pass ran: the few runs before a capture fit the table
        return CapturedDraw(columns, layout, table, steps.graphs.capture(step))

    def _upload(self, columns: StagedColumns, rows: Sequence[DraftRows]) -> None:
        """The host's buffer is free: whoever drew from it last has read the table."""
        parameters = [parameters_of(row.sampler) for row in rows]
        for name, off in OFF.items():
            columns.write(name, [values[name] for values in parameters], off)
        columns.write("seeds", [as_int64(row.law.key.seed) for row in rows], 0)
        columns.write("completions", [row.law.key.completion for row in rows], 0)
        columns.write("races", [row.law.rule == DraftRule.COUPLED for row in rows], 0)
        columns.write("weighs", [row.law.rule == DraftRule.REJECTION for row in rows], 0)
        columns.write("passes", [0])
        words = columns.words_up_to("passes", 1)
        self._steps.graphs.upload(self._numbers[:words], self._host[:words])


def _read(table: Tensor, layout: DrawLayout, rows: Sequence[DraftRows]) -> list[list[Drafted]]:
    """From what was drawn, [passes, width] on the host, to the tokens of each sequence, up to the first that is
    none."""
    passes = [_tokens(list(layout.split(line)), layout.kind, rows) for line in table]
    lines = (takewhile(lambda token: token is not None, line) for line in zip(*passes, strict=True))
    return [[token for token in line if token is not None] for line in lines]


def _tokens(parts: list[Tensor], kind: DrawKind, rows: Sequence[DraftRows]) -> list[Drafted | None]:
    """Of one pass."""
    ids = parts[0].tolist()
    ranked = parts[1].tolist() if kind.ranks else [()] * len(ids)
    tokens: list[Drafted | None] = []
    for index, row in enumerate(rows):
        token = ids[index]
        others = tuple(other for other in ranked[index] if other not in (token, -1))[: row.num_alternatives]
        entries = _entries(parts[-3:], index) if row.law.rule == DraftRule.REJECTION else (b"", b"")
        tokens.append(Drafted(token, *entries, others) if token >= 0 else None)
    return tokens


def _entries(parts: list[Tensor], index: int) -> tuple[bytes, bytes]:
    """Ids and weights of one sequence, packed."""
    counts, ids, weights = parts
    count = int(counts[index])
    packed = (entries[index, :count].numpy().astype("<u4").tobytes() for entries in (ids, weights))
    return next(packed), next(packed)
