"""A target whose model computes nothing: the production engine plans, packs, reads verdicts and commits. Where its
device takes no time, what is left is what the host does for a step; where it sleeps as long as one takes, how long it
then waits for the host (`outrider bench host`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from outrider.engine.batch import (
    BatchEntry,
    PackedRows,
    StepBuffer,
    StepLimits,
    all_buckets,
    buffer_size,
    choose_bucket,
)
from outrider.engine.staging import StagedColumns, words_of
from outrider.engine.token_tree import KeptPath
from outrider.kernels.sampling.reference import MAX_ENTRIES
from outrider.rpc.messages import Commit, Credit, DraftTokens, Open, TargetCommand
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.device_verifier import VerifyInputs, verify_columns
from outrider.target_service.engine import TargetEngine
from outrider.target_service.goodput import Goodput
from outrider.target_service.outputs import LaunchedVerify, VerifiedWindow, verified_windows
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits

VOCAB, MAX_MODEL_LEN, MAX_TOKENS, BLOCK = 32_000, 2048, 1900, 16
PROMPT = tuple(range(3, 67))
DRAFTED, NEXT, ACCEPTED = 5, 7, 2  # what is drafted, the target's own token, and how many drafted ones it accepts
STEP_COSTS = ((1, 5000), (64, 5200), (256, 6000), (512, 8000))  # us by rows: about an H200's with 6 billion parameters
STREAM = 1


@dataclass(frozen=True)
class IdleModel:
    """What the engine asks of a model."""

    dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB
    hidden_size: int = 64
    takes_trees: bool = False
    batch_invariant: bool = True


class SleepingDevice:
    """Runs behind the host's back: a pass ends so long after it was launched, or after the one before."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.ends = step_s, 0.0
        self.idle_s: list[float] = []  # before each pass, since the one before had ended

    def launch(self) -> None:
        """A pass."""
        now = time.monotonic()
        self.idle_s.append(max(0.0, now - self.ends))
        self.ends = max(now, self.ends) + self.step_s

    def wait_until(self, ends: float) -> None:
        """Returns when a pass that ends then is over."""
        time.sleep(max(0.0, ends - time.monotonic()))

    def holds(self, lengths: Sequence[int]) -> bool:
        """As CapturedSteps: any step is."""
        return True


class IdleRunner:
    """Packs a step as for a captured one, which is then not run."""

    def __init__(self, max_rows: int, captured: SleepingDevice | None) -> None:
        self.model, self.block_size, self.last_pass = IdleModel(), BLOCK, lambda: 1
        self.last_woken, self.census = lambda: 0, None  # it has no experts
        self.adapters = self.hidden_states = None
        self.captured = captured
        self._limits = StepLimits(max_rows, 256, 33)
        width = -(-MAX_MODEL_LEN // BLOCK)
        buckets = all_buckets(self._limits)
        size = max(buffer_size(bucket, width) for bucket in buckets)
        host, device = torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)  # [words]
        self._buffers = {bucket: StepBuffer(bucket, width, host, device) for bucket in buckets}
        self._logits = torch.zeros(max_rows, 1)  # [rows, 1]: nobody reads them

    def forward(self, entries: Sequence[BatchEntry]) -> Tensor:  # [rows that want logits, 1]
        """As ModelRunner's."""
        lengths = [len(entry.token_ids) for entry in entries]
        bucket = choose_bucket(self._limits, sum(lengths), len(entries), max(lengths), False)
        rows = PackedRows.of(entries, BLOCK)
        if bucket is not None and bucket in self._buffers:
            self._buffers[bucket].write(rows, [entry.block_table for entry in entries])
        if self.captured is not None:
            self.captured.launch()
        return self._logits[: len(rows.logit_rows)]

    def follow(self, entries: Sequence[BatchEntry], ids: Tensor) -> Tensor:  # [rows, 1]
        """As ModelRunner's; ids: [rows]."""
        return self.forward(entries)

    def keep_paths(self, paths: Sequence[KeptPath]) -> None:
        """There are none."""


class IdleVerifier:
    """Packs what a device is told of the windows, and reads verdicts that are the same for all."""

    def __init__(self, max_rows: int, device: SleepingDevice | None) -> None:
        self._device = device
        layout = verify_columns(max_rows, 256, max_rows * MAX_ENTRIES)
        host = torch.zeros(words_of(layout), dtype=torch.int32)  # [words]
        self._columns = StagedColumns(layout, host, torch.zeros_like(host))

    def launch(
        self, logits: Tensor, windows: Sequence[ScheduledSequence], masks: Any = None
    ) -> LaunchedVerify:  # logits: [rows, 1]
        """As DeviceVerifier's."""
        inputs = VerifyInputs(windows)
        inputs.write(self._columns)
        accepted = torch.tensor([min(ACCEPTED, len(window.window.ids)) for window in windows])  # [n]
        next_ids = torch.full((len(windows),), NEXT)  # [n]
        invalid = torch.zeros(inputs.num_rows, dtype=torch.int64)  # [rows]
        device = self._device
        if device is None:
            return LaunchedVerify(lambda: verified_windows(logits, windows, accepted, next_ids, invalid))
        ends = device.ends

        def read() -> list[VerifiedWindow]:
            device.wait_until(ends)
            return verified_windows(logits, windows, accepted, next_ids, invalid)

        return LaunchedVerify(read, next_ids)

    def prepare(self, target: object) -> bool:
        """Nothing is made ahead."""
        return False

    def takes_masks_lazily(self, target: object) -> bool:
        """There are none."""
        return False


class HostTarget:
    """So many sequences at a production engine, all of which are in every step. `ahead` is how many plain tokens each
    may have committed that its gateway has not seen."""

    def __init__(
        self, num_sequences: int, num_draft_tokens: int, device: SleepingDevice | None = None, ahead: int = 1
    ) -> None:
        self._k, self._plain_ahead = num_draft_tokens, ahead
        max_rows = max(512, num_sequences * (num_draft_tokens + 2))
        limits = TargetLimits(VOCAB, MAX_MODEL_LEN, (2,), num_sequences * (MAX_MODEL_LEN // BLOCK) + 1)
        self._engine = TargetEngine(cast(Any, IdleRunner(max_rows, device)), limits, max_rows=max_rows)
        self._engine.steps.verifier = cast(Any, IdleVerifier(max_rows, device))
        self._engine.scheduler.goodput = Goodput(STEP_COSTS)
        self._events: list[Any] = []
        self._ends = [len(PROMPT)] * num_sequences
        self._chain = 0
        sampling = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for number in range(num_sequences):
            opened = Open(number, PROMPT, sampling, seed=number, acceptance=AcceptanceRule.COUPLED)
            self._send(opened, Credit(number, len(PROMPT) + 1, 0))
        while len(self._events) < num_sequences:
            self._engine.step(time.monotonic())
        self._follow()

    @property
    def ends(self) -> tuple[int, ...]:
        """How long each sequence is."""
        return tuple(self._ends)

    def round(self) -> tuple[float, int]:
        """One round of all: what is sent to the target, and its step. Seconds of this thread's processor time, and the
        sequences that the step held."""
        began = time.thread_time()
        for number, end in enumerate(self._ends):
            if self._k:
                self._chain += 1
                piece = DraftTokens(number, self._chain, end, (DRAFTED,) * self._k, ())
                self._send(piece, Credit(number, end + 4 * (self._k + 1), self._k, 500))
            else:
                self._send(Credit(number, end + self._plain_ahead, 0))
        while not self._events:  # a step may be launched, and read by the next call
            self._engine.step(time.monotonic())
        seconds = time.thread_time() - began
        return seconds, self._follow()

    def _send(self, *messages: TargetCommand) -> None:
        self._engine.handle(Deliver(STREAM, list(messages), self._events.append))

    def _follow(self) -> int:
        commits = [event for event in self._events if isinstance(event, Commit)]
        for commit in commits:
            self._ends[commit.sequence_id] = commit.position + len(commit.ids)
        self._events.clear()
        return len(commits)
