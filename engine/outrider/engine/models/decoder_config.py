"""What our decoder needs to know of a Hugging Face configuration, checked once; the families that it computes are the
rows of one table.

Rotary tables: a function of absolute position and the configuration alone, never of a batch or a sequence's
length."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engine.models.base import NotForDecoder, UnsupportedModel
from outrider.engine.models.mixture_config import ExpertNames, Mixture, mixture_of
from outrider.engine.quantized.state import KEYS
from outrider.kernels.layers.reference import rotary_table

READ_AS = {"mimo": "qwen2"}  # model types whose decoder is another one's
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
# Far above every model's: what is larger is a damaged file, or one that is to fill the memory.
MOST_SIZES = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 20, "intermediate_size": 1 << 22, "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14, "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 24, "sliding_window": 1 << 24,
}  # fmt: skip
# What the code of some families looks at, and that of others does not, though transformers' objects keep what is given.
OF_SOME = ("layer_types", "use_sliding_window", "mlp_only_layers", "decoder_sparse_step")
# Dynamic NTK's frequencies change with the length beyond max_position_embeddings, which no text has here.
ROTARY_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class Family:
    """What the code of a model type in transformers does; a name is that of a field of the configuration. The default
    is Mistral's."""

    slides: bool = True  # where layer_types or, without it, sliding_window says so
    # Of inputs: always, not of the output; qkv_bias: so where that is configured.
    attention_bias: Literal["as configured", "never", "of inputs", "qkv_bias"] = "as configured"
    mlp_bias: bool = False  # as configured; else never
    qk_norm: Literal["no", "by head", "of all heads"] = "no"  # of queries, and of keys
    experts: ExpertNames | None = None  # in place of the feed-forward
    sinks: bool = False  # of each head a score of no key
    fused: bool = False  # the checkpoint holds query, key and value as one weight, and gate and up
    partial_rotary: bool = False  # a part of each head may turn
    rotary_by_layer: bool = False  # a rotary table for each type of layer
    embeddings_scaled: bool = False  # by the root of the hidden size
    norms_from_one: bool = False  # the checkpoint holds the norms' weights less one
    norms_after: bool = False  # what attention and feed-forward give is normed before it is added
    activation: str = "hidden_act"  # names the gate's
    scaled_by: str | None = None  # scores are divided by its root; None: by that of the head size
    attention_softcap: str | None = None
    logit_softcap: str | None = None
    beyond_float16: bool = False  # hidden states exceed its range
    with_vision: str | None = None  # the model type of checkpoints that hold a vision tower, too


GEMMA = Family(slides=False, embeddings_scaled=True, norms_from_one=True)
NEWER_GEMMA = replace(
    GEMMA, slides=True, norms_after=True, activation="hidden_activation", scaled_by="query_pre_attn_scalar",
    logit_softcap="final_logit_softcapping", beyond_float16=True,
)  # fmt: skip
FAMILIES = {
    "llama": Family(slides=False, mlp_bias=True),
    "mistral": Family(),
    "qwen2": Family(attention_bias="of inputs"),
    "qwen3": Family(qk_norm="by head"),
    "gemma": GEMMA,
    "gemma2": replace(NEWER_GEMMA, attention_softcap="attn_logit_softcapping"),
    "gemma3_text": replace(NEWER_GEMMA, qk_norm="by head", rotary_by_layer=True, with_vision="gemma3"),
    "phi3": Family(attention_bias="never", fused=True, partial_rotary=True),
    "mixtral": Family(
        attention_bias="never",
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", "intermediate_size", always_normalised=True),
    ),
    "qwen2_moe": Family(attention_bias="qkv_bias", experts=ExpertNames(has_shared=True)),
    "qwen3_moe": Family(qk_norm="by head", experts=ExpertNames()),
    "gpt_oss": Family(
        sinks=True,
        experts=ExpertNames(
            width="intermediate_size",
            always_normalised=True,
            router="router",
            has_biases=True,
            fused=True,
            clamped=True,
        ),
    ),
    "olmoe": Family(slides=False, qk_norm="of all heads", experts=ExpertNames(width="intermediate_size")),
}
BY_MODEL_TYPE = FAMILIES | {row.with_vision: row for row in FAMILIES.values() if row.with_vision is not None}
BY_MODEL_TYPE |= {name: FAMILIES[family] for name, family in READ_AS.items()}
MODEL_TYPES = tuple(BY_MODEL_TYPE)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder. `hf` is transformers' own object, from which the rotary tables are made."""

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # of each head, the rest is not turned
    rms_norm_eps: float
    activation: Literal["silu", "gelu_tanh"]  # of the gate
    embedding_scale: float | None
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    tied_embeddings: bool
    attention_bias: bool  # of query, key and value
    output_bias: bool  # of the attention's output
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]  # per layer
    rotary_types: tuple[str | None, ...]  # per layer: which of several rotary tables
    max_model_len: int
    mixture: Mixture | None  # of the layers that have experts
    hf: Any

    @property
    def num_layers(self) -> int:
        """How many layers of attention there are."""
        return len(self.sliding_windows)


def parse_config(config: dict[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """Reads the contents of config.json, in the layout of any version of transformers. Raises UnsupportedModel;
    NotForDecoder for what transformers may compute instead."""
    try:
        return _parsed(config, max_model_len)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:  # by odd values
        raise UnsupportedModel(f"config.json is not valid: {type(error).__name__}: {error}") from error


def _parsed(config: dict[str, Any], max_model_len: int | None) -> DecoderConfig:
    hf = _transformers_config(config, max_model_len)
    _check_sizes(hf)
    family = FAMILIES[hf.model_type]
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    scaled_by = head_dim if family.scaled_by is None else getattr(hf, family.scaled_by)
    configured_bias = family.attention_bias == "as configured" and bool(getattr(hf, "attention_bias", False))
    rotary_types = tuple(hf.layer_types) if family.rotary_by_layer else (None,) * int(hf.num_hidden_layers)
    return DecoderConfig(
        model_type=hf.model_type,
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(hf, head_dim, family, rotary_types),
        rms_norm_eps=hf.rms_norm_eps,
        activation=_activation(hf, family.activation),
        embedding_scale=hf.hidden_size**0.5 if family.embeddings_scaled else None,
        attention_scale=scaled_by**-0.5,
        attention_softcap=getattr(hf, family.attention_softcap) if family.attention_softcap else None,
        logit_softcap=getattr(hf, family.logit_softcap) if family.logit_softcap else None,
        tied_embeddings=bool(hf.tie_word_embeddings),
        attention_bias=configured_bias or _has_input_bias(hf, family),
        output_bias=configured_bias,
        mlp_bias=family.mlp_bias and hf.mlp_bias,
        sliding_windows=_sliding_windows(hf, family),
        rotary_types=rotary_types,
        max_model_len=hf.max_position_embeddings if max_model_len is None else max_model_len,
        mixture=None if family.experts is None else mixture_of(hf, family.experts),
        hf=hf,
    )


def _has_input_bias(hf: Any, family: Family) -> bool:
    return family.attention_bias == "of inputs" or (family.attention_bias == "qkv_bias" and bool(hf.qkv_bias))


def _check_sizes(hf: Any) -> None:
    """Before anything is made that is so large."""
    for name, most in MOST_SIZES.items():
        value = getattr(hf, name, None)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            raise UnsupportedModel(f"{hf.model_type} with {name}: is {value!r:.100}; allowed: 1 to {most}")
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{hf.model_type} with num_attention_heads: is {heads}; allowed: multiples of {kv_heads}"
        )


def rotary_parameters(hf: Any, layer_type: str | None) -> dict[str, Any]:
    """The parameters of the rotary table of a type of layer, or of the only one."""
    parameters: dict[str, Any] = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    return parameters


def _transformers_config(config: dict[str, Any], max_model_len: int | None) -> Any:
    """transformers' object for a configuration; raises for what no family of ours may ask."""
    values = {name: value for name, value in config.items() if name not in KEYS}  # how weights are kept, not which
    model_type = values.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model type {model_type!r} is not one of our decoder's: {', '.join(MODEL_TYPES)}")
    _load_validators()
    plain = AutoConfig.for_model(READ_AS.get(model_type, model_type))
    values = {name: value for name, value in values.items() if name not in OF_SOME or hasattr(plain, name)}
    try:
        whole = AutoConfig.for_model(READ_AS.get(model_type, model_type), **values)
    except Exception as error:  # transformers takes values as they are, and fails where it computes with them
        raise UnsupportedModel(f"the configuration of this {model_type} is not valid: {error}") from error
    hf = whole.get_text_config()  # of a text model with a vision tower its part
    hf.tie_word_embeddings = whole.tie_word_embeddings
    limit = hf.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise UnsupportedModel(f"max_model_len {max_model_len} exceeds the model's {limit} positions")
    if getattr(hf, "use_sliding_window", None) is False:  # some write 0 then
        hf.sliding_window = None
    if getattr(hf, "use_bidirectional_attention", False):
        raise NotForDecoder(f"{model_type} with use_bidirectional_attention: is True; allowed: False")
    return hf


def _load_validators() -> None:
    """What checks transformers' configurations loads all activations, and with them torch's compiler: 1.2 s of every
    start, for the names of activations, which `_activation` knows. It takes a table without any for "not to be had"."""
    name = "transformers.activations"
    if name in sys.modules or "transformers.utils.type_validators" in sys.modules:
        return
    sys.modules[name] = without_any = ModuleType(name)
    without_any.__dict__["ACT2FN"] = {}
    try:
        with suppress(ImportError):  # another version's: without the short cut it loads as it does elsewhere
            importlib.import_module("transformers.utils.type_validators")
    finally:
        del sys.modules[name]


def _activation(hf: Any, field: str) -> Literal["silu", "gelu_tanh"]:
    name = getattr(hf, field)
    if name not in ACTIVATIONS:
        raise NotForDecoder(f"{hf.model_type} with {field}: is {name!r}; allowed: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _sliding_windows(hf: Any, family: Family) -> tuple[int | None, ...]:
    layer_types = getattr(hf, "layer_types", None)
    if not family.slides or layer_types is None:  # without them every layer or none
        return (hf.sliding_window if family.slides else None,) * int(hf.num_hidden_layers)
    if unknown := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        allowed = "full_attention, sliding_attention"
        raise NotForDecoder(f"{hf.model_type} with layer_types: has {', '.join(unknown)}; allowed: {allowed}")
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in layer_types)


def _rotary_dim(hf: Any, head_dim: int, family: Family, rotary_types: tuple[str | None, ...]) -> int:
    """How many elements of a head turn."""
    width = head_dim
    for layer_type in sorted(set(rotary_types), key=str):
        parameters = rotary_parameters(hf, layer_type)
        kind, share = parameters["rope_type"], parameters.get("partial_rotary_factor", 1.0)
        width = int(head_dim * share)
        problem = None
        if kind not in ROTARY_TYPES:
            problem = f"rope_type: is {kind!r}; allowed: {', '.join(ROTARY_TYPES)}"
        elif not family.partial_rotary and width != head_dim:
            problem = f"partial_rotary_factor: is {share}; allowed: 1.0"
        elif width % 2 or not 0 < width <= head_dim:
            problem = f"partial_rotary_factor: is {share}, which turns {width} of {head_dim}; allowed: an even number"
        if problem is not None:
            raise NotForDecoder(f"{hf.model_type} with {problem}")
    return width


def rotary_tables(config: DecoderConfig, dtype: torch.dtype) -> dict[str | None, tuple[Tensor, Tensor]]:
    """The tables by type of layer, cos and signed sin, [max_model_len, head_dim] each."""
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
