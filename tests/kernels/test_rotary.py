"""Rotary embedding against complex rotation."""

from __future__ import annotations

import torch

from outrider.kernels.layers.reference import apply_rotary, rotary_table


def test_rotation_equals_complex_multiplication() -> None:
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = rotary_table(inv_freq, 1.5, 20, torch.float32)
    x, positions = torch.randn(6, 3, 8), torch.tensor([0, 1, 7, 7, 19, 3])
    turned = apply_rotary(x, cos[positions][:, None], sin[positions][:, None])
    pairs = torch.complex(x[..., :4], x[..., 4:])  # element i turns with element i + 4
    angles = positions[:, None, None] * inv_freq
    expected = pairs * torch.polar(torch.full_like(angles, 1.5), angles)
    torch.testing.assert_close(turned, torch.cat([expected.real, expected.imag], -1), atol=1e-5, rtol=1e-5)
