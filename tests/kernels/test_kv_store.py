"""store_kv writes the named slots and no other."""

from __future__ import annotations

import torch

from outrider.kernels.kv_store import store_kv


def test_rows_go_to_their_slots_and_others_stay() -> None:
    key_cache, value_cache = torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 6)
    keys, values = torch.randn(3, 2, 5), torch.randn(3, 2, 6)
    store_kv(keys, values, key_cache, value_cache, torch.tensor([11, 0, 6]))
    for row, (block, offset) in enumerate(((2, 3), (0, 0), (1, 2))):
        assert torch.equal(key_cache[block, offset], keys[row])
        assert torch.equal(value_cache[block, offset], values[row])
        key_cache[block, offset] = 0
        value_cache[block, offset] = 0
    assert not key_cache.any() and not value_cache.any()
