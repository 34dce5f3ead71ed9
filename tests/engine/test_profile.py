"""The profile of the start: steps by rows, bounded by limits and time, without a trace in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import VOCAB, TargetHarness, opened, tiny_model

from outrider.engine import profile
from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import BlockPool
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner
from outrider.engine.profile import measure_context, measure_steps


@dataclass
class SlowRunner:
    """In the place of a ModelRunner: a pass takes `seconds` by its rows, on a clock of its own."""

    seconds: Any
    block_size: int = 16
    now: float = 0.0
    passes: list[BatchEntry] = field(default_factory=list)
    model: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=VOCAB))
    cache: Any = field(default_factory=lambda: SimpleNamespace(keys=(), values=()))

    def forward(self, entries: Sequence[BatchEntry]) -> torch.Tensor:
        (entry,) = entries
        self.passes.append(entry)
        self.now += self.seconds(len(entry.token_ids))
        return torch.zeros(entry.num_logits, VOCAB)

    def measure(self, num_blocks: int = 64, max_rows: int = 512, max_model_len: int = 4096) -> profile.StepProfile:
        pool = BlockPool(num_blocks)
        return measure_steps(self, pool, max_rows, max_model_len, clock=lambda: self.now)  # type: ignore[arg-type]


def state_of(pool: BlockPool) -> tuple[Any, ...]:
    return list(pool._free), list(pool._references), dict(pool._key_of), dict(pool._block_of)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model()[1]


def test_a_real_model_is_measured_and_nothing_is_left_behind(loaded: LoadedModel) -> None:
    harness = TargetHarness.of(loaded)
    before = state_of(harness.engine.cache.pool)
    costs = harness.engine.profile()
    assert [rows for rows, _ in costs] == [1, 2, 4, 8, 16, 32, 64, 128, 256] and all(us > 0 for _, us in costs)
    assert state_of(harness.engine.cache.pool) == before
    tensors = harness.engine._runner.cache
    assert not any(bool(tensor.any()) for tensor in (*tensors.keys, *tensors.values))
    fresh = TargetHarness.of(loaded)
    request = opened(1, range(5, 40), max_tokens=8)
    assert harness.decode_plain(1, request) == fresh.decode_plain(1, request)


@pytest.mark.parametrize("cut_windows", [True, False])
def test_the_scheduler_has_the_costs_whether_or_not_it_cuts_windows(loaded: LoadedModel, cut_windows: bool) -> None:
    scheduler = (harness := TargetHarness.of(loaded, cut_windows=cut_windows)).engine.scheduler
    assert scheduler.goodput is None and scheduler.cut_windows == cut_windows
    assert harness.engine.profile() and scheduler.goodput is not None


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({}, 256),
        ({"max_rows": 24}, 16),
        ({"max_model_len": 64}, 32),
        ({"num_blocks": 1}, 8),
        ({"num_blocks": 1, "max_model_len": 2}, 1),
    ],
)
def test_rows_fit_the_step_the_context_and_the_cache(limits: dict[str, int], most: int) -> None:
    runner = SlowRunner(lambda rows: 0.001)
    assert runner.measure(**limits)[-1][0] == most
    longest = max(entry.start + len(entry.token_ids) for entry in runner.passes)
    assert longest <= min(limits.get("max_model_len", 4096), 16 * limits.get("num_blocks", 64))


def test_the_best_of_three_after_what_comes_first() -> None:
    times = iter((9.0, 0.09, 0.02, 0.01, 0.03))
    runner = SlowRunner(lambda rows: next(times))
    assert runner.measure(max_rows=1) == ((1, 10_000),) and len(runner.passes) == 5


def test_rows_are_of_different_tokens_after_some_context() -> None:
    runner = SlowRunner(lambda rows: 0.001)
    runner.measure()
    last = runner.passes[-1]
    assert last.start == profile.CONTEXT and last.num_logits == 256 and len(set(last.token_ids)) == VOCAB


@pytest.mark.parametrize("one_row_s", [0.03, 0.1, 0.6, 5.0])
def test_a_slow_model_is_not_held_up(one_row_s: float) -> None:
    """Flat up to 16 rows, then in proportion."""
    runner = SlowRunner(lambda rows: one_row_s * max(1.0, rows / 16))
    costs = runner.measure()
    assert costs[0] == (1, round(one_row_s * 1e6))
    assert runner.now <= max(profile.BUDGET_S, 2 * one_row_s) + one_row_s
    assert len(costs) >= (6 if one_row_s < 0.2 else 1)


def test_what_cannot_be_measured_is_left_out() -> None:
    def seconds(rows: int) -> float:
        if rows > 4:
            raise RuntimeError("out of memory")
        return 0.001

    pool = BlockPool(64)
    runner = SlowRunner(seconds)
    costs = measure_steps(runner, pool, 512, 4096, clock=lambda: runner.now)  # type: ignore[arg-type]
    assert [rows for rows, _ in costs] == [1, 2, 4] and pool.num_free == 64


def test_what_a_token_before_the_row_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms, and 2 us a token of the context; none where no sequence is long, or a pass takes too long or fails."""
    runner: Any = SlowRunner(lambda rows: 0.001)

    def measure(max_model_len: int, first_us: int = 1000) -> float:
        pool = BlockPool(256)
        runner.seconds = lambda rows: 0.001 + 2e-6 * runner.passes[-1].start
        found = measure_context(runner, pool, ((1, first_us),), max_model_len, clock=lambda: runner.now)
        assert pool.num_free == 256
        return found

    assert [measure(8192), measure(700)] == pytest.approx([2.0, 2.0])
    assert measure(200) == measure(8192, first_us=500_000) == 0.0
    monkeypatch.setattr(runner, "forward", lambda entries: 1 / 0)
    assert measure(8192) == 0.0


def test_a_model_runner_is_what_is_timed(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded.model, 16)
    costs = measure_steps(runner, BlockPool(16), 8, 128)
    assert [rows for rows, _ in costs] == [1, 2, 4, 8]
