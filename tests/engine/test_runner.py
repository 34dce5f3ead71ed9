"""The runner: memory to blocks, and the time of a pass."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.loader import build_decoder
from outrider.engine.runner import ModelRunner, blocks_for_memory


def test_blocks_for_memory_counts_keys_and_values_of_all_layers() -> None:
    model = build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model
    per_block = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, kv heads, head_dim, tokens, bytes
    assert blocks_for_memory(model, 10 * per_block + 5) == 10
    cache = ModelRunner(model, 10).cache
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 10 * per_block
    with pytest.raises(ValueError, match="no block"):
        blocks_for_memory(model, per_block - 1)


def test_forward_is_timed_and_records_no_gradient() -> None:
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model, 4)
    logits = runner.forward([BatchEntry([1, 2, 3], 0, [2], 1)])
    assert runner.last_forward_us > 0
    assert logits.is_inference() and not logits.requires_grad


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
