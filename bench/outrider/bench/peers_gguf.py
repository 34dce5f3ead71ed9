"""Writes a Llama checkpoint as GGUF, which llama.cpp reads: float32 or bfloat16, token ids alone, no vocabulary.

Run by the python of a virtual environment with `gguf`; nothing of Outrider is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
DTYPES = {"F32": "<f4", "BF16": "<u2"}


def write_gguf(folder: Path, path: Path, *, bfloat16: bool = False) -> None:
    """Converts the checkpoint in `folder`: as float32, or its matrices as bfloat16 where that rounds no number."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: model_type is {config['model_type']}; only llama can be written")
    if config.get("rope_scaling") or "rope_theta" not in config:
        raise ValueError(f"{folder}: only a plain rope_theta can be written")
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _tensors(folder):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleave(tensor, heads if "q_proj" in name else kv_heads)
        bits = np.ascontiguousarray(tensor, dtype=np.float32).view("<u4")
        if bfloat16 and bits.ndim == 2 and not (bits & 0xFFFF).any():
            upper = (bits >> 16).astype("<u2").view(np.uint8)  # [out, bytes of in]
            writer.add_tensor(_renamed(name), upper, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(_renamed(name), bits.view("<f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the safetensors files, as float32."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            raw = np.frombuffer(data[start + first : start + last], DTYPES[entry["dtype"]])
            wide = raw if entry["dtype"] == "F32" else (raw.astype("<u4") << 16).view("<f4")
            yield name, wide.reshape(entry["shape"])


def _renamed(name: str) -> str:
    if name in TOP:
        return f"{TOP[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER[part.removesuffix('.weight')]}.weight"


def _interleave(weight: Any, heads: int) -> Any:
    """[heads x head_dim, in]: the two halves of each head that rotary embedding pairs, alternating."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)
