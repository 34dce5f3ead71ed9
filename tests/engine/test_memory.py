"""From memory to blocks."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import StepLimits
from outrider.engine.kv_cache import bytes_per_block
from outrider.engine.kv_cache_manager import BLOCK_SIZE
from outrider.engine.loader import build_decoder
from outrider.engine.model_runner import (
    MemoryUse,
    ModelRunner,
    RunnerOptions,
    blocks_for_memory,
    blocks_for_share,
    build_runner,
    largest_step,
)
from outrider.engine.models.base import CausalLM

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
