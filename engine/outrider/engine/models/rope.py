"""Rotary tables: a function of absolute position and the configuration alone, never of a batch or a sequence's
length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.models.decoder_config import DecoderConfig, rotary_parameters
from outrider.kernels.rotary import rotary_table


def rotary_tables(config: DecoderConfig, dtype: torch.dtype) -> dict[str | None, tuple[Tensor, Tensor]]:
    """By type of layer cos and signed sin, [max_model_len, head_dim] each."""
    return {kind: _tables(config, kind, dtype) for kind in set(config.rotary_types)}


def turned_first(rows: Tensor, head_dim: int, width: int) -> Tensor:
    """rows: [heads * head_dim, ...], of which the first `width` of each head turn, element i with i + width / 2 -> in
    the tables' order, where element i turns with i + head_dim / 2."""
    order = torch.arange(head_dim)
    first, second, rest = order[: width // 2], order[width // 2 : width], order[width:]
    middle = len(rest) // 2
    order = torch.cat([first, rest[:middle], second, rest[middle:]])
    return rows.view(-1, head_dim, *rows.shape[1:])[:, order].flatten(0, 1)


def _tables(config: DecoderConfig, layer_type: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Only the first rotary_dim / 2 elements of each half of a head turn. Long-RoPE's factors are chosen once: the long
    ones if and only if `max_model_len` exceeds the length that the model was pretrained for."""
    parameters, width = rotary_parameters(config.hf, layer_type), config.rotary_dim
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        inv_freq, scaling = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        factors = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        inv_freq, scaling = factors(config.hf, torch.device("cpu"), seq_len=config.max_model_len, layer_type=layer_type)
    cos, sin = rotary_table(inv_freq, scaling, config.max_model_len, dtype)  # [positions, width] each
    return _widened(cos, config.head_dim, 1.0), _widened(sin, config.head_dim, 0.0)


def _widened(table: Tensor, head_dim: int, value: float) -> Tensor:
    """[positions, width] -> [positions, head_dim], each half filled up with `value`."""
    halves = table.view(table.shape[0], 2, -1)
    return F.pad(halves, (0, head_dim // 2 - halves.shape[2]), value=value).flatten(1)
