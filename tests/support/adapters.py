"""Small random adapters in PEFT's layout, for tests of every part; and the weights of their base with them merged in,
by the formula."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: dict[str, Any] = {  # what PEFT writes
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/base", "revision": None,
    "inference_mode": True, "r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": False,
    "use_rslora": False, "use_dora": False, "init_lora_weights": True, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "layers_to_transform": None, "layers_pattern": None, "megatron_config": None,
    "megatron_core": "megatron.core", "loftq_config": {}, "layer_replication": None, "qalora_group_size": 16,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    folder: Path,
    state: Mapping[str, Tensor],  # of the base
    targets: Sequence[str] = ALL,
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,  # by module's name, where it is not r
    scale: float = 0.15,  # of the factors' numbers
    **config: Any,
) -> Path:
    """Writes an adapter of the modules of the base whose names end in one of `targets`, and returns its folder."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    given = {**CONFIG, "target_modules": list(targets), **config}
    for name, weight in state.items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and module.endswith(tuple(f".{target}" for target in targets)):
            rank = (ranks or {}).get(module, given["r"])
            (outputs, inputs), stem = weight.shape, f"{PREFIX}{module}"
            tensors[f"{stem}.lora_A.weight"] = scale * torch.randn(rank, inputs, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = scale * torch.randn(outputs, rank, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(given))
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})
    return folder


def merged(state: Mapping[str, Tensor], folder: Path, scaling: float | Mapping[str, float] = 2.0) -> dict[str, Tensor]:
    """The base's tensors, each module's with scaling * B A added; `scaling` is alpha over rank, or by module."""
    whole, factors = {name: tensor.clone() for name, tensor in state.items()}, load_file(folder / WEIGHTS_FILE)
    for name, down in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            times = scaling if isinstance(scaling, float) else scaling[module]
            whole[f"{module}.weight"] += times * factors[f"{PREFIX}{module}.lora_B.weight"] @ down
    return whole
