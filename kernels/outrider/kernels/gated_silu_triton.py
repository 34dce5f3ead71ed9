"""The feed-forward gates on an accelerator, computed in float32 and rounded once."""

# mypy: allow-untyped-decorators, disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.attention_steps_triton import tanh

WIDTH_TILE = 1024


def gated(gate_up: Tensor, activation: Literal["silu", "gelu", "gelu_tanh"]) -> Tensor:
    """Launches `gated_silu.gated_silu` or `gated_gelu`: [rows, 2 * width] -> [rows, width]."""
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    tile = min(WIDTH_TILE, triton.next_power_of_2(width))
    _gate_kernel[(rows, triton.cdiv(width, tile))](
        out, gate_up, width, gate_up.stride(0), ACTIVATION=activation, TILE=tile
    )
    return out


@triton.jit
def _gate_kernel(
    out: tl.tensor,  # [rows, width], written
    gate_up: tl.tensor,  # [rows, 2 * width]
    width: int,
    row_stride: int,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        fade = tl.exp(-tl.abs(gate))  # at most 1, where exp(-gate) might overflow
        active = gate * tl.where(gate >= 0, 1.0, fade) / (1.0 + fade)
    elif ACTIVATION == "gelu_tanh":
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * width + column, (active * up).to(out.dtype.element_ty), mask=inside)
