"""What a GGUF file's metadata say of its model, as the contents of a config.json, and its tensors by the names that
transformers gave them.

Some of it is in no key: that Gemma 3's every sixth layer looks at everything, with a rotary base of its own for the
others, how the largest Gemmas scale their scores (`llama.cpp`, src/llama-model.cpp), and whether a head is the
embeddings, which is said by its absence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.gguf.header import GgufHeader, Metadata, TensorPlace, WrongGguf

EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # tables, not weights
GEMMA_ACTIVATION = "gelu_pytorch_tanh"
GEMMA3_PATTERN, GEMMA3_LOCAL_BASE = 6, 10_000.0
SCALED_BY_HEADS = {"gemma2": 46, "gemma3": 62}  # layers of those whose scores are scaled by hidden size over heads

_TOP = {EMBEDDINGS: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_NORMS = {"ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {  # of the newer Gemmas
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a kind of model lies in a GGUF file."""

    model_type: str  # transformers' word
    turned: bool = False  # rows of queries and keys are in the order of the original Llama's rotary embedding
    norms_with_one: bool = False  # to which Gemma's 1 was added
    norms_after: bool = False
    fused: bool = False  # gate and up are one
    more: Callable[[Metadata, GgufHeader], dict[str, Any]] = lambda keys, header: {}


def _gemma(keys: Metadata, header: GgufHeader) -> dict[str, Any]:
    return {"hidden_activation": GEMMA_ACTIVATION, "hidden_act": GEMMA_ACTIVATION}


def _newer_gemma(name: str) -> Callable[[Metadata, GgufHeader], dict[str, Any]]:
    def more(keys: Metadata, header: GgufHeader) -> dict[str, Any]:
        by_heads = keys["block_count"] == SCALED_BY_HEADS[name]
        scaled_by = keys["embedding_length"] // keys["attention.head_count"] if by_heads else _head_dim(keys)
        found = {
            "query_pre_attn_scalar": scaled_by,
            "final_logit_softcapping": keys.get("final_logit_softcapping"),
            "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        }
        if name == "gemma3":
            found |= _gemma3_layers(keys)
        return _gemma(keys, header) | found

    return more


def _gemma3_layers(keys: Metadata) -> dict[str, Any]:
    pattern = keys.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    if isinstance(pattern, tuple | list):
        slides = [bool(one) for one in pattern]
    else:
        slides = [bool((layer + 1) % pattern) for layer in range(keys["block_count"])]
    base = keys.get("rope.freq_base", 1_000_000.0)
    factor = keys.get("rope.scaling.factor", 1.0)
    scaled = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
    local = keys.get("rope.freq_base_swa", GEMMA3_LOCAL_BASE)
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "rope_parameters": {
            "full_attention": scaled | {"rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(keys: Metadata, header: GgufHeader) -> dict[str, Any]:
    turned, dim = keys.get("rope.dimension_count"), _head_dim(keys)
    return {"partial_rotary_factor": turned / dim} if turned not in (None, dim) else {}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norms_with_one=True, more=_gemma),
    "gemma2": Architecture("gemma2", norms_with_one=True, norms_after=True, more=_newer_gemma("gemma2")),
    "gemma3": Architecture("gemma3_text", norms_with_one=True, norms_after=True, more=_newer_gemma("gemma3")),
    "phi3": Architecture("phi3", fused=True, more=_phi3),
}


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises WrongGguf for one that our decoder does not compute."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise WrongGguf(f"{header.files[0]}: general.architecture: is {name!r:.60}; allowed: {allowed}")
    return ARCHITECTURES[name]


class _Keys(Mapping[str, Any]):
    """The metadata of the architecture; what has to be there and is not is named."""

    def __init__(self, header: GgufHeader) -> None:
        self._prefix, self._header = f"{header.metadata['general.architecture']}.", header

    def __getitem__(self, key: str) -> Any:
        try:
            return self._header.metadata[self._prefix + key]
        except KeyError:
            raise WrongGguf(f"{self._header.files[0]} has no {self._prefix}{key}") from None

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary's."""
        return self._header.metadata.get(self._prefix + key, default)

    def __iter__(self) -> Any:
        return (key.removeprefix(self._prefix) for key in self._header.metadata if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _head_dim(keys: Metadata) -> int:
    given = keys.get("attention.key_length")
    return int(given) if given is not None else int(keys["embedding_length"]) // int(keys["attention.head_count"])


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The contents of a config.json. Raises WrongGguf."""
    architecture, keys = architecture_of(header), _Keys(header)
    if EMBEDDINGS not in header.tensors:
        raise WrongGguf(f"{header.files[0]} has no {EMBEDDINGS}")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": header.tensors[EMBEDDINGS].shape[0],
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys.get("attention.head_count_kv", keys["attention.head_count"]),
        "head_dim": _head_dim(keys),
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": keys["context_length"],
        "tie_word_embeddings": HEAD not in header.tensors,
        "rope_parameters": _rotary(keys),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    window = keys.get("attention.sliding_window")
    if window:
        config["sliding_window"] = window
        if architecture.model_type == "llama":
            config["model_type"] = "mistral"
    return config | architecture.more(keys, header)


def _rotary(keys: Metadata) -> dict[str, Any]:
    """Without factor tables, which are tensors."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0)}
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 1.0)
    if kind in ("linear", "yarn") and factor != 1.0:
        found |= {"rope_type": kind, "factor": factor}
        if (original := keys.get("rope.scaling.original_context_length")) is not None:
            found["original_max_position_embeddings"] = original
    return found


def hugging_face_names(header: GgufHeader) -> dict[str, TensorPlace]:
    """The tensors by their names in a Hugging Face checkpoint. Raises WrongGguf for what has none."""
    architecture = architecture_of(header)
    in_layer = _IN_LAYER | (_NORMS_AFTER if architecture.norms_after else _NORMS)
    if architecture.fused:
        in_layer = in_layer | {"ffn_up": "mlp.gate_up_proj"}
    found: dict[str, TensorPlace] = {}
    unknown: list[str] = []
    for name, place in header.tensors.items():
        if name in FACTORS:
            continue
        _, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        stem, _, kind = part.rpartition(".")
        if name in _TOP:
            found[_TOP[name]] = place
        elif name.startswith("blk.") and layer.isdecimal() and stem in in_layer and kind in ("weight", "bias"):
            found[f"model.layers.{int(layer)}.{in_layer[stem]}.{kind}"] = place
        else:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise WrongGguf(f"{header.files[0]} holds tensors that are not known: {', '.join(unknown[:4])}{more}")
    return found
