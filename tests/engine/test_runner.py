"""The runner: batches, captured steps, and the time of a pass."""

from __future__ import annotations

import pytest
import torch
from replayed import Replayed
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import BatchEntry, StepLimits, all_buckets, build_batch
from outrider.engine.loader import build_decoder
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import CausalLM


class SomeModel:
    """Any other CausalLM."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model


def test_forward_is_timed_and_records_no_gradient() -> None:
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model, 4)
    logits = runner.forward([BatchEntry([1, 2, 3], 0, [2], 1)])
    assert runner.last_forward_us > 0
    assert logits.is_inference() and not logits.requires_grad


def test_small_steps_are_replayed_and_prompts_are_not(triton_everywhere: torch.device) -> None:
    if triton_everywhere.type != "cpu":
        pytest.skip("tests/engine/test_graphs.py has the real capture")
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
    runner.model = SomeModel(runner.model)
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
