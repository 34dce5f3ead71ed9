"""Root-mean-square normalisation over the last dimension, alone or after a residual is added.

The gate of a feed-forward layer: silu(gate) * up, or gelu(gate) * up.

Rotary position embedding, in the layout where element i turns with element i + dim / 2.

Matrix products with weights laid out once, at load, for the kernel that runs them. Weights of 8 bits.

Measured on 2 threads (float32, ms a product of [rows, 1024] by [8192, 1024]): F.linear 2.3-3.3 (1-2 rows), 6.7 (5), 9.5
(8); oneDNN's packed layout 2.5-3.5, 4.0, 4.4. A packed call costs 20 microseconds more than `torch.mm` with the
transposed weight, which is the fastest for weights that fit the second-level cache, at every number of rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.batch_invariant import TILE_ROWS, by_row_tiles


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, batch_invariant: bool = False) -> Tensor:
    """x: [rows, ..., dim]; weight: [dim] or [..., dim] -> [rows, ..., dim], computed in float32. A float32 weight
    multiplies before the result is rounded to the type of x; on the CPU one of x's own type does so after."""
    if dispatch.runs_triton(x):
        from outrider.kernels.layers.triton import rms_norm as launch

        return launch(x, weight, eps)
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps, batch_invariant=batch_invariant).to(x.dtype)
    if batch_invariant:
        return by_row_tiles(lambda tile: _reference(tile, weight, eps), x)
    if weight.dim() == 1:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x, (x.shape[-1],), None, eps) * weight


def add_rms_norm(
    x: Tensor,  # [rows, dim]
    residual: Tensor,  # [rows, dim]
    weight: Tensor,  # [dim]
    eps: float,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:  # [rows, dim] each
    """The norm of the sum, and the sum, rounded to its type before it is normed."""
    if dispatch.runs_triton(x):
        from outrider.kernels.layers.triton import add_rms_norm as launch

        return launch(x, residual, weight, eps)
    total = residual + x
    return rms_norm(total, weight, eps, batch_invariant=batch_invariant), total


def _reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [rows, ..., dim]
    wide = x.float()
    norm = (wide.square().mean(-1, keepdim=True) + eps).sqrt()  # [rows, ..., 1]
    return (wide / norm).to(x.dtype) * weight


def gated_silu(gate_up: Tensor, *, batch_invariant: bool = False) -> Tensor:  # [rows, 2 * width] -> [rows, width]
    """The gate is the first half of each row."""
    if dispatch.runs_triton(gate_up):
        from outrider.kernels.layers.triton import gated

        return gated(gate_up, "silu")
    gate, up = gate_up.chunk(2, dim=-1)
    if batch_invariant:  # silu's bits depend on the place of an element, those of exp do not
        return gate / (1 + torch.exp(-gate)) * up
    return F.silu(gate).mul_(up)


def gated_gelu(
    gate_up: Tensor,  # [rows, 2 * width]
    *,
    approximate: bool = True,
    batch_invariant: bool = False,
) -> Tensor:  # [rows, width]
    """The same with gelu: by default its approximation with tanh, as Gemma has it, else with erf."""
    if dispatch.runs_triton(gate_up):
        from outrider.kernels.layers.triton import gated

        return gated(gate_up, "gelu_tanh" if approximate else "gelu")
    gate, up = gate_up.chunk(2, dim=-1)
    if batch_invariant:  # gelu's bits depend on the place of an element, as silu's do
        inner = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)) if approximate else None
        return gate * 0.5 * (1 + (torch.erf(gate * math.sqrt(0.5)) if inner is None else inner)) * up
    return F.gelu(gate, approximate="tanh" if approximate else "none").mul_(up)


def gated_clamped(
    gate_up: Tensor,  # [rows, 2 * width]
    *,
    slope: float,
    limit: float,
    batch_invariant: bool = False,
) -> Tensor:  # [rows, width]
    """gpt-oss's: (up + 1) * gate * sigmoid(slope * gate), of a gate of at most `limit` and an up of at most that size.
    In plain PyTorch, whose bits of exp depend on no place."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate / (1 + torch.exp(-slope * gate)))


def rotary_table(inv_freq: Tensor, scaling: float, max_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """inv_freq: [dim / 2] -> cos and signed sin, [max_positions, dim] each. The first half of the sines is negated, so
    that a turn is x * cos + roll(x) * sin."""
    angles = (
        torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq.float()[None, :]
    )  # [positions, dim / 2]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x: [rows, heads, dim]; cos and signed_sin: [rows, 1, dim], the table's rows of their positions -> [rows, heads,
    dim]."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(signed_sin))


INT8 = 127  # greatest magnitude: symmetric


def int8_scales(weight: Tensor) -> Tensor:  # [out, in] of any floating type -> [out] float32
    """What the 8-bit integers of each output are multiplied with: its greatest magnitude becomes 127."""
    scales = weight.abs().amax(1).float() / INT8
    return torch.where(scales > 0, scales, 1.0)


def to_int8(weight: Tensor, scales: Tensor) -> Tensor:  # [out, in] of any floating type, [out] -> [out, in] int8
    """The nearest integers."""
    return (weight.float() / scales[:, None]).round_().clamp_(-INT8, INT8).to(torch.int8)


def through_int8(weight: Tensor) -> Tensor:  # [out, in] of any floating type -> the same, float32
    """The numbers that 8 bits hold of it."""
    scales = int8_scales(weight)
    return to_int8(weight, scales) * scales[:, None]


SMALL_WEIGHT = 512 * 1024  # elements: up to here the transposed layout wins
PLAIN_ROWS = 2  # up to this many rows the plain layout is 10-25 % faster than the packed one


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a layout of its own for weights of this type on this processor: not for 16 bits on one of AVX2
    alone."""
    library = torch.ops.mkldnn
    checks = {torch.bfloat16: library._is_mkldnn_bf16_supported, torch.float16: library._is_mkldnn_fp16_supported}
    has_layouts: bool = torch.backends.mkldnn.is_available()
    return has_layouts and bool(checks.get(dtype, lambda: True)())


LEAST_OUTPUTS = 16  # of a product on the CPU whose rows' bits do not depend on where they stand in a tile


def _widened(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:  # [out, in], [out]
    """With outputs of zeros behind the others."""
    lacking = LEAST_OUTPUTS - len(weight)
    return F.pad(weight, (0, 0, 0, lacking)), None if bias is None else F.pad(bias, (0, lacking))


class Linear:
    """y = x W^T + b. The layout is a function of shape, dtype and device alone, so that equal processes compute equal
    bits. Batch-invariant products are row tiles on a CPU and a kernel of one tile shape elsewhere."""

    __slots__ = ("_batch_invariant", "_bias", "_num_outputs", "_packed", "_plain", "_transposed")

    def __init__(
        self,
        weight: Tensor,  # [out, in]
        bias: Tensor | None = None,  # [out]
        *,
        batch_invariant: bool = False,
        keep_plain: bool = True,  # a second copy, for one and two rows
    ) -> None:
        self._bias = bias
        self._batch_invariant = batch_invariant
        self._num_outputs = len(weight)
        if batch_invariant and weight.device.type == "cpu" and len(weight) < LEAST_OUTPUTS:
            weight, self._bias = _widened(weight, bias)
        self._packed: Tensor | None = None
        self._plain: Tensor | None = None
        self._transposed: Tensor | None = None
        if dispatch.runs_triton(weight) or weight.device.type != "cpu":
            self._plain = weight
        elif weight.numel() <= SMALL_WEIGHT:
            self._transposed = weight.t().contiguous()
        elif not _can_pack(weight.dtype):
            self._plain = weight
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TILE_ROWS)
            self._plain = weight if keep_plain and not batch_invariant else None

    @property
    def weight(self) -> Tensor | None:  # [out, in]
        """None where another layout alone is kept."""
        return self._plain

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        """The product."""
        if dispatch.runs_triton(x) and self._batch_invariant and self._plain is not None:
            from outrider.kernels.layers import triton as layers_triton

            return layers_triton.linear(x, self._plain, self._bias)
        if not self._batch_invariant:
            return self._product(x)
        product = by_row_tiles(self._product, x)
        return product if product.shape[1] == self._num_outputs else product[:, : self._num_outputs].contiguous()

    def _product(self, x: Tensor) -> Tensor:  # [rows, in] -> [rows, out]
        if self._transposed is not None:
            return torch.mm(x, self._transposed) if self._bias is None else torch.addmm(self._bias, x, self._transposed)
        if self._packed is None or (self._plain is not None and x.shape[0] <= PLAIN_ROWS):
            return F.linear(x, self._plain, self._bias)  # type: ignore[arg-type]
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product
