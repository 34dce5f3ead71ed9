"""Captured draws: the next token of every sequence, left where the next pass reads it.

What was drawn lies in a table, a row a pass, which is read once at the end. It holds for sequences whose sampling is
numbers alone; what depends on the tokens drawn (penalties, bad words) goes token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.engine.batch import Bucket, StaticBatch
from outrider.engine.cuda_graphs import CapturedPasses
from outrider.engine.sampler import (
    OFF,
    SequenceSampler,
    is_numeric_only,
    parameters_of,
    row_sampling,
    sampling_columns,
)
from outrider.engine.staging import Column, StagedColumns, words_of
from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise, words
from outrider.kernels.sampling.reference import MAX_ENTRIES, advance, best_ids, greedy_choice, logits_to_probs
from outrider.proposers.draft_rows import DraftedToken, DraftRule
from outrider.proposers.drawing import Drawing, drafted_tokens, pack, race

MOST_RANKED = 8  # ids of a row that are ranked: the drawn one, and the best of the others


class DrawKind(NamedTuple):
    """What a draw has to do beside the arg max of every row."""

    races: bool  # some are coupled
    weighs: bool  # some are drawn from integer weights
    ranks: bool  # some want top tokens


KINDS = (
    DrawKind(False, False, False), DrawKind(False, False, True), DrawKind(True, False, False),
    DrawKind(True, False, True), DrawKind(False, True, False),
)  # fmt: skip


def draw_columns(num_sequences: int) -> list[Column]:
    """What `draw` reads of every sequence, beside the batch."""
    return [
        *sampling_columns(num_sequences),
        Column("seeds", torch.int64, num_sequences),
        Column("completions", torch.int64, num_sequences),
        Column("draws", torch.int64, num_sequences),
        Column("races", torch.int32, num_sequences),
        Column("weighs", torch.int32, num_sequences),
        Column("ends", torch.int32, num_sequences),  # the positions that there are places for
        Column("passes", torch.int32, 1),  # that ran before
    ]


@dataclass(frozen=True, slots=True)
class DrawLayout:
    """The columns of the table of what was drawn, int32."""

    num_sequences: int
    kind: DrawKind
    slots: int  # entries of a vector of weights

    @property
    def width(self) -> int:
        """Numbers of one pass."""
        per_sequence = 1 + self.kind.ranks * MOST_RANKED + self.kind.weighs * (1 + 2 * self.slots)
        return self.num_sequences * per_sequence

    def split(self, row: Tensor) -> Iterator[Tensor]:
        """Ids [sequences]; then, if there are, ranked ids [sequences, MOST_RANKED]; numbers of entries [sequences], and
        their ids and weights [sequences, slots] each."""
        n, start = self.num_sequences, 0
        shapes = [(n,)] + [(n, MOST_RANKED)] * self.kind.ranks
        shapes += [(n,), (n, self.slots), (n, self.slots)] * self.kind.weighs
        for shape in shapes:
            size = shape[0] * (shape[1] if len(shape) > 1 else 1)
            yield row[start : start + size].view(shape)
            start += size


def slots_of(vocab_size: int) -> int:
    """Entries that a vector of weights may have."""
    return min(MAX_ENTRIES, vocab_size)


def draw(
    logits: Tensor,  # [sequences, vocab] float32
    batch: StaticBatch,  # of the pass that follows: its positions are those before the tokens drawn now
    columns: StagedColumns,
    kind: DrawKind,
    table: Tensor,  # [most passes, width] int32; the row of this pass is written
    block_size: int,
    mass: float,
) -> None:
    """Moves the batch on, draws, and puts what it drew into the batch and the table."""
    ends, passes = columns["ends"], columns["passes"]  # [sequences], [1]
    advance(batch.positions, batch.slot_mapping, batch.context_lens, batch.block_tables, ends, block_size)
    sampling = row_sampling(columns)
    ids, invalid = greedy_choice(logits, sampling)  # [sequences] each
    scores, extra = logits, []
    counters = columns["seeds"], batch.positions.long(), columns["completions"]
    if kind.races or kind.weighs:
        probs, _ = logits_to_probs(logits, sampling)  # [sequences, vocab]
    if kind.races:
        noise = exponential_noise(*counters, logits.shape[1])  # [sequences, vocab]
        is_raced = columns["races"] != 0  # [sequences]
        winners, raced = race(probs, noise)
        ids = torch.where(is_raced, winners, ids)
        scores = torch.where(is_raced[:, None], raced(), logits) if kind.ranks else logits
    if kind.ranks:
        extra.append(best_ids(scores, MOST_RANKED))  # [sequences, MOST_RANKED]
    if kind.weighs:
        random = words(*counters[:2], Purpose.DRAFT, counters[2], columns["draws"])
        drawn, *entries = _weighed(probs, random, mass)
        ids = torch.where(columns["weighs"] != 0, drawn, ids)
        extra += entries
    ids = ids.masked_fill(invalid, -1)
    batch.token_ids.copy_(ids.clamp(min=0))
    found = torch.cat([part.flatten().int() for part in (ids, *extra)])  # [width]
    table.index_copy_(0, passes.long(), found[None])
    passes.add_(1)


def _weighed(probs: Tensor, random: Tensor, mass: float) -> tuple[Tensor, ...]:
    """Ids and numbers of entries, [sequences] each, and the entries, [sequences, slots] each."""
    from outrider.kernels.sampling.triton import sample_rows

    return sample_rows(probs, random, mass, MAX_ENTRIES)


MOST_PASSES = 8


class DeviceDrawing(Drawing, Protocol):
    """One sequence whose next tokens are drawn without the host."""

    @property
    def sampler(self) -> SequenceSampler:
        """Its parameters, behind the committed tokens."""


@dataclass(frozen=True, slots=True)
class CapturedDraw:
    """A captured draw: what it reads, what it leaves, and what runs it again."""

    columns: StagedColumns
    layout: DrawLayout
    table: Tensor  # [MOST_PASSES, width] int32
    replay: Callable[[], object]


class CapturedDraws:
    """The captured draws behind the passes of one model or head. Called from one thread."""

    def __init__(
        self,
        passes: CapturedPasses,
        buckets: Sequence[Bucket],  # of one row a sequence, the largest first
        logits: Tensor,  # [at least the rows of the largest, vocab] float32: where the passes leave theirs
        mass: float,
        kinds: Sequence[DrawKind] = KINDS,
    ) -> None:
        self._passes, self._logits, self._mass = passes, logits, mass
        slots = slots_of(logits.shape[1])
        layouts = {(bucket, kind): DrawLayout(bucket.sequences, kind, slots) for bucket in buckets for kind in kinds}
        words = max(words_of(draw_columns(bucket.sequences)) for bucket in buckets)
        self._host = torch.zeros(words, dtype=torch.int32)
        self._numbers = torch.zeros(words, dtype=torch.int32, device=logits.device)
        size = max(MOST_PASSES * layout.width for layout in layouts.values())
        self._tables = torch.zeros(size, dtype=torch.int32, device=logits.device)
        with torch.inference_mode():
            self._draws = {key: self._capture(key[0], layout) for key, layout in layouts.items()}

    def find(self, bucket: Bucket | None, rows: Sequence[DeviceDrawing]) -> CapturedDraw | None:
        """What draws the next tokens of these sequences; None where that takes the host."""
        if not all(is_numeric_only(row.sampler) and row.num_top_tokens < MOST_RANKED for row in rows):
            return None
        if bucket is None or any(row.draft_sampling.mapping is not None or row.wants_confidence for row in rows):
            return None  # captured draws take the model's own ids and weights, and do not end early
        rules, ranks = {row.draft_sampling.rule for row in rows}, any(row.num_top_tokens for row in rows)
        return self._draws.get((bucket, DrawKind(DraftRule.COUPLED in rules, DraftRule.REJECTION in rules, ranks)))

    def upload(self, taken: CapturedDraw, rows: Sequence[DeviceDrawing], ends: Sequence[int]) -> None:
        """Tells the device how the sequences draw, and how many positions each has places for."""
        self._upload(taken.columns, rows, ends)

    def read(self, taken: CapturedDraw, rows: Sequence[DeviceDrawing], num_passes: int) -> list[list[DraftedToken]]:
        """Waits for what so many draws gave, the tokens of each sequence, up to the first that is none."""
        table = self._passes.graphs.download(taken.table[:num_passes])()
        return _read(table, taken.layout, rows)

    def _capture(self, bucket: Bucket, layout: DrawLayout) -> CapturedDraw:
        passes = self._passes
        columns = StagedColumns(draw_columns(bucket.sequences), self._host, self._numbers)
        table = self._tables[: MOST_PASSES * layout.width].view(MOST_PASSES, layout.width)
        batch, logits = passes.batch_of(bucket), self._logits[: bucket.rows]
        passes.prepare(bucket, [])

        def step() -> None:
            draw(logits, batch, columns, layout.kind, table, passes.block_size, self._mass)

        self._upload(columns, [], [])  # no pass ran: the few runs before a capture fit the table
        return CapturedDraw(columns, layout, table, passes.graphs.capture(step))

    def _upload(self, columns: StagedColumns, rows: Sequence[DeviceDrawing], ends: Sequence[int]) -> None:
        parameters = [parameters_of(row.sampler) for row in rows]
        for name, off in OFF.items():
            columns.write(name, [values[name] for values in parameters], off)
        samplings = [row.draft_sampling for row in rows]
        columns.write("seeds", [as_int64(sampling.key.seed) for sampling in samplings], 0)
        columns.write("completions", [sampling.key.completion for sampling in samplings], 0)
        columns.write("draws", [sampling.key.draw for sampling in samplings], 0)
        columns.write("races", [sampling.rule == DraftRule.COUPLED for sampling in samplings], 0)
        columns.write("weighs", [sampling.rule == DraftRule.REJECTION for sampling in samplings], 0)
        columns.write("ends", ends, 0)
        columns.write("passes", [0])
        words = columns.words_up_to("passes", 1)
        self._passes.graphs.upload(self._numbers[:words], self._host[:words])


def _read(table: Tensor, layout: DrawLayout, rows: Sequence[Drawing]) -> list[list[DraftedToken]]:
    """From what was drawn, [passes, width] on the host, to the tokens of each sequence, up to the first that is
    none."""
    passes = [_tokens(list(layout.split(line)), layout.kind, rows) for line in table]
    lines = (takewhile(lambda token: token is not None, line) for line in zip(*passes, strict=True))
    return [[token for token in line if token is not None] for line in lines]


def _tokens(parts: list[Tensor], kind: DrawKind, rows: Sequence[Drawing]) -> list[DraftedToken | None]:
    """Of one pass."""
    count = len(rows)  # the bucket may have more
    ids = parts[0][:count].tolist()
    ranked = parts[1][:count].tolist() if kind.ranks else [()] * count
    weighs = [row.draft_sampling.rule == DraftRule.REJECTION for row in rows]
    entries = [_entries(parts[-3:], index) if weighed else (b"", b"") for index, weighed in enumerate(weighs)]
    return drafted_tokens(ids, ranked, entries, rows)


def _entries(parts: list[Tensor], index: int) -> tuple[bytes, bytes]:
    """Ids and weights of one sequence, packed."""
    counts, ids, weights = parts
    count = int(counts[index])
    return pack(ids[index, :count]), pack(weights[index, :count])
