"""The Llama that is trained: transformers' own, with float32 weights, and how it writes text."""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from outrider.kernels.cpu.library import cpu_features

BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # products of these numbers, in the words of Linux' /proc/cpuinfo
_FORWARD = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _FORWARD else "past_key_values"  # its argument's name changes with transformers 5.24


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama decoder with tied embeddings."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = 4096
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def to_config(self) -> dict[str, Any]:
        """The content of Hugging Face's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }


def new_model(shape: LlamaShape, seed: int = 0) -> LlamaForCausalLM:
    """A model of random float32 weights."""
    return randomised(LlamaForCausalLM(LlamaConfig(**shape.to_config())), seed)


def randomised(model: LlamaForCausalLM, seed: int = 0) -> LlamaForCausalLM:
    """The model with random weights, in which what writes to the residual stream is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif weight.ndim == 2:
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(0.0, std, generator=generator)
    return model


@cache
def has_bfloat16_products() -> bool:
    """Whether the processor has any. Where they are emulated they take many times as long as float32's."""
    return not BFLOAT16.isdisjoint(cpu_features())


def fast_products() -> torch.autocast:
    """Inside, products are of bfloat16 numbers where the processor has such products, whatever the type of the
    weights."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16_products())


def logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[batch, length, vocabulary] for ids [batch, length]."""
    with fast_products():
        computed: Tensor = model(ids, use_cache=False).logits
    return computed


class NextToken:
    """A model with its cache: feed it tokens, get the distribution of the next one."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)

    def __call__(self, ids: Tensor, temperature: float) -> Tensor:  # [batch, new] -> [batch, vocabulary] float32
        output = self._model(ids, logits_to_keep=1, **{CACHE: self._cache})
        last = output.logits[:, -1].float()
        if temperature == 0:
            return F.one_hot(last.argmax(-1), last.shape[-1]).float()
        return F.softmax(last / temperature, dim=-1)


@torch.no_grad()
def continue_windows(
    model: LlamaForCausalLM, prompts: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Extend `prompts` [batch, prompt] to [batch, length]; temperature 0 is greedy."""
    next_token, ids, feed = NextToken(model), prompts, prompts
    while ids.shape[1] < length:
        with fast_products():
            probs = next_token(feed, temperature)
        feed = torch.multinomial(probs, 1, generator=generator) if temperature else probs.argmax(-1, keepdim=True)
        ids = torch.cat([ids, feed], dim=1)
    return ids
