"""Rotary tables: a function of absolute position and the configuration alone, never of a batch or a sequence's
length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.models.base import UnsupportedModel
from outrider.kernels.rotary import rotary_table

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


def rotary_tables(config: Any, head_dim: int, max_model_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [max_model_len, head_dim] each. Long-RoPE's factors are chosen once: the long ones if and
    only if `max_model_len` exceeds the length that the model was pretrained for."""
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in SUPPORTED:
        reason = "it depends on the length of the batch" if kind == "dynamic" else f"only {', '.join(SUPPORTED)} are"
        raise UnsupportedModel(f"rotary embedding of type {kind!r} is not served: {reason}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial rotary embedding is not served by our own decoder")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return rotary_table(1.0 / parameters["rope_theta"] ** exponents, 1.0, max_model_len, dtype)
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_model_len)
    return rotary_table(inv_freq, scaling, max_model_len, dtype)
