"""What our decoder needs to know of a Hugging Face configuration, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from outrider.engine.models.base import UnsupportedModel

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a decoder. `hf` is transformers' own object, from which the rotary tables are made."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied_embeddings: bool
    attention_bias: bool  # of query, key and value
    output_bias: bool  # of the attention's output
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer
    max_model_len: int
    hf: Any

    @property
    def num_layers(self) -> int:
        """Layers of attention."""
        return len(self.sliding_windows)


def parse_config(config: dict[str, Any], max_model_len: int | None = None) -> DecoderConfig:
    """From the contents of config.json, in the layout of any version of transformers. Raises UnsupportedModel."""
    values = dict(config)
    model_type = values.pop("model_type", None)
    if model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model type {model_type!r} is not one of our decoder's: {', '.join(MODEL_TYPES)}")
    try:
        hf = AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModel(f"the configuration of this {model_type} is not valid: {error}") from error
    if hf.hidden_act != "silu":
        raise UnsupportedModel(f"{model_type} with activation {hf.hidden_act!r} is not served: only silu is")
    if "quantization_config" in config:
        raise UnsupportedModel(f"{model_type} with quantized weights is not served")
    limit = hf.max_position_embeddings
    if max_model_len is not None and max_model_len > limit:
        raise UnsupportedModel(f"max_model_len {max_model_len} exceeds the model's {limit} positions")
    attention_bias = bool(model_type == "qwen2" or getattr(hf, "attention_bias", False))
    return DecoderConfig(
        model_type=model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        rms_norm_eps=hf.rms_norm_eps,
        tied_embeddings=bool(hf.tie_word_embeddings),
        attention_bias=attention_bias,
        output_bias=attention_bias and model_type != "qwen2",
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=model_type == "qwen3",
        sliding_windows=_sliding_windows(hf),
        max_model_len=limit if max_model_len is None else max_model_len,
        hf=hf,
    )


def _sliding_windows(hf: Any) -> tuple[int | None, ...]:
    layer_types = getattr(hf, "layer_types", None)
    if hf.model_type == "llama":
        return (None,) * int(hf.num_hidden_layers)
    if layer_types is None:  # Mistral: every layer or none
        return (hf.sliding_window,) * int(hf.num_hidden_layers)
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in layer_types)
