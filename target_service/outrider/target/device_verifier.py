"""Verdicts on a device: a step's windows go there in one copy, are judged by kernels, and come back in another.

Where the pass was a captured one, so is the judging, launched behind it while the pass still runs. Requests that change
single logits (biases, bans, penalties) are judged by the same kernels, launched one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.device_sampling import row_sampling
from outrider.engine.graphs import CapturedSteps, GraphDevice
from outrider.engine.sampling import assemble
from outrider.engine.staging import StagedColumns, words_of
from outrider.kernels.draft_sample import MAX_ENTRIES
from outrider.kernels.logits_to_probs import RowSampling
from outrider.target.judging import judge, judging_columns
from outrider.target.rule import Rule
from outrider.target.state import TargetSequence
from outrider.target.step_numbers import StepNumbers
from outrider.target.verifier import Judged, Verdict, verdicts_of


@dataclass(frozen=True, slots=True, order=True)
class JudgingSize:
    """What one captured call holds."""

    num_rows: int
    num_windows: int


@dataclass(frozen=True, slots=True)
class Captured:
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
        self._captured: dict[tuple[JudgingSize, Rule], Captured] = {}
        self._sizes: list[JudgingSize] = []  # the smallest first

    @torch.inference_mode()
    def capture(self, steps: CapturedSteps) -> None:
        """Captures what follows the captured passes, the largest first: smaller ones find its memory."""
        self._logits = steps.logits
        self._sizes = sorted({JudgingSize(bucket.rows, bucket.sequences) for bucket in steps.buckets})
        self._host, self._numbers = self._buffers(max(map(_words, self._sizes)))
        for size in reversed(self._sizes):
            layout = judging_columns(size.num_rows, size.num_windows, size.num_rows * MAX_ENTRIES)
            columns = StagedColumns(layout, self._host, self._numbers)
            self._upload(StepNumbers(), columns, self._host, self._numbers)
            for rule in Rule:
                self._captured[size, rule] = self._capture(size, columns, rule)

    @torch.inference_mode()
    def verify(self, logits: Tensor, judged: Sequence[Judged]) -> list[Verdict]:
        """Judges every window; logits are [rows of the step that want logits, vocab] float32."""
        if not judged:
            return []
        numbers = StepNumbers.of(judged)
        captured = self._find(logits, numbers)
        if captured is not None:
            self._upload(numbers, captured.columns, self._host, self._numbers)
            captured.replay()
            results, num_windows = captured.results, len(captured.columns["rules"])
        else:
            logits = self._rows_of(logits, judged)
            results, num_windows = self._launch(logits, judged, numbers), len(judged)
        accepted, next_ids, invalid = self._graphs.download(results).tensor_split((num_windows, 2 * num_windows))
        return verdicts_of(logits, judged, accepted[: len(judged)], next_ids[: len(judged)], invalid)

    def prepare(self, target: TargetSequence) -> bool:
        """Random numbers are drawn where they are used: there is nothing to prepare."""
        return False

    def _find(self, logits: Tensor, numbers: StepNumbers) -> Captured | None:
        """The captured call that holds a step; None where its logits are no captured pass's, or are changed."""
        is_captured = logits.data_ptr() == self._logits.data_ptr() and numbers.num_rows == len(logits)
        if not is_captured or numbers.changes_logits or numbers.num_entries > numbers.num_rows * MAX_ENTRIES:
            return None
        wanted = numbers.num_rows, numbers.num_windows
        fitting = (size for size in self._sizes if size.num_rows >= wanted[0] and size.num_windows >= wanted[1])
        size = next(fitting, None)
        return None if size is None else self._captured[size, numbers.hardest]

    def _launch(self, logits: Tensor, judged: Sequence[Judged], numbers: StepNumbers) -> Tensor:
        layout = judging_columns(numbers.num_rows, numbers.num_windows, numbers.num_entries)
        host, device = self._buffers(words_of(layout))
        columns = StagedColumns(layout, host, device)
        self._upload(numbers, columns, host, device)
        plans = [member.plan for member in judged]
        sampling = assemble(plans, self._device) if numbers.changes_logits else row_sampling(columns)
        return judge(logits, columns, sampling, numbers.hardest)

    def _rows_of(self, logits: Tensor, judged: Sequence[Judged]) -> Tensor:
        """The rows that judge; the others are a prompt's."""
        rows = [row for member in judged for row in member.rows]
        return logits if len(rows) == len(logits) else logits[torch.tensor(rows, device=self._device)]

    def _capture(self, size: JudgingSize, columns: StagedColumns, rule: Rule) -> Captured:
        results = torch.zeros(2 * size.num_windows + size.num_rows, dtype=torch.int64, device=self._device)
        sampling = row_sampling(columns)

        def step() -> None:
            results.copy_(judge(self._logits[: size.num_rows], columns, sampling, rule))

        return Captured(columns, sampling, results, self._graphs.capture(step))

    def _buffers(self, words: int) -> tuple[Tensor, Tensor]:
        return self._graphs.host_buffer(words), torch.zeros(words, dtype=torch.int32, device=self._device)

    def _upload(self, numbers: StepNumbers, columns: StagedColumns, host: Tensor, device: Tensor) -> None:
        """The host's buffer is free: whoever judged from it last has read the results."""
        words = numbers.write(columns)
        self._graphs.upload(device[:words], host[:words])


def _words(size: JudgingSize) -> int:
    return words_of(judging_columns(size.num_rows, size.num_windows, size.num_rows * MAX_ENTRIES))
