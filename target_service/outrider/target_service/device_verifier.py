"""Windows judged on a device: their numbers go there in one copy, kernels judge them, and the results come back in
another. Nothing is read on the host in between, so that where the pass was a captured one, the judging is, too,
launched behind it while the pass still runs. What requests change of single logits (biases, bans, penalties, masks) is
written over those of the captured pass, row by row, before its judging reads them. Trees, and changed rows of which log
probabilities are told, are judged by the same kernels, launched one by one.

What a rule needs more is launched where one of the windows has it: the race under coupling, uniforms and the draw from
what is left under rejection, and its blocks. Random numbers are drawn where they are used: counters take no memory,
which is what a device is short of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda_graphs import CapturedSteps, GraphDevice
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import OFF, assemble, is_numeric_only, parameters_of, row_sampling, sampling_columns
from outrider.engine.staging import Column, StagedColumns, index_on, words_of
from outrider.kernels.random.reference import Purpose, as_int64, words
from outrider.kernels.sampling.reference import MAX_ENTRIES, adjust_logits
from outrider.kernels.types import PackedEntries, RowSampling, Windows
from outrider.kernels.verify.reference import accept_uniforms, coupled_draw
from outrider.target_service.grammars import StepMasks
from outrider.target_service.outputs import LaunchedVerify, VerifiedWindow, verified_windows
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetSequence
from outrider.target_service.verifier import (
    HostVerifier,
    VerifyResult,
    VerifyRule,
    draft_ids_of,
    judge,
    layout_of,
    parents_of,
    rows_of,
    rule_of,
    weights_of,
)

LAYOUT = tuple(column.name for column in fields(Windows))
COUNTERS = ("seeds", "positions", "completions", "draws")  # of each row


def verify_columns(num_rows: int, num_windows: int, num_entries: int) -> list[Column]:
    """What a `DeviceBatch` reads; the entries of draft weights come last, since there may be few."""
    by_window = ("row_starts", "num_rows", "num_drafted", "draft_starts", "rules")
    by_draft = ("draft_ids", "row_of_draft", "window_of_draft", "offset_of_draft")  # no more of them than rows
    return [
        *sampling_columns(num_rows),
        *(Column(name, torch.int64, num_rows) for name in (*COUNTERS, *by_draft)),
        Column("greedy_rows", torch.int32, num_rows),
        *(Column(name, torch.int64, num_windows) for name in by_window),
        Column("entry_starts", torch.int64, num_rows + 1),
        Column("entries", torch.int32, 2 * num_entries),  # the id and the weight of one, then those of the next
    ]


class DeviceBatch:
    """Windows of a step, read from its columns. Every rule up to the last one of its windows is applied to all, so that
    what is captured for a size is three calls."""

    is_plain = False  # where nothing was drafted, padding is

    def __init__(self, columns: StagedColumns, max_rule: VerifyRule, parents: Tensor | None = None) -> None:
        self._columns = columns
        self.parents = parents
        self.rules = tuple(rule for rule in VerifyRule if rule <= max_rule)
        self.windows = Windows(*(columns[name] for name in LAYOUT))
        self.draft_ids = columns["draft_ids"]  # [drafted] int64
        self._counters = [columns[name] for name in COUNTERS]  # [rows] int64 each

    @property
    def greedy_rows(self) -> Tensor | None:
        return self._columns["greedy_rows"] != 0 if len(self.rules) > 1 else None

    @property
    def rejecting(self) -> Tensor | None:
        return self._columns["rules"] >= VerifyRule.REJECTION if VerifyRule.REJECTION in self.rules else None

    @property
    def by_block(self) -> Tensor | None:
        return self._columns["rules"] == VerifyRule.BLOCK if VerifyRule.BLOCK in self.rules else None

    @property
    def draft_weights(self) -> PackedEntries:
        ids, weights = self._columns["entries"].view(-1, 2).unbind(1)  # [entries] each
        return PackedEntries(ids.contiguous(), weights.contiguous(), self._columns["entry_starts"])

    def race(self, probs: Tensor) -> Tensor:
        seeds, positions, completions, _ = self._counters
        return coupled_draw(probs, seeds, positions, completions)

    def uniforms(self, rows: Tensor) -> Tensor:
        seeds, positions, completions, draws = self._counters
        return accept_uniforms(words(seeds, positions, Purpose.ACCEPT, completions, draws))[rows]

    def next_words(self, rows: Tensor, is_bonus: Tensor) -> Tensor:
        seeds, positions, completions, draws = (counter[rows] for counter in self._counters)  # [n] each
        purposes = torch.where(is_bonus, int(Purpose.BONUS), int(Purpose.RECOVERED))  # [n]
        return words(seeds, positions, purposes, completions, draws)


class VerifyInputs:
    """What a device is told of the windows of a step: numbers by row, by drafted token and by window. Rows of different
    windows lie one after the other."""

    def __init__(self, windows: Sequence[ScheduledSequence]) -> None:
        self.windows = windows
        self.num_rows = sum(window.num_verify_rows for window in windows)
        self.max_rule = max((rule_of(window.target) for window in windows), default=VerifyRule.GREEDY)
        self.parents = parents_of(windows)
        self.changed = [window for window in windows if not is_numeric_only(window.target.sampler)]  # single logits
        vectors = [vector for window in windows for vector in weights_of(window)]  # by drafted token
        self._entries = [vector for vector in vectors if vector is not None]
        self._entry_starts = list(accumulate((len(v[0]) // 4 if v is not None else 0 for v in vectors), initial=0))

    @property
    def num_entries(self) -> int:
        """Entries of all draft weights."""
        return self._entry_starts[-1]

    def write(self, staged: StagedColumns) -> int:
        """Writes them and their padding to the host's buffer; returns how many words of it hold them."""
        for name, values in self._columns().items():
            staged.write(name, values, OFF.get(name, 0))
        staged.write("entry_starts", self._entry_starts, self.num_entries)
        staged.write("entries", self._packed_entries())
        return staged.words_up_to("entries", 2 * self.num_entries)

    def _columns(self) -> dict[str, Any]:
        """All but the entries; what is one number a window is repeated by row."""
        layout = layout_of(self.windows)
        by_window = [
            parameters_of(window.target.sampler)
            | {
                "seeds": as_int64(window.target.random_key.seed),
                "completions": window.target.random_key.completion,
                "draws": window.target.window_key(window.committed).draw,
                "first_row_at": window.committed - row_start,  # position of a row less its place
                "greedy_rows": window.target.greedy,
            }
            for window, row_start in zip(self.windows, layout.row_starts.tolist(), strict=True)
        ]
        num_rows = layout.num_rows.numpy()  # [n]
        by_row: dict[str, NDArray[Any]] = {
            name: np.array([numbers[name] for numbers in by_window]).repeat(num_rows) for name in _BY_ROW
        }
        by_row["positions"] = by_row.pop("first_row_at") + np.arange(self.num_rows)
        if self.parents is not None:
            by_row["positions"] = np.array([w.committed + depth for w in self.windows for depth in w.row_depths])
        rules = [rule_of(window.target) for window in self.windows]
        of_layout = {name: getattr(layout, name) for name in LAYOUT}
        return by_row | of_layout | {"draft_ids": draft_ids_of(self.windows), "rules": rules}

    def _packed_entries(self) -> NDArray[np.int32]:
        """Side by side. What is above 2^31 turns negative, and is no more usable than before."""
        packed = np.empty((self.num_entries, 2), dtype="<i4")
        for place, column in enumerate(zip(*self._entries, strict=True)):
            packed[:, place] = np.frombuffer(b"".join(column), dtype="<i4")
        return packed.reshape(-1)


_BY_ROW = (*OFF, "seeds", "completions", "draws", "first_row_at", "greedy_rows")


@dataclass(frozen=True, slots=True, order=True)
class VerifySize:
    """What one captured call holds."""

    num_rows: int
    num_windows: int


@dataclass(frozen=True, slots=True)
class CapturedVerify:
    """A captured call: what it reads, what it leaves, and what runs it again."""

    columns: StagedColumns
    sampling: RowSampling  # kept: the replay reads its memory
    results: Tensor  # [2 windows + rows] int64
    replay: Callable[[], object]


class DeviceVerifier:
    """Judges windows of many sequences. Called from one thread."""

    def __init__(self, device: torch.device, graphs: GraphDevice) -> None:
        self._device = device
        self._graphs = graphs
        self._logits = torch.empty(0)  # those of captured passes, once there are some
        self._host = self._numbers = torch.empty(0, dtype=torch.int32)
        self._captured: dict[tuple[VerifySize, VerifyRule], CapturedVerify] = {}
        self._sizes: list[VerifySize] = []  # the smallest first

    @torch.inference_mode()
    def capture(self, steps: CapturedSteps) -> None:
        """Captures what follows the captured passes, the largest first: smaller ones find its memory."""
        self._logits = steps.logits
        self._sizes = sorted({VerifySize(bucket.rows, bucket.sequences) for bucket in steps.buckets})
        self._host, self._numbers = self._buffers(max(map(_words, self._sizes)))
        for size in reversed(self._sizes):
            layout = verify_columns(size.num_rows, size.num_windows, size.num_rows * MAX_ENTRIES)
            columns = StagedColumns(layout, self._host, self._numbers)
            self._upload(VerifyInputs(()), columns, self._host, self._numbers)
            for rule in VerifyRule:
                self._captured[size, rule] = self._capture(size, columns, rule)

    @torch.inference_mode()
    def launch(
        self, logits: Tensor, windows: Sequence[ScheduledSequence], masks: StepMasks | None = None
    ) -> LaunchedVerify:
        """Has every window judged behind the pass; logits are [rows of the step that want them, vocab] float32."""
        if not windows:
            return LaunchedVerify(list)
        token_mask = None if masks is None else masks.rows_of(windows)
        inputs = VerifyInputs(windows)
        captured = self._find(logits, inputs)
        if captured is not None:
            if inputs.changed:
                self._change(logits, inputs, token_mask)
            self._upload(inputs, captured.columns, self._host, self._numbers)
            captured.replay()
            results, places = captured.results, len(captured.columns["rules"])
        else:
            logits = rows_of(windows, logits)
            results, places = self._launch(logits, inputs, token_mask), len(windows)
        ends = (places, 2 * places, 2 * places + (len(results) - 2 * places if inputs.parents is None else len(logits)))
        downloaded = self._graphs.download(results)

        def read() -> list[VerifiedWindow]:
            accepted, next_ids, invalid, held = downloaded().tensor_split(ends)
            found = accepted[: len(windows)], next_ids[: len(windows)], invalid, held
            return verified_windows(logits, windows, *found, token_mask=token_mask)

        return LaunchedVerify(read, results[places : places + len(windows)])

    def takes_masks_lazily(self, target: TargetSequence) -> bool:
        """Never: to ask on the host what a row would choose, and then choose again, the device would have to wait."""
        return False

    def prepare(self, target: TargetSequence) -> bool:
        """Random numbers are drawn where they are used: there is nothing to prepare."""
        return False

    def _find(self, logits: Tensor, inputs: VerifyInputs) -> CapturedVerify | None:
        """The captured call that holds a step; None where its logits are no captured pass's, or are told as they were
        before they were changed."""
        is_captured = logits.data_ptr() == self._logits.data_ptr() and inputs.num_rows == len(logits)
        if (
            not is_captured
            or inputs.parents is not None
            or any(window.target.open.sampling.logprobs is not None for window in inputs.changed)
            or inputs.num_entries > inputs.num_rows * MAX_ENTRIES
        ):
            return None
        wanted = inputs.num_rows, len(inputs.windows)
        fitting = (size for size in self._sizes if size.num_rows >= wanted[0] and size.num_windows >= wanted[1])
        size = next(fitting, None)
        return None if size is None else self._captured[size, inputs.max_rule]

    def _change(self, logits: Tensor, inputs: VerifyInputs, token_mask: Tensor | None) -> None:
        """Writes what the windows ask for over the rows that judge them. A row that is invalid stays so, whatever a
        mask hides of it."""
        places = [row for window in inputs.changed for row in window.verify_rows]
        plans = [rows for window in inputs.changed for rows in window.sampling_rows]
        masks = None if token_mask is None else token_mask[torch.tensor(places)]
        rows = index_on(places, self._device)
        raw = logits[rows]  # [changed, vocab]
        changed = adjust_logits(raw, assemble(plans, self._device, masks, for_argmax=True))
        invalid = ~raw.amax(dim=-1, keepdim=True).isfinite()  # [changed, 1]
        logits[rows] = changed.masked_fill(invalid, torch.nan)

    def _launch(self, logits: Tensor, inputs: VerifyInputs, token_mask: Tensor | None) -> Tensor:
        layout = verify_columns(inputs.num_rows, len(inputs.windows), inputs.num_entries)
        host, device = self._buffers(words_of(layout))
        columns = StagedColumns(layout, host, device)
        self._upload(inputs, columns, host, device)
        if inputs.changed:
            plans = [rows for window in inputs.windows for rows in window.sampling_rows]
            sampling = assemble(plans, self._device, token_mask)
        else:
            sampling = row_sampling(columns)
        parents = None if inputs.parents is None else inputs.parents.to(self._device)
        return _results_of(judge(logits, sampling, DeviceBatch(columns, inputs.max_rule, parents)))

    def _capture(self, size: VerifySize, columns: StagedColumns, rule: VerifyRule) -> CapturedVerify:
        results = torch.zeros(2 * size.num_windows + size.num_rows, dtype=torch.int64, device=self._device)
        sampling = row_sampling(columns)

        def step() -> None:
            judged = judge(self._logits[: size.num_rows], sampling, DeviceBatch(columns, rule))
            results.copy_(_results_of(judged))

        return CapturedVerify(columns, sampling, results, self._graphs.capture(step))

    def _buffers(self, words: int) -> tuple[Tensor, Tensor]:
        host = torch.zeros(words, dtype=torch.int32)
        return host, torch.zeros(words, dtype=torch.int32, device=self._device)

    def _upload(self, inputs: VerifyInputs, columns: StagedColumns, host: Tensor, device: Tensor) -> None:
        words = inputs.write(columns)
        self._graphs.upload(device[:words], host[:words])


def _results_of(judged: VerifyResult) -> Tensor:  # [2 n + rows] int64, and [drafted] where there are trees
    accepted, next_ids, invalid, held = judged
    return torch.cat((accepted, next_ids, invalid.long(), *(() if held is None else (held.long(),))))


def _words(size: VerifySize) -> int:
    return words_of(verify_columns(size.num_rows, size.num_windows, size.num_rows * MAX_ENTRIES))


class StepVerifier(Protocol):
    """Judges the windows of a step."""

    def launch(
        self, logits: Tensor, windows: Sequence[ScheduledSequence], masks: StepMasks | None = None
    ) -> LaunchedVerify:
        """What judges every window whose masks are not late; logits are [rows that want them, vocab] float32, and
        `masks` those of constraints, None where no row has one."""

    def takes_masks_lazily(self, target: TargetSequence) -> bool:
        """Whether masks of a sequence are made where judging asks for them, not before."""

    def prepare(self, target: TargetSequence) -> bool:
        """Uses idle time for a sequence's next window; whether there was something to do."""


def verifier_of(runner: ModelRunner, vocab_size: int) -> StepVerifier:
    """The verifier of the place where the model is."""
    device = runner.model.device
    if device.type == "cpu":
        return HostVerifier(vocab_size)
    from outrider.engine.cuda_graphs import CudaGraphs

    with torch.cuda.device(device):
        steps = runner.captured
        verifier = DeviceVerifier(device, CudaGraphs(device) if steps is None else steps.graphs)
        if steps is not None:
            verifier.capture(steps)
    return verifier
