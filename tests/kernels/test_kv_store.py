"""store_kv writes the named slots and no other.

The kernels that write the cache, against the CPU path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.kernels.kv_store import triton as kv_store_triton
from outrider.kernels.kv_store.reference import store_kv, store_kv_rotary
from outrider.kernels.layers.reference import apply_rotary, rms_norm


def test_rows_go_to_their_slots_and_others_stay() -> None:
    """Over what a block's sequence before left there."""
    key_cache, value_cache = torch.randn(3, 4, 2, 5), torch.randn(3, 4, 2, 6)
    keys, values = torch.randn(3, 2, 5), torch.randn(3, 2, 6)
    expected_keys, expected_values = key_cache.clone(), value_cache.clone()
    for row, (block, offset) in enumerate(((2, 3), (0, 0), (1, 2))):
        expected_keys[block, offset], expected_values[block, offset] = keys[row], values[row]
    store_kv(keys, values, key_cache, value_cache, torch.tensor([11, 0, 6]))
    assert torch.equal(key_cache, expected_keys) and torch.equal(value_cache, expected_values)


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


FP8 = torch.float8_e4m3fn
SHAPES = [(6, 2, 64), (3, 1, 80), (4, 4, 128), (17, 1, 18)]  # heads, kv heads, head size
SLOTS = torch.tensor([11, 0, -1, 6, 13])  # of five rows, one of which is padding
KEPT = SLOTS >= 0


def poisoned(kv_heads: int, dim: int, dtype: torch.dtype, value_dim: int | None = None) -> list[Tensor]:
    """Keys and values, all NaN: what is not written must stay so. The cache begins at the second block; slot -1 would
    be in the first."""
    return [torch.full((5, 4, kv_heads, size), torch.nan).to(dtype) for size in (dim, value_dim or dim)]


def cache_of(wholes: list[Tensor]) -> tuple[Tensor, Tensor]:
    return wholes[0][1:], wholes[1][1:]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        actual.cpu().float(), expected.float(), atol=4 * eps, rtol=4 * eps, equal_nan=True, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_dim", [80, 48])
def test_rows_go_to_their_slots(dtype: torch.dtype, value_dim: int, triton_device: torch.device) -> None:
    """Bit for bit, out of a view of something larger; padding goes nowhere."""
    whole = torch.randn(5, 9, 80).to(dtype)
    keys, values = whole[:, :3], whole[:, 3:6, :value_dim]
    expected = poisoned(3, 80, dtype, value_dim)
    store_kv(keys[KEPT], values[KEPT], *cache_of(expected), SLOTS[KEPT])
    caches = [cache.to(triton_device) for cache in poisoned(3, 80, dtype, value_dim)]
    whole = whole.to(triton_device)
    kv_store_triton.store_kv(whole[:, :3], whole[:, 3:6, :value_dim], *cache_of(caches), SLOTS.to(triton_device))
    for actual, wanted in zip(caches, expected, strict=True):
        assert torch.equal(actual.cpu().nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_norm_turn_and_store(
    normed: bool, shape: tuple[int, int, int], dtype: torch.dtype, triton_device: torch.device
) -> None:
    heads, kv_heads, dim = shape
    whole = torch.randn(5, heads + 2 * kv_heads + 1, dim).to(dtype)
    qkv = whole[:, 1:]
    rotary = torch.randn(5, 1, dim).to(dtype), torch.randn(5, 1, dim).to(dtype)
    weight = torch.rand(heads + kv_heads, dim).to(dtype) if normed else None

    expected = poisoned(kv_heads, dim, torch.float32)
    cos, sin = (part.float() for part in rotary)
    norm = None if weight is None else weight.float()
    kept = qkv[KEPT].float(), (cos[KEPT], sin[KEPT]), *cache_of(expected), SLOTS[KEPT]
    store_kv_rotary(*kept, qk_norm=norm, eps=1e-5)
    unused = cache_of(poisoned(kv_heads, dim, torch.float32))
    query = store_kv_rotary(qkv.float(), (cos, sin), *unused, torch.arange(5), qk_norm=norm, eps=1e-5)

    caches = [cache.to(triton_device) for cache in poisoned(kv_heads, dim, dtype)]
    out = kv_store_triton.store_kv_rotary(
        whole.to(triton_device)[:, 1:], (rotary[0].to(triton_device), rotary[1].to(triton_device)),
        *cache_of(caches), SLOTS.to(triton_device),
        qk_norm=None if weight is None else weight.to(triton_device), eps=1e-5,
    )  # fmt: skip
    close(out, query, dtype)
    close(caches[0], expected[0], dtype)
    close(caches[1], expected[1], dtype)


def test_an_fp8_cache_holds_what_the_scale_divides(triton_device: torch.device) -> None:
    """Of values that eight bits hold exactly, since the interpreter does not round to nearest; the greatest is kept."""
    exact = torch.randn(5, 6, 64).to(FP8).float()
    exact[0, 5, 0], exact[1, 4, 1] = 1e4, -1e4  # a value and a key out of range
    scales = torch.tensor([0.25]), torch.tensor([2.0])
    qkv = exact.clone()
    qkv[:, 4] *= 0.25
    qkv[:, 5] *= 2
    still = torch.ones(5, 1, 64), torch.zeros(5, 1, 64)
    for rotary in (False, True):
        expected, caches = poisoned(1, 64, FP8), [cache.to(triton_device) for cache in poisoned(1, 64, FP8)]
        store_kv(qkv[KEPT, 4:5], qkv[KEPT, 5:], *cache_of(expected), SLOTS[KEPT], kv_scales=scales)
        placed, slots = qkv.to(triton_device), SLOTS.to(triton_device)
        placed_scales = scales[0].to(triton_device), scales[1].to(triton_device)
        if rotary:
            turn = still[0].to(triton_device), still[1].to(triton_device)
            kv_store_triton.store_kv_rotary(placed, turn, *cache_of(caches), slots, kv_scales=placed_scales)
        else:
            kv_store_triton.store_kv(placed[:, 4:5], placed[:, 5:], *cache_of(caches), slots, kv_scales=placed_scales)
        for actual, wanted in zip(caches, expected, strict=True):
            assert torch.equal(actual.cpu().view(torch.uint8), wanted.view(torch.uint8))


def test_the_cpu_path_quantises_within_the_range_of_the_type() -> None:
    key_cache, value_cache = poisoned(1, 8, FP8)
    keys, values = torch.full((1, 1, 8), 1000.0), torch.full((1, 1, 8), -1.1)
    store_kv(keys, values, key_cache, value_cache, torch.tensor([2]), kv_scales=(torch.ones(1), torch.tensor([0.5])))
    assert key_cache[0, 2].float().tolist() == [[448.0] * 8]
    assert value_cache[0, 2].float().tolist() == [[-2.25] * 8]
    assert bool(key_cache[0, 1].float().isnan().all())
