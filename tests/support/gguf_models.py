"""Tiny random models as GGUF files, laid out as llama.cpp's converter does: names by its own table, its order of
Llama's queries and keys, Gemma's norms with the 1 added."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from support.gguf_files import Typed, write_gguf
from support.models import MIXTURES, tiny_hf_model, tiny_state
from torch import Tensor

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe", "gpt_oss": "gpt-oss",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {  # of families whose files leave something unsaid
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
}
Stored = tuple[tuple[int, ...], int, bytes]  # shape, number of the kind, contents
NUM_SPECIAL = 3  # tokens before the letters


def letters(vocab_size: int) -> dict[str, Any]:
    """Metadata of a tokenizer whose ids stand for single characters."""
    tokens = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + index) for index in range(vocab_size - NUM_SPECIAL))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * vocab_size,
        "tokenizer.ggml.token_type": Typed("i32", [2, 3, 3, *[1] * (vocab_size - NUM_SPECIAL)]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def as_gguf(
    path: Path,
    family: str,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tables: Mapping[str, Stored] | None = None,
    arranged: Callable[[dict[str, Stored]], dict[str, Stored]] = dict,
    **options: Any,
) -> tuple[Path, Any]:
    """Writes a model of a family, its matrices of a kind where their rows are whole blocks of it, and `tables` beside
    them, `arranged` otherwise; returns the path and transformers' model of the unrounded numbers."""
    model = tiny_hf_model(family, **(OPTIONS.get(family, {}) | options))
    config, name = model.config, ARCHITECTURES[family]
    table = gguf.get_tensor_name_map(_architecture(name), config.num_hidden_layers)
    tensors = dict(tables or {})
    for full, tensor in _with_stacked_experts(tiny_state(model)).items():
        stem, _, part = (f"{full}.weight" if full.endswith("sinks") else full).rpartition(".")
        numbers = _as_converted(family, full, tensor.numpy(), config)
        tensors[f"{table.get_name(stem)}.{part}"] = _stored(numbers, kind)
    keys = {f"{name}.{key}": value for key, value in _keys(family, config).items()}
    head = {"general.architecture": name}
    return write_gguf(path, head | keys | letters(config.vocab_size) | dict(metadata or {}), arranged(tensors)), model


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
FUSED = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?")


def gates_beside_ups(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """A layer's gates and ups in one tensor, each expert's behind one another."""
    found = dict(tensors)
    for name in [name for name in tensors if ".ffn_gate_exps." in name]:
        gate, up = found.pop(name), found.pop(name.replace("_gate_", "_up_"))
        (count, width, *rest), size = gate[0], len(gate[2]) // gate[0][0]
        each = [one[2][at : at + size] for at in range(0, count * size, size) for one in (gate, up)]
        found[name.replace("_gate_", "_gate_up_")] = (count, 2 * width, *rest), gate[1], b"".join(each)
    return found


def one_by_one(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """A tensor for every expert, as files of old have them."""
    found = dict(tensors)
    for name in [name for name in tensors if "_exps." in name]:
        shape, kind, data = found.pop(name)
        size = len(data) // shape[0]
        for index in range(shape[0]):
            lone = name.replace("_exps.", f".{index}.")
            found[lone] = shape[1:], kind, data[index * size : (index + 1) * size]
    return found


def _with_stacked_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a layer as one tensor, as the converter writes them; a vector of a single row."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        if (fused := FUSED.fullmatch(name)) is not None:  # gpt-oss's: gate and up by turns
            kind, outputs_first = ("bias", tensor) if fused[3] else ("weight", tensor.transpose(1, 2))
            turns = (
                {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if fused[2] == "gate_up" else {"down": slice(None)}
            )
            found |= {f"{fused[1]}.{part}_proj.{kind}": outputs_first[:, turn] for part, turn in turns.items()}
            continue
        match = EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor.flatten() if name.endswith("shared_expert_gate.weight") else tensor
        else:
            stacks.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = tensor
    return found | {name: torch.stack([parts[at] for at in sorted(parts)]) for name, parts in stacks.items()}


def _architecture(name: str) -> Any:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _as_converted(family: str, name: str, numbers: Any, config: Any) -> Any:
    if ARCHITECTURES[family] == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        shape = numbers.shape
        return numbers.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return numbers + 1 if family.startswith("gemma") and name.endswith("norm.weight") else numbers


def _stored(numbers: Any, kind: str) -> Stored:
    wanted = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    if numbers.ndim < 2 or numbers.shape[-1] % block:
        wanted = gguf.GGMLQuantizationType.F32
    data = gguf.quants.quantize(np.ascontiguousarray(numbers, dtype=np.float32), wanted)
    return tuple(numbers.shape), int(wanted), data.tobytes()


def _head_dim(config: Any) -> int:
    dim: int | None = getattr(config, "head_dim", None)
    return dim or int(config.hidden_size) // int(config.num_attention_heads)


def _keys(family: str, config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if family in MIXTURES:
        found["expert_count"] = getattr(config, "num_experts", 0) or config.num_local_experts
        found["expert_used_count"] = config.num_experts_per_tok
    if family == "qwen3_moe":
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    if family in ("mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss"):
        found["attention.sliding_window"] = config.sliding_window
    if family == "gemma2":
        found["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        found["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if family == "phi3":
        found["rope.dimension_count"] = config.head_dim
    if family in ("gemma3_text", "mixtral"):
        found["rope.freq_base"] = 1_000_000.0
    return found
