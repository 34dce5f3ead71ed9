"""store_kv writes the named slots and no other."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.kv_store.reference import store_kv, store_kv_rotary
from outrider.kernels.layers.reference import apply_rotary, rms_norm


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


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_fused_form_has_the_bits_of_its_parts(batch_invariant: bool, normed: bool) -> None:
    qkv, rotary = torch.randn(5, 4 + 2 * 2, 6), (torch.randn(5, 1, 6), torch.randn(5, 1, 6))
    weight = torch.rand(6, 6) if normed else None
    slots = torch.tensor([11, 0, 6, 2, 7])
    caches, expected = ([torch.zeros(3, 4, 2, 6), torch.zeros(3, 4, 2, 6)] for _ in range(2))
    turned = qkv[:, :6] if weight is None else rms_norm(qkv[:, :6], weight, 1e-5, batch_invariant=batch_invariant)
    turned = apply_rotary(turned, *rotary)
    store_kv(turned[:, 4:], qkv[:, 6:], expected[0], expected[1], slots)
    query = store_kv_rotary(
        qkv, rotary, caches[0], caches[1], slots, qk_norm=weight, eps=1e-5, batch_invariant=batch_invariant
    )
    assert torch.equal(query, turned[:, :4])
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])
