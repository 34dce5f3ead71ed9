"""Makes rotary tables a function of absolute position and config alone.

transformers picks the factors of long-RoPE and dynamic NTK from the longest sequence of the batch, so that a row would
change with its neighbours, and with its own later tokens."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.models.base import UnsupportedModel

PINNED = "outrider_pinned"  # a type that transformers' update leaves alone


def pin_rotary(model: nn.Module, max_model_len: int) -> None:
    """Chooses the factors of every long-RoPE table once, for sequences of up to `max_model_len` tokens. Raises
    UnsupportedModel for dynamic NTK, whose frequencies have no value that holds for every length."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _pin(module, kinds, None, max_model_len)  # type: ignore[assignment]
        elif isinstance(kinds, dict):  # one table per layer type
            pinned: Any = {name: _pin(module, kind, name, max_model_len) for name, kind in kinds.items()}
            module.rope_type = pinned


def _pin(module: nn.Module, kind: str, layer_type: str | None, max_model_len: int) -> str:
    if "dynamic" in kind:
        raise UnsupportedModel("dynamic NTK rotary frequencies change with the length of the batch")
    if kind != "longrope":
        return kind
    table = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")  # [rotary_dim / 2]
    factors = ROPE_INIT_FUNCTIONS[kind]
    frequencies, _ = factors(module.config, table.device, seq_len=max_model_len, layer_type=layer_type)
    table.copy_(frequencies)
    return PINNED
