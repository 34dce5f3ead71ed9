"""Verdicts on a device: a step's windows go there in one copy, are judged by kernels, and come back in another.

Where the pass was a captured one, so is the judging, launched behind it while the pass still runs. Requests that change
single logits (biases, bans, penalties) are judged by the same kernels, launched one by one.

How a device judges the windows of a step: kernels over columns of numbers, nothing read on the host, so that it can
be captured and launched behind the pass.

Windows of every rule share one call. What a rule needs more is launched where one of the windows has it: an arg max of
every row under greedy, the race under coupling, uniforms and the draw from what is left under rejection. Random numbers
are drawn where they are used: counters take no memory, which is what a device is short of.

What a device is told of the windows of a step: numbers by row, by drafted token and by window.

Which verifier a target has: the host's, or the device's behind its captured passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.cuda_graphs import CapturedSteps, GraphDevice
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import OFF, assemble, is_numeric_only, parameters_of, row_sampling, sampling_columns
from outrider.engine.staging import Column, StagedColumns, words_of
from outrider.kernels.random.reference import Purpose, as_int64, words
from outrider.kernels.sampling.reference import MAX_ENTRIES, greedy_choice, logits_to_probs
from outrider.kernels.types import RowSampling, Windows
from outrider.kernels.verify.reference import accept_uniforms, coupled_accept, coupled_draw, draw
from outrider.target_service.sequence import TargetSequence
from outrider.target_service.verifier import HostVerifier, Verdict, VerifyRows, VerifyRule, rule_of, verdicts_of

COUNTER_COLUMNS = ("seeds", "positions", "completions")  # of each row
DRAFT_COLUMNS = ("draft_ids", "row_of_draft", "window_of_draft", "offset_of_draft")  # no more of them than rows
WINDOW_COLUMNS = ("row_starts", "num_rows", "num_drafted", "draft_starts", "rules")


def verify_columns(num_rows: int, num_windows: int, num_entries: int) -> list[Column]:
    """What `verify_windows` reads; the entries of draft weights come last, since there may be few."""
    return [
        *sampling_columns(num_rows),
        *(Column(name, torch.int64, num_rows) for name in (*COUNTER_COLUMNS, *DRAFT_COLUMNS)),
        Column("greedy_rows", torch.int32, num_rows),
        *(Column(name, torch.int64, num_windows) for name in WINDOW_COLUMNS),
        Column("entry_starts", torch.int64, num_rows + 1),
        Column("entries", torch.int32, 2 * num_entries),  # the id and the weight of one, then those of the next
    ]


def verify_windows(
    logits: Tensor,  # [rows, vocab] float32
    columns: StagedColumns,
    sampling: RowSampling,
    max_rule: VerifyRule,  # the last of the rules of the windows
) -> Tensor:  # [2 n + rows] int64
    """Of each window how many drafted tokens are accepted, then of each the token after them (-1: none), then which
    rows are invalid."""
    windows = Windows(*(columns[name] for name in _WINDOWS))
    own, invalid = greedy_choice(logits, sampling)  # [rows] each
    own = own.masked_fill(invalid, -1)
    probs = logits
    if max_rule > VerifyRule.GREEDY:
        probs, _ = logits_to_probs(logits, sampling)  # [rows, vocab]
        seeds, positions, completions = (columns[name] for name in COUNTER_COLUMNS)  # [rows] each
        raced = coupled_draw(probs, seeds, positions, completions)
        own = torch.where(columns["greedy_rows"] != 0, own, raced)
    accepted, next_ids = coupled_accept(own, windows, columns["draft_ids"])  # [n] each
    if max_rule == VerifyRule.REJECTION:
        rejects = columns["rules"] == VerifyRule.REJECTION  # [n]
        accepted_by_rejection, drawn = _verify_by_rejection(probs, columns, windows)
        accepted = torch.where(rejects, accepted_by_rejection, accepted)
        next_ids = torch.where(rejects, drawn, next_ids)
    return torch.cat((accepted, next_ids, invalid.long()))


def _verify_by_rejection(probs: Tensor, columns: StagedColumns, windows: Windows) -> tuple[Tensor, Tensor]:
    """Rejection sampling of all windows: the numbers accepted and the next ids, [n] int64 each."""
    from outrider.kernels.verify.triton import PackedEntries, accept_packed

    seeds, positions, completions = (columns[name] for name in COUNTER_COLUMNS)  # [rows] each
    uniforms = accept_uniforms(words(seeds, positions, Purpose.ACCEPT, completions))  # [rows]
    ids, weights = columns["entries"].view(-1, 2).unbind(1)  # [entries] each
    entries = PackedEntries(ids.contiguous(), weights.contiguous(), columns["entry_starts"])
    accepted, left = accept_packed(probs, windows, columns["draft_ids"], entries, uniforms[windows.row_of_draft])
    rows = windows.next_rows(accepted)  # [n]
    purposes = torch.where(accepted == windows.num_drafted, int(Purpose.BONUS), int(Purpose.RECOVERED))  # [n]
    return accepted, draw(left, words(seeds[rows], positions[rows], purposes, completions[rows]))


_WINDOWS = ("row_starts", "num_rows", "num_drafted", *DRAFT_COLUMNS[1:], "draft_starts")  # the fields of Windows

Columns = dict[str, NDArray[Any]]


@dataclass(slots=True)
class VerifyInputs:
    """The numbers of each window, and the drafted tokens and entries of draft weights of all."""

    windows: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _OF_WINDOW})
    draft_ids: list[int] = field(default_factory=list)
    entry_starts: list[int] = field(default_factory=lambda: [0])  # of each drafted token
    entries: list[tuple[bytes, bytes]] = field(default_factory=list)  # ids and weights
    max_rule: VerifyRule = VerifyRule.GREEDY
    changes_logits: bool = False  # biases, bans or penalties: more than the columns say

    @staticmethod
    def of(verify_rows: Sequence[VerifyRows]) -> VerifyInputs:
        """The windows' rows lie one after the other."""
        inputs = VerifyInputs()
        for member in verify_rows:
            inputs._add(member)
        return inputs

    @property
    def num_windows(self) -> int:
        """Windows of the step."""
        return len(self.windows["rules"])

    @property
    def num_rows(self) -> int:
        """Rows that judge them."""
        return int(sum(self.windows["num_rows"]))

    @property
    def num_entries(self) -> int:
        """Entries of all draft weights."""
        return self.entry_starts[-1]

    def write(self, staged: StagedColumns) -> int:
        """Writes them and their padding to the host's buffer; returns how many words of it hold them."""
        for name, values in self._columns().items():
            staged.write(name, values, OFF.get(name, 0))
        staged.write("entry_starts", self.entry_starts, self.num_entries)
        staged.write("entries", self._packed_entries())
        return staged.words_up_to("entries", 2 * self.num_entries)

    def _add(self, member: VerifyRows) -> None:
        target, window, rule = member.entry.target, member.entry.window, rule_of(member.entry.target)
        of_window = parameters_of(target.sampler) | {
            "seeds": as_int64(target.random_key.seed),
            "completions": target.random_key.completion,
            "committed": member.entry.committed,
            "num_rows": len(member.rows),
            "num_drafted": len(window.ids),
            "rules": rule,
        }
        for name, value in of_window.items():
            self.windows[name].append(value)
        self.draft_ids += window.ids
        vectors = window.weights if rule == VerifyRule.REJECTION else (None,) * len(window.ids)
        for vector in vectors:  # one whose ids and weights differ in number is one-hot, as one that is not there
            usable = vector is not None and len(vector.ids) == len(vector.weights) and len(vector.ids) % 4 == 0
            if vector is not None and usable:
                self.entries.append((vector.ids, vector.weights))
            self.entry_starts.append(self.num_entries + (len(vector.ids) // 4 if vector is not None and usable else 0))
        self.max_rule = max(self.max_rule, rule)
        self.changes_logits |= not is_numeric_only(target.sampler)

    def _columns(self) -> Columns:
        """By row what is one number a window, and where rows and drafted tokens lie."""
        windows: Columns = {name: np.array(self.windows[name], dtype) for name, dtype in _OF_WINDOW.items()}
        num_rows, num_drafted = windows["num_rows"], windows["num_drafted"]  # [n] each
        row_starts, draft_starts = num_rows.cumsum() - num_rows, num_drafted.cumsum() - num_drafted  # [n] each
        rows, drafts = np.arange(num_rows.sum()), np.arange(num_drafted.sum())
        by_row = {name: windows[name].repeat(num_rows) for name in (*OFF, "seeds", "completions")}
        return by_row | {
            "positions": rows + (windows["committed"] - row_starts).repeat(num_rows),
            "greedy_rows": (windows["rules"] == VerifyRule.GREEDY).repeat(num_rows),
            "draft_ids": np.array(self.draft_ids, np.int64),
            "row_of_draft": drafts + (row_starts - draft_starts).repeat(num_drafted),
            "window_of_draft": np.arange(self.num_windows).repeat(num_drafted),
            "offset_of_draft": drafts - draft_starts.repeat(num_drafted),
            "row_starts": row_starts,
            "num_rows": num_rows,
            "num_drafted": num_drafted,
            "draft_starts": draft_starts,
            "rules": windows["rules"],
        }

    def _packed_entries(self) -> NDArray[np.int32]:
        """Side by side. What is above 2^31 turns negative, and is no more usable than before."""
        packed = np.empty((self.num_entries, 2), dtype="<i4")
        for place, column in enumerate(zip(*self.entries, strict=True)):
            packed[:, place] = np.frombuffer(b"".join(column), dtype="<i4")
        return packed.reshape(-1)


_OF_WINDOW: dict[str, type] = {
    "temperature": np.float32, "min_p": np.float32, "top_k": np.int64, "top_p": np.float64, "seeds": np.int64,
    "completions": np.int64, "committed": np.int64, "num_rows": np.int64, "num_drafted": np.int64, "rules": np.int64,
}  # fmt: skip


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
            self._upload(VerifyInputs(), columns, self._host, self._numbers)
            for rule in VerifyRule:
                self._captured[size, rule] = self._capture(size, columns, rule)

    @torch.inference_mode()
    def verify(self, logits: Tensor, verify_rows: Sequence[VerifyRows]) -> list[Verdict]:
        """Judges every window; logits are [rows of the step that want logits, vocab] float32."""
        if not verify_rows:
            return []
        inputs = VerifyInputs.of(verify_rows)
        captured = self._find(logits, inputs)
        if captured is not None:
            self._upload(inputs, captured.columns, self._host, self._numbers)
            captured.replay()
            results, num_windows = captured.results, len(captured.columns["rules"])
        else:
            logits = self._rows_of(logits, verify_rows)
            results, num_windows = self._launch(logits, verify_rows, inputs), len(verify_rows)
        accepted, next_ids, invalid = self._graphs.download(results).tensor_split((num_windows, 2 * num_windows))
        return verdicts_of(logits, verify_rows, accepted[: len(verify_rows)], next_ids[: len(verify_rows)], invalid)

    def prepare(self, target: TargetSequence) -> bool:
        """Random numbers are drawn where they are used: there is nothing to prepare."""
        return False

    def _find(self, logits: Tensor, inputs: VerifyInputs) -> CapturedVerify | None:
        """The captured call that holds a step; None where its logits are no captured pass's, or are changed."""
        is_captured = logits.data_ptr() == self._logits.data_ptr() and inputs.num_rows == len(logits)
        if not is_captured or inputs.changes_logits or inputs.num_entries > inputs.num_rows * MAX_ENTRIES:
            return None
        wanted = inputs.num_rows, inputs.num_windows
        fitting = (size for size in self._sizes if size.num_rows >= wanted[0] and size.num_windows >= wanted[1])
        size = next(fitting, None)
        return None if size is None else self._captured[size, inputs.max_rule]

    def _launch(self, logits: Tensor, verify_rows: Sequence[VerifyRows], inputs: VerifyInputs) -> Tensor:
        layout = verify_columns(inputs.num_rows, inputs.num_windows, inputs.num_entries)
        host, device = self._buffers(words_of(layout))
        columns = StagedColumns(layout, host, device)
        self._upload(inputs, columns, host, device)
        plans = [member.plan for member in verify_rows]
        sampling = assemble(plans, self._device) if inputs.changes_logits else row_sampling(columns)
        return verify_windows(logits, columns, sampling, inputs.max_rule)

    def _rows_of(self, logits: Tensor, verify_rows: Sequence[VerifyRows]) -> Tensor:
        """The rows that judge; the others are a prompt's."""
        rows = [row for member in verify_rows for row in member.rows]
        return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=self._device)]

    def _capture(self, size: VerifySize, columns: StagedColumns, rule: VerifyRule) -> CapturedVerify:
        results = torch.zeros(2 * size.num_windows + size.num_rows, dtype=torch.int64, device=self._device)
        sampling = row_sampling(columns)

        def step() -> None:
            results.copy_(verify_windows(self._logits[: size.num_rows], columns, sampling, rule))

        return CapturedVerify(columns, sampling, results, self._graphs.capture(step))

    def _buffers(self, words: int) -> tuple[Tensor, Tensor]:
        return self._graphs.host_buffer(words), torch.zeros(words, dtype=torch.int32, device=self._device)

    def _upload(self, inputs: VerifyInputs, columns: StagedColumns, host: Tensor, device: Tensor) -> None:
        """The host's buffer is free: whoever judged from it last has read the results."""
        words = inputs.write(columns)
        self._graphs.upload(device[:words], host[:words])


def _words(size: VerifySize) -> int:
    return words_of(verify_columns(size.num_rows, size.num_windows, size.num_rows * MAX_ENTRIES))


class StepVerifier(Protocol):
    """Judges the windows of a step."""

    def verify(self, logits: Tensor, verify_rows: Sequence[VerifyRows]) -> list[Verdict]:
        """Verdicts of every window, in no fixed order; logits are [rows that want logits, vocab] float32."""

    def prepare(self, target: TargetSequence) -> bool:
        """Uses idle time for a sequence's next window; whether there was something to do."""


def verifier_of(runner: ModelRunner, vocab_size: int) -> StepVerifier:
    """The verifier of the place where the model is."""
    device = runner.model.device
    if device.type == "cpu":
        return HostVerifier(vocab_size)
    from outrider.engine.cuda_graphs import CudaGraphs

    pass

    with torch.cuda.device(device):
        steps = runner.captured
        verifier = DeviceVerifier(device, CudaGraphs(device) if steps is None else steps.graphs)
        if steps is not None:
            verifier.capture(steps)
    return verifier
