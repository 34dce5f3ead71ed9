"""What a GGUF file's metadata say of its model, as the contents of a config.json, and its tensors by the names that
transformers gave them.

Some of it is in no key: that Gemma 3's every sixth layer looks at everything, with a rotary base of its own for the
others, how the largest Gemmas scale their scores (`llama.cpp`, src/llama-model.cpp), and whether a head is the
embeddings, which is said by its absence. Factors of rotary frequencies are tensors there: they become the tables of
transformers' "longrope", which divides by them in the same way."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import isfinite, log
from typing import Any

from outrider.gguf.header import GgufHeader, TensorPlace, WrongGguf

EMBEDDINGS, HEAD = "token_embd.weight", "output.weight"
FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
SINKS = "attn_sinks.weight"  # in a layer
SOFTMAX, SOFTMAX_OF_CHOSEN = 1, 3  # how routers weigh, in llama.cpp's numbers; both are the same where these sum to 1
TABLES = (FACTORS, SHORT_FACTORS, LONG_FACTORS)  # not weights
MOST_SIZE = 1 << 24  # of anything that a key counts
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
# Of all experts of a layer a part or, in rows behind one another, two; and in files of old a part of one.
_EXPERTS = {
    "ffn_gate_exps": ("gate",), "ffn_up_exps": ("up",), "ffn_down_exps": ("down",), "ffn_gate_up_exps": ("gate", "up"),
}  # fmt: skip
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d{1,5})")
AFTER_ATTENTION = "post_attention_layernorm"
_NORMS_AFTER = {  # of the newer Gemmas
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Keys:
    """The metadata of a file's architecture; what is not there and has to be, or is of another type, is named."""

    def __init__(self, header: GgufHeader) -> None:
        self.prefix, self.header = f"{header.metadata['general.architecture']}.", header

    def size(self, key: str, default: int | None = None) -> int:
        """A count of something."""
        value = self.value(key, default)
        if type(value) is not int or not 1 <= value <= MOST_SIZE:
            raise self._wrong(key, value, f"1 to {MOST_SIZE}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.value(key, default)
        if type(value) not in (int, float) or not isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def value(self, key: str, default: Any = None) -> Any:
        """What is there, or the default, unless that is None."""
        found = self.header.metadata.get(self.prefix + key, default)
        if found is None:
            raise WrongGguf(f"{self.header.files[0]} has no {self.prefix}{key}")
        return found

    def one_of(self, key: str, allowed: Collection[Any]) -> None:
        """Checks a value."""
        value = self.value(key)
        if value not in allowed:
            raise self._wrong(key, value, ", ".join(map(str, allowed)))

    def has(self, key: str) -> bool:
        """Whether it is there."""
        return self.prefix + key in self.header.metadata

    def _wrong(self, key: str, value: Any, allowed: str) -> WrongGguf:
        return WrongGguf(f"{self.header.files[0]}: {self.prefix}{key}: is {value!r:.60}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Experts:
    """What transformers calls the parts of a layer of experts, and its configuration their number."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    router: str = "gate"

    def in_layer(self) -> dict[str, str]:
        """The names of what is no expert's alone."""
        shared = f"{self.block}.shared_expert"
        return {
            "ffn_gate_inp": f"{self.block}.{self.router}", "ffn_gate_inp_shexp": f"{shared}_gate",
            "ffn_gate_shexp": f"{shared}.{self.gate}", "ffn_up_shexp": f"{shared}.{self.up}",
            "ffn_down_shexp": f"{shared}.{self.down}",
        }  # fmt: skip

    def name(self, index: int, part: str) -> str:
        """An expert's matrix."""
        return f"{self.block}.experts.{index}.{getattr(self, part)}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a kind of model lies in a GGUF file."""

    model_type: str  # transformers' word
    turned: bool = False  # rows of queries and keys are in the order of the original Llama's rotary embedding
    norms_with_one: bool = False  # to which Gemma's 1 was added
    norms_after: bool = False
    fused: bool = False  # gate and up are one
    experts: Experts | None = None
    norm_before_feed: str = "ffn_norm"
    more: Callable[[Keys], dict[str, Any]] = lambda keys: {}


def _gemma(keys: Keys) -> dict[str, Any]:
    return {"hidden_activation": GEMMA_ACTIVATION, "hidden_act": GEMMA_ACTIVATION}


def _newer_gemma(name: str) -> Callable[[Keys], dict[str, Any]]:
    def more(keys: Keys) -> dict[str, Any]:
        by_heads = keys.size("block_count") == SCALED_BY_HEADS[name]
        scaled_by = keys.size("embedding_length") // keys.size("attention.head_count") if by_heads else _head_dim(keys)
        found: dict[str, Any] = {"query_pre_attn_scalar": scaled_by}
        for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
            found[cap] = keys.real(cap) if keys.has(cap) else None
        return _gemma(keys) | found | (_gemma3_layers(keys) if name == "gemma3" else {})

    return more


def _gemma3_layers(keys: Keys) -> dict[str, Any]:
    pattern, count = keys.value("attention.sliding_window_pattern", GEMMA3_PATTERN), keys.size("block_count")
    if isinstance(pattern, tuple | list):
        slides = [bool(one) for one in pattern]
    else:
        period = keys.size("attention.sliding_window_pattern", GEMMA3_PATTERN)
        slides = [bool((layer + 1) % period) for layer in range(count)]
    factor = keys.real("rope.scaling.factor", 1.0)
    scaled = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "rope_parameters": {
            "full_attention": scaled | {"rope_theta": keys.real("rope.freq_base", 1_000_000.0)},
            "sliding_attention": {
                "rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", GEMMA3_LOCAL_BASE),
            },
        },
    }  # fmt: skip


def _phi3(keys: Keys) -> dict[str, Any]:
    """Only a part of each head may turn."""
    turned, dim = keys.size("rope.dimension_count", _head_dim(keys)), _head_dim(keys)
    return {"partial_rotary_factor": turned / dim} if turned != dim else {}


def _mixture(experts: Experts, normalised: bool) -> Callable[[Keys], dict[str, Any]]:
    def more(keys: Keys) -> dict[str, Any]:
        tensors, count = keys.header.tensors, keys.size("block_count")
        _check_routing(keys, normalised)
        found: dict[str, Any] = {
            experts.count: keys.size("expert_count"),
            "num_experts_per_tok": keys.size("expert_used_count"),
            experts.width: _width(keys, "ffn_up_exps", "expert_feed_forward_length"),
            "norm_topk_prob": normalised,
            "mlp_only_layers": [layer for layer in range(count) if f"blk.{layer}.ffn_gate.weight" in tensors],
            "qkv_bias": "blk.0.attn_q.bias" in tensors,
        }
        if any(".ffn_gate_shexp." in name for name in tensors):
            found["shared_expert_intermediate_size"] = _width(
                keys, "ffn_gate_shexp", "expert_shared_feed_forward_length"
            )
        return found

    return more


def _check_routing(keys: Keys, normalised: bool) -> None:
    """What the architecture's code decides is not said otherwise. Raises WrongGguf."""
    for key, allowed in (
        ("expert_weights_norm", (normalised,)), ("expert_weights_scale", (0.0, 1.0)),
        ("expert_gating_func", (0, SOFTMAX, SOFTMAX_OF_CHOSEN) if normalised else (0, SOFTMAX)),
        ("expert_group_count", (0, 1)),
    ):  # fmt: skip
        if keys.has(key):
            keys.one_of(key, allowed)


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    """Every second layer slides, from the first on; where YaRN's frequencies begin to change is not rounded."""
    count = keys.size("block_count")
    found = _mixture(GPT_OSS_EXPERTS, True)(keys) | {"rope_parameters": _rotary(keys) | {"truncate": False}}
    return found | {"layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(count)]}


def _width(keys: Keys, tensor: str, key: str) -> int:
    """Channels of an expert's feed-forward: by its key or, in files of old, by its tensors."""
    if keys.has(key):
        return keys.size(key)
    for name, place in keys.header.tensors.items():
        if f".{tensor}." in name and len(place.shape) > 1:
            return place.shape[-2]
    return keys.size("feed_forward_length")  # as where they lie together, or one by one


QWEN_EXPERTS = Experts()
OLMOE_EXPERTS = Experts(width="intermediate_size")
GPT_OSS_EXPERTS = Experts(count="num_local_experts", width="intermediate_size", router="router")
MIXTRAL_EXPERTS = Experts("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", "intermediate_size")
MIXTRAL = Architecture("mixtral", turned=True, experts=MIXTRAL_EXPERTS, more=_mixture(MIXTRAL_EXPERTS, True))
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", turned=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norms_with_one=True, more=_gemma),
    "gemma2": Architecture("gemma2", norms_with_one=True, norms_after=True, more=_newer_gemma("gemma2")),
    "gemma3": Architecture("gemma3_text", norms_with_one=True, norms_after=True, more=_newer_gemma("gemma3")),
    "phi3": Architecture("phi3", fused=True, more=_phi3),
    "qwen2moe": Architecture("qwen2_moe", experts=QWEN_EXPERTS, more=_mixture(QWEN_EXPERTS, False)),
    "qwen3moe": Architecture("qwen3_moe", experts=QWEN_EXPERTS, more=_mixture(QWEN_EXPERTS, True)),
    "gpt-oss": Architecture("gpt_oss", experts=GPT_OSS_EXPERTS, norm_before_feed="post_attention_norm", more=_gpt_oss),
    "olmoe": Architecture("olmoe", experts=OLMOE_EXPERTS, more=_mixture(OLMOE_EXPERTS, False)),
}


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises WrongGguf for one that our decoder does not compute."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise WrongGguf(f"{header.files[0]}: general.architecture: is {name!r:.60}; allowed: {allowed}")
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    return ARCHITECTURES[name]


def _head_dim(keys: Keys) -> int:
    if keys.has("attention.key_length"):
        return keys.size("attention.key_length")
    return keys.size("embedding_length") // keys.size("attention.head_count")


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The contents of a config.json. Raises WrongGguf."""
    architecture, keys, tensors = architecture_of(header), Keys(header), header.tensors
    if EMBEDDINGS not in tensors:
        raise WrongGguf(f"{header.files[0]} has no {EMBEDDINGS}")
    if keys.size("block_count") > len(tensors):
        raise WrongGguf(f"{header.files[0]} has {len(tensors)} tensors, and {keys.size('block_count')} blocks")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": tensors[EMBEDDINGS].shape[0],
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": keys.size("attention.head_count"),
        "num_key_value_heads": keys.size("attention.head_count_kv", keys.size("attention.head_count")),
        "head_dim": _head_dim(keys),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.size("context_length"),
        "tie_word_embeddings": HEAD not in tensors,
        "rope_parameters": _rotary(keys),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if keys.has("attention.sliding_window"):
        config["sliding_window"] = keys.size("attention.sliding_window")
        if architecture.model_type == "llama":
            config["model_type"] = "mistral"
    return config | architecture.more(keys)


def _rotary(keys: Keys) -> dict[str, Any]:
    base, tensors = {"rope_theta": keys.real("rope.freq_base", 10_000.0)}, keys.header.tensors
    if any(name in tensors for name in TABLES):
        return base | _factors(keys)
    kind, factor = keys.value("rope.scaling.type", "none"), keys.real("rope.scaling.factor", 1.0)
    if kind not in ("linear", "yarn") or factor == 1.0:
        return base | {"rope_type": "default"}
    found = base | {"rope_type": kind, "factor": factor}
    if keys.has("rope.scaling.original_context_length"):
        found["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    if kind == "yarn":
        bounds = ("beta_fast", "beta_slow")
        found |= {one: keys.real(f"rope.scaling.yarn_{one}") for one in bounds if keys.has(f"rope.scaling.yarn_{one}")}
    if kind == "yarn" and keys.has("rope.scaling.attn_factor"):  # of the factor that follows from the other
        found["attention_factor"] = keys.real("rope.scaling.attn_factor") * (0.1 * log(factor) + 1.0)
    return found


def _factors(keys: Keys) -> dict[str, Any]:
    """Llama 3's are one table, Phi's two: one up to the length that the model was trained for, and one beyond."""
    tensors, only = keys.header.tensors, keys.header.tensors.get(FACTORS)
    places = [only, only] if only is not None else [tensors.get(name) for name in (SHORT_FACTORS, LONG_FACTORS)]
    turned = keys.size("rope.dimension_count", _head_dim(keys))
    short, long = (_table(keys, place, turned // 2) for place in places)
    longest = keys.size("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", longest),
        "attention_factor": keys.real("rope.scaling.attn_factor", 1.0),
    }


def _table(keys: Keys, place: TensorPlace | None, length: int) -> list[float]:
    if place is None:
        raise WrongGguf(f"{keys.header.files[0]} has one of {SHORT_FACTORS} and {LONG_FACTORS}; allowed: both")
    if place.kind.name != "F32" or place.shape != (length,):
        given = f"is {place.kind.name} of shape {place.shape}"
        raise WrongGguf(f"{place.path}: {place.name}: {given}; allowed: F32 of shape ({length},)")
    with place.path.open("rb") as opened:
        opened.seek(place.start)
        found = struct.unpack(f"<{length}f", opened.read(place.num_bytes))
    if not all(isfinite(factor) and factor > 0 for factor in found):
        raise WrongGguf(f"{place.path}: {place.name}: has factors that are no numbers above 0")
    return list(found)


def hugging_face_names(header: GgufHeader) -> dict[str, TensorPlace]:
    """The tensors by their names in a Hugging Face checkpoint. Raises WrongGguf for what has none."""
    architecture = architecture_of(header)
    norms = _NORMS_AFTER if architecture.norms_after else {architecture.norm_before_feed: AFTER_ATTENTION}
    in_layer = _IN_LAYER | norms
    if architecture.fused:
        in_layer = in_layer | {"ffn_up": "mlp.gate_up_proj"}
    experts, num_experts = architecture.experts, 0
    if experts is not None:
        in_layer, num_experts = in_layer | experts.in_layer(), Keys(header).size("expert_count")
    found: dict[str, TensorPlace] = {}
    unknown: list[str] = []
    for name, place in header.tensors.items():
        if name in TABLES:
            continue
        _, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        stem, _, kind = part.rpartition(".")
        is_in_block = name.startswith("blk.") and layer.isdecimal()
        if name in _TOP:
            found[_TOP[name]] = place
        elif is_in_block and part == SINKS:
            found[f"model.layers.{int(layer)}.self_attn.sinks"] = place
        elif experts is not None and is_in_block and stem in _EXPERTS and len(place.shape) == _sides(kind):
            for index, one in enumerate(_each(place, num_experts)):
                for part, half in zip(_EXPERTS[stem], _parts(one, len(_EXPERTS[stem])), strict=True):
                    found[f"model.layers.{int(layer)}.{experts.name(index, part)}.{kind}"] = half
        elif experts is not None and is_in_block and (lone := _ONE_EXPERT.fullmatch(stem)):
            found[f"model.layers.{int(layer)}.{experts.name(int(lone[2]), lone[1])}.{kind}"] = place
        elif is_in_block and stem in in_layer and kind in ("weight", "bias"):
            found[f"model.layers.{int(layer)}.{in_layer[stem]}.{kind}"] = _as_matrix(place, stem)
        else:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise WrongGguf(f"{header.files[0]} holds tensors that are not known: {', '.join(unknown[:4])}{more}")
    return found


def _sides(kind: str) -> int:
    """Of a tensor of all experts of a layer."""
    return 3 if kind == "weight" else 2


def _each(place: TensorPlace, count: int) -> list[TensorPlace]:
    """The matrices of a tensor of so many. Raises WrongGguf."""
    if place.shape[0] != count:
        raise WrongGguf(f"{place.path}: {place.name}: is of {place.shape[0]} experts; allowed: expert_count, {count}")
    return [replace(one, shape=place.shape[1:]) for one in _parts(place, count)]


def _parts(place: TensorPlace, count: int) -> list[TensorPlace]:
    """Of a tensor, its outermost side cut into so many. Raises WrongGguf."""
    if place.shape[0] % count:
        raise WrongGguf(f"{place.path}: {place.name}: has shape {place.shape}; allowed: {count} parts of one size")
    size, shape = place.num_bytes // count, (place.shape[0] // count, *place.shape[1:])
    starts = [place.start + index * size for index in range(count)]
    return [replace(place, shape=shape, start=start, num_bytes=size) for start in starts]


def _as_matrix(place: TensorPlace, stem: str) -> TensorPlace:
    """The gate of a shared expert is a vector there."""
    return replace(place, shape=(1, *place.shape)) if stem == "ffn_gate_inp_shexp" and len(place.shape) == 1 else place
