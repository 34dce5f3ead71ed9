"""The gate of a feed-forward layer: silu(gate) * up, or gelu(gate) * up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch


def gated_silu(gate_up: Tensor, *, batch_invariant: bool = False) -> Tensor:  # [rows, 2 * width] -> [rows, width]
    """The gate is the first half of each row."""
    if dispatch.runs_triton(gate_up):
        from outrider.kernels.gated_silu_triton import gated

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
        from outrider.kernels.gated_silu_triton import gated

        return gated(gate_up, "gelu_tanh" if approximate else "gelu")
    gate, up = gate_up.chunk(2, dim=-1)
    if batch_invariant:  # gelu's bits depend on the place of an element, as silu's do
        inner = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)) if approximate else None
        return gate * 0.5 * (1 + (torch.erf(gate * math.sqrt(0.5)) if inner is None else inner)) * up
    return F.gelu(gate, approximate="tanh" if approximate else "none").mul_(up)
