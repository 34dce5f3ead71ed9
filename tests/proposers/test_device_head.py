"""A head on a GPU that is not here: what captured passes draw is what launched ones do, for one wait a window."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import PretendedDevice, Replayed, gpu
from support.engines import BLOCK, COUPLED, REJECTION, VOCAB, TargetHarness, opened, tiny_model
from support.heads import BLOCK_ROWS, BLOCKS, METHOD_OF, random_head
from support.kernels import interpreter
from support.models import SMALLEST, build_decoder, tiny_config, tiny_hf_model, tiny_state
from torch import Tensor

from outrider.engine import cuda_graphs
from outrider.engine.batch import StepLimits
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.heads import device_head
from outrider.proposers.heads.device_block import DeviceBlocks
from outrider.proposers.heads.device_head import DeviceHead
from outrider.rpc.messages import Credit, Open
from outrider.target_service.heads.drafter import HeadDrafter

__all__ = ["gpu", "interpreter"]

pytestmark = pytest.mark.compilers

LONG = "eagle", "medusa", "mtp", "mlp_speculator", "dflash", "dflash2", "dspark-rnn"
LIMITS = StepLimits(max_rows=16, max_sequences=4, max_query_len=4)
SIZES = {**SMALLEST, "num_hidden_layers": 2}
FAR = 1 << 20
SAMPLED: dict[str, Any] = {"temperature": 1.0, "acceptance": COUPLED, "seed": (1 << 64) - 3, "top_p": 0.9}


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def target_with(layout: str, folder: Path, **options: Any) -> tuple[TargetHarness, HeadDrafter]:
    """A head beside a target whose steps are captured."""
    hf = tiny_hf_model("llama", **SIZES)
    loaded = build_decoder(tiny_config("llama", **SIZES), tiny_state(hf), dtype="float32", device="cuda")
    harness = TargetHarness.of(loaded, head=random_head(layout, folder, hf, loaded, **options), max_rows=24)
    runner = harness.engine._runner
    limits = replace(LIMITS, max_rows=LIMITS.max_sequences * BLOCK_ROWS) if layout in BLOCKS else LIMITS
    runner.capture(limits, cuda_graphs.CudaGraphs(runner.model.device))
    drafter = harness.engine.parts[-1]
    assert isinstance(drafter, HeadDrafter)
    drafter.measured((), 0.0)
    assert (drafter.captured or drafter.blocks) is not None
    return harness, drafter


def plain(request: Open) -> list[int]:
    """What the host's target says alone."""
    hf = tiny_hf_model("llama", **SIZES)
    loaded = build_decoder(tiny_config("llama", **SIZES), tiny_state(hf), dtype="float32", device="cpu")
    return TargetHarness.of(loaded).decode_plain(request.sequence_id, request)


@dataclass
class Window:
    """What was drafted behind a step."""

    tokens: list[list[DraftedToken]]  # of each line
    waits: int  # of the captured way
    waiting: bool  # some rows waited for it
    found: bool  # some began behind a found block
    first_captured: bool
    held: bool = True  # whether the draws were captured


def by_id(token: DraftedToken) -> tuple[int, bytes]:
    """What is the same wherever it was computed."""
    return token.token_id, token.ids


@dataclass
class BothWays:
    """Drafts every window launched, and again captured: the same tokens, weights, keys and values."""

    drafter: HeadDrafter
    gpu: PretendedDevice | None
    windows: list[Window] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        draft, captured, blocks = HeadDrafter._draft, self.drafter.captured, self.drafter.blocks

        def both(drafter: HeadDrafter, lines: Sequence[Any], states: Tensor) -> None:
            before = self._cache()
            drafter.captured = drafter.blocks = None
            draft(drafter, lines, states)
            launched, stored = [list(line.drawn) for line in lines], self._cache()
            for line in lines:
                line.drawn.clear()
            for ours, theirs in zip(self._tensors(), before, strict=True):
                ours.copy_(theirs)
            drafter.captured, drafter.blocks = captured, blocks
            self.windows.append(self._window(lines))
            waits = len(self.gpu.waits) if self.gpu is not None else 0
            draft(drafter, lines, states)
            self.windows[-1].waits = (len(self.gpu.waits) if self.gpu is not None else 0) - waits
            self.windows[-1].tokens = [list(line.drawn) for line in lines]
            self._check(launched, stored)

        patch.setattr(HeadDrafter, "_draft", both)
        for kind, first in ((DeviceHead, "first"), (DeviceBlocks, "fill")):
            patch.setattr(kind, first, self._watched_first(getattr(kind, first)))
            patch.setattr(kind, "draw", self._watched_draw(kind.draw))

    def _watched_first(self, first: Callable[..., Any]) -> Callable[..., Any]:
        def watched(head: object, *arguments: Any) -> Any:
            found = first(head, *arguments)
            self.windows[-1].first_captured = found is not None and found is not False
            return found

        return watched

    def _watched_draw(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def watched(head: object, *arguments: Any) -> Any:
            self.windows[-1].held = True
            return draw(head, *arguments)

        return watched

    def _check(self, launched: list[list[DraftedToken]], stored: list[Tensor]) -> None:
        """What was drawn and stored against the same of the launched way, whose products have fewer rows: a GPU's
        library may add those up in another order, and so do a CPU's on some processors."""
        tokens = self.windows[-1].tokens
        assert [list(map(by_id, line)) for line in tokens] == [list(map(by_id, line)) for line in launched]
        for ours, theirs in zip(chain(*tokens), chain(*launched), strict=True):
            weights = [np.frombuffer(token.weights, "<u4").astype(int) for token in (ours, theirs)]
            assert abs(weights[0] - weights[1]).max(initial=0) <= 1
        for mine, other in zip(self._cache(), stored, strict=True):
            torch.testing.assert_close(mine.cpu(), other.cpu(), atol=1e-4, rtol=1e-4)

    @property
    def drawn(self) -> list[Window]:
        """Where something was."""
        return [window for window in self.windows if any(window.tokens)]

    def _window(self, lines: Sequence[Any]) -> Window:
        waiting = any(line.waiting is not None for line in lines)
        found = any(line.keeps and line.waiting is None and line.first == line.scheduled.start for line in lines)
        return Window([], 0, waiting, found, False, held=False)

    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.drafter._cache.keys, *self.drafter._cache.values)

    def _cache(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors()]


@pytest.mark.parametrize(
    "layout",
    ["eagle3", "dspark", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)],
)
def test_the_tokens_are_those_of_launched_passes(
    layout: str, gpu: PretendedDevice | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that draw so many each, by every rule; behind chunks of a prompt and found blocks, and with rows
    that waited."""
    harness, drafter = target_with(layout, tmp_path)
    both = BothWays(drafter, gpu)
    both.install(monkeypatch)
    shared, method = prompt_of(1, 17), METHOD_OF[layout]
    requests = {
        1: opened(1, shared, method=method, max_tokens=8),
        2: opened(2, prompt_of(2, 30), method=method, max_tokens=6, **SAMPLED),  # in two chunks
        3: opened(3, [*shared, 5], method=method, max_tokens=6, temperature=0.9, acceptance=REJECTION, seed=4),
        4: opened(4, prompt_of(4, 2), method=method, max_tokens=6, temperature=0.8, acceptance=BLOCK, top_k=40),
    }
    harness.send(requests[1], Credit(1, FAR, 3), requests[2], Credit(2, FAR, 2))
    for _ in range(2 * 3):  # each is launched, then finished
        harness.engine.step(harness.now)
    harness.send(requests[3], Credit(3, FAR, 1), requests[4], Credit(4, FAR, 0))
    for _ in range(2 * 2):
        harness.engine.step(harness.now)
    harness.send(Credit(4, FAR, 2))
    harness.run()
    for number in (1, 2):
        assert harness.output(number) == plain(requests[number])
    assert all(len(harness.output(number)) == requests[number].sampling.max_tokens for number in requests)
    drawn = both.drawn
    assert len(drawn) > 4 and all(window.held for window in drawn)
    assert any(len({len(tokens) for tokens in window.tokens if tokens}) > 1 for window in drawn)
    assert any(token.weights for window in drawn for tokens in window.tokens for token in tokens)
    assert {window.first_captured for window in both.windows} == ({True, False} if drafter.head.layers else {True})
    if drafter.head.layers:
        assert any(window.waiting and window.first_captured for window in drawn)
        assert any(window.found and window.first_captured for window in drawn)
    if gpu is not None:
        assert {window.waits for window in drawn} == {1}


def test_a_long_window_is_read_in_parts(
    gpu: PretendedDevice | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, drafter = target_with("mlp_speculator", tmp_path)
    both = BothWays(drafter, gpu)
    both.install(monkeypatch)
    monkeypatch.setattr(device_head, "MOST_PASSES", 2)
    requests = [
        opened(number, prompt_of(number, 6), method="mlp_speculator", max_tokens=8, **(SAMPLED if number == 2 else {}))
        for number in (1, 2)
    ]
    harness.send(requests[0], Credit(1, FAR, 4), requests[1], Credit(2, FAR, 3))
    harness.run()
    assert [harness.output(number) for number in (1, 2)] == [plain(request) for request in requests]
    longest = [max(map(len, window.tokens)) for window in both.drawn]
    assert max(longest) == 4 and all(window.held for window in both.drawn)
    if gpu is not None:
        assert [window.waits for window in both.drawn] == [-(-length // 2) for length in longest]


def test_beside_a_penalty_all_are_launched(
    gpu: PretendedDevice | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it draws hangs on what it drew; once it has ended, the other is captured."""
    harness, drafter = target_with("mlp_speculator", tmp_path)
    both = BothWays(drafter, gpu)
    both.install(monkeypatch)
    requests = [
        opened(1, prompt_of(1, 6), method="mlp_speculator", max_tokens=12),
        opened(2, prompt_of(2, 6), method="mlp_speculator", max_tokens=3, repetition_penalty=1.4),
    ]
    harness.send(requests[0], Credit(1, FAR, 2), requests[1], Credit(2, FAR, 2))
    harness.run()
    assert [harness.output(number) for number in (1, 2)] == [plain(request) for request in requests]
    held = [window.held for window in both.drawn]
    assert held == sorted(held) and set(held) == {False, True}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter's numpy
def test_a_head_whose_numbers_are_none_drafts_nothing(gpu: PretendedDevice | None, tmp_path: Path) -> None:
    harness, _ = target_with("mlp_speculator", tmp_path, scale=float("nan"))
    request = opened(1, prompt_of(1, 6), method="mlp_speculator", max_tokens=5)
    harness.send(request, Credit(1, FAR, 3))
    harness.run()
    assert harness.output(1) == plain(request)
    assert {commit.num_drafted for commit in harness.commits(1)} == {0}


def test_a_failed_capture_leaves_the_passes_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hf, loaded = tiny_model()
    harness = TargetHarness.of(loaded, head=random_head("eagle3", tmp_path, hf, loaded))
    drafter = harness.engine.parts[-1]
    assert isinstance(drafter, HeadDrafter)

    def fails(*_: Any) -> DeviceHead:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr("outrider.target_service.heads.drafter.DeviceHead", fails)
        patch.setattr(harness.engine._runner, "captured", SimpleNamespace(graphs=Replayed()))
        drafter.measured((), 0.0)
    assert drafter.captured is None
    assert "the passes of eagle3 could not be captured; they are launched" in caplog.text
    request = replace(opened(1, prompt_of(1, 6), max_tokens=8), method="eagle3")
    harness.send(request, Credit(1, FAR, 3))
    harness.run()
    assert harness.output(1) == TargetHarness.of(loaded).decode_plain(1, opened(1, prompt_of(1, 6), max_tokens=8))
    assert max(commit.num_drafted for commit in harness.commits(1)) == 3
