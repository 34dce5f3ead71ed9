"""The runner: batches, captured steps, and the time of a pass.

A pass is timed without waiting for it.

From memory to blocks.

The probe tells an error that stays on the device from one that passes, and keeps no block."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.devices import Replayed
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import BatchEntry, StepLimits, all_buckets, build_batch
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE, BlockPool
from outrider.engine.model_runner import (
    CudaTimer,
    HostTimer,
    MemoryUse,
    ModelRunner,
    RunnerOptions,
    blocks_for_memory,
    blocks_for_share,
    build_runner,
    largest_step,
    probe,
    timer_of,
)
from outrider.engine.models.base import CausalLM
from outrider.engine.worker import DeviceLost


class SomeModel:
    """Any other CausalLM."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model


def test_forward_is_timed_and_records_no_gradient() -> None:
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model, 4)
    logits = runner.forward([BatchEntry([1, 2, 3], 0, [2], 1)])
    assert runner.last_pass() > 0
    assert logits.is_inference() and not logits.requires_grad


def test_small_steps_are_replayed_and_prompts_are_not(triton_everywhere: torch.device) -> None:
    if triton_everywhere.type != "cpu":
        pytest.skip("tests/engine/test_cuda_graphs.py has the real capture")
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model()), device="cpu").model, 4)
    eager = runner.forward([BatchEntry(list(range(9)), 0, [2], 9)])
    device = Replayed()
    runner.capture(StepLimits(4, 2, 2), device)
    assert device.captured == len(all_buckets(StepLimits(4, 2, 2))) and device.replayed == 0
    runner.forward([BatchEntry([7], 7, [2], 1)])
    logits = runner.forward([BatchEntry([7, 8], 7, [2], 1)])
    assert device.replayed == 2
    device.synchronize()
    torch.testing.assert_close(logits, eager[-1:], atol=1e-5, rtol=1e-5)
    runner.forward([BatchEntry([6, 7, 8], 6, [2], 1)])
    assert device.replayed == 2


def test_only_our_own_decoder_is_captured() -> None:
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model, 4)  # the C kernels, if any
    device = Replayed()
    runner.model = cast(CausalLM, SomeModel(runner.model))
    runner.capture(StepLimits(4, 2, 2), device)
    assert device.captured == 0


def test_batch_packs_rows_slots_and_tables() -> None:
    batch = build_batch([BatchEntry([7, 8], 3, [5, 2], 1), BatchEntry([9, 10, 11], 0, [4], 2)], block_size=4)
    assert batch.token_ids.tolist() == [7, 8, 9, 10, 11]
    assert batch.positions.tolist() == [3, 4, 0, 1, 2]
    assert batch.slot_mapping.tolist() == [23, 8, 16, 17, 18]
    assert batch.block_tables.tolist() == [[5, 2], [4, 0]]
    assert batch.query_starts == (0, 2, 5) and batch.context_lens == (5, 3)
    assert batch.logit_rows.tolist() == [1, 3, 4]
    assert (batch.num_rows, batch.num_sequences) == (5, 2)
    assert batch.token_ids.dtype == torch.int64


class Event:
    """A CUDA event on a device that passes one a millisecond, once it may."""

    passing = True
    clock = itertools.count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self) -> None:
        self.at = next(self.clock)

    def query(self) -> bool:
        return self.passing

    def elapsed_time(self, other: Event) -> float:
        assert self.passing
        return float(other.at - self.at)


def test_events_are_read_once_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = timer_of(torch.device("cuda"))
    assert isinstance(timer, CudaTimer)
    timer.start()
    first = timer.stop()
    assert first() == 1000
    monkeypatch.setattr(Event, "passing", False)
    timer.start()
    next(Event.clock)
    second = timer.stop()
    assert second() == 0  # it still runs
    monkeypatch.setattr(Event, "passing", True)
    assert second() == 2000 and first() == 1000


def test_a_processors_pass_has_run_when_it_returns() -> None:
    timer = timer_of(torch.device("cpu"))
    assert isinstance(timer, HostTimer)
    timer.start()
    sum(range(10000))
    assert timer.stop()() > 0


GIB = 1 << 30


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model


def test_blocks_for_memory_counts_keys_and_values_of_all_layers(model: CausalLM) -> None:
    per_block = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, kv heads, head_dim, tokens, bytes
    assert blocks_for_memory(model, 10 * per_block + 5) == 10
    cache = ModelRunner(model, 10).cache
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 10 * per_block
    with pytest.raises(ValueError, match="no block"):
        blocks_for_memory(model, per_block - 1)


def test_the_share_counts_what_others_hold() -> None:
    """Of 80 GiB: 1 by others, weights of 16, a largest step of 2 above them, 3 kept."""
    use = MemoryUse(total=80 * GIB, free=63 * GIB, held=16 * GIB, peak=18 * GIB, reserve=3 * GIB)
    assert use.room(0.9) == 72 * GIB - (1 + 18 + 3) * GIB
    assert use.room(1.0) == 58 * GIB
    assert use.room(0.25) < 0


def test_blocks_of_a_share(model: CausalLM) -> None:
    per_block = bytes_per_block(model.layers, model.dtype)
    use = MemoryUse(total=1000 * per_block, free=900 * per_block, held=0, peak=100 * per_block, reserve=0)
    assert blocks_for_share(model, use, RunnerOptions(gpu_memory_utilization=0.5)) == 300
    few = RunnerOptions(StepLimits(512, 2, 5), gpu_memory_utilization=0.5)
    assert blocks_for_share(model, use, few) == 2 * 512 // BLOCK_SIZE  # no more than two whole sequences fill
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.2 leaves no memory"):
        blocks_for_share(model, use, RunnerOptions(gpu_memory_utilization=0.2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3 << 20),
        ({"cache_bytes": 2 << 20}, 2 << 20),
        ({"cache_bytes": 2 << 20, "num_blocks": 5}, None),
        ({"gpu_memory_utilization": 0.1}, 3 << 20),  # says nothing of a CPU
    ],
)
def test_what_was_given_wins(model: CausalLM, options: dict[str, Any], expected: int | None) -> None:
    runner = build_runner(model, RunnerOptions(default_cache_bytes=3 << 20, **options))
    assert runner.cache.num_blocks == (5 if expected is None else blocks_for_memory(model, expected))


def test_beside_another_model_a_cache_has_a_size() -> None:
    assert RunnerOptions(default_cache_bytes=7).beside_another().cache_bytes == 7
    assert RunnerOptions(cache_bytes=3).beside_another().cache_bytes == 3


@pytest.mark.parametrize("limits", [StepLimits(512, 256, 33), StepLimits(50, 2, 5), StepLimits(7, 9, 1)], ids=str)
def test_the_largest_step_is_as_large_as_a_step_may_be(model: CausalLM, limits: StepLimits) -> None:
    step = largest_step(model, limits)
    assert sum(len(entry.token_ids) for entry in step) == limits.max_rows
    assert len(step) <= limits.max_sequences
    assert all(len(entry.block_table) * BLOCK_SIZE == model.max_model_len for entry in step)
    written = [set(entry.block_table[: -(-len(entry.token_ids) // BLOCK_SIZE)]) for entry in step]
    assert sum(map(len, written)) == len(set.union(*written))  # no two write one block
    num_blocks = max(max(entry.block_table) for entry in step) + 1
    assert ModelRunner(model, num_blocks).forward(step).shape == (limits.max_rows, model.vocab_size)


def raising(*_: object) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("stays", [False, True])
def test_an_error_that_stays_is_a_lost_device(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", raising if stays else lambda device: None)
    runner: Any = SimpleNamespace(forward=raising, model=SimpleNamespace(device=torch.device("cuda")))
    pool = BlockPool(1)
    with pytest.raises(DeviceLost if stays else RuntimeError):
        probe(runner, pool)
    assert pool.num_free == 1


def test_where_sequences_hold_every_block_nothing_runs() -> None:
    runner: Any = SimpleNamespace(forward=raising)
    probe(runner, BlockPool(0))
