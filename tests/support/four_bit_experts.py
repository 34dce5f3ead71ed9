"""gpt-oss as it is published: the experts of a layer in one tensor, in floats of 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models import tiny_hf_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def in_four_bits(folder: Path, **options: Any) -> Any:
    """Rewrites the experts of a checkpoint of SIZES and `options` as random blocks; returns transformers' model of what
    they stand for."""
    generator = torch.Generator().manual_seed(3)
    model = tiny_hf_model("gpt_oss", seed=1, **SIZES | options)
    state, numbers = load_file(folder / "model.safetensors"), dict(model.state_dict())
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), generator=generator).to(torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kept}))
    model.load_state_dict(numbers)
    return model
