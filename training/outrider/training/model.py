"""A compact Llama for training: float32 weights, bfloat16 products, and Hugging Face's parameter names.

It computes what transformers' LlamaForCausalLM computes from the same weights (a test compares them); it is smaller
and faster to train on CPUs, where the casts and the attention's layout decide the speed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(hidden.dtype)


class Projection(nn.Module):
    """A product without bias, in the activations' type whatever the type of the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = F.linear(hidden, self.weight.to(hidden.dtype))
        return product


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.group = shape.num_heads // shape.num_kv_heads
        self.q_proj = Projection(shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = Projection(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = Projection(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = Projection(shape.num_heads * shape.head_dim, shape.hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.heads(hidden)
        key = rotate(key, cos, sin).repeat_interleave(self.group, dim=1)
        value = value.repeat_interleave(self.group, dim=1)
        query = rotate(query, cos, sin)
        return self.join(F.scaled_dot_product_attention(query, key, value, is_causal=True))

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, heads, length, head_dim], keys and values [batch, kv heads, length, head_dim]."""
        return self._split(self.q_proj(hidden)), self._split(self.k_proj(hidden)), self._split(self.v_proj(hidden))

    def join(self, mixed: Tensor) -> Tensor:
        """The block's output [batch, length, hidden] from what its heads gathered."""
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _split(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Projection(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Projection(shape.intermediate_size, shape.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Decoder(nn.Module):
    """The layers between the embedding and the logits (Hugging Face's `model.` prefix)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def blocks(self) -> Iterator[Layer]:
        """The layers in order, as their own type."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer


class Llama(nn.Module):
    """A causal language model; its state dict has the names of LlamaForCausalLM with tied embeddings."""

    cos: Tensor  # [max positions, head_dim]
    sin: Tensor

    def __init__(self, shape: LlamaShape, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.model = Decoder(shape)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] for ids [batch, length]."""
        hidden = self.model.embed_tokens(ids).to(self.dtype)  # [batch, length, hidden]
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.blocks():
            hidden = layer(hidden, cos, sin)
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight.to(self.dtype))

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in sorted(self.named_parameters()):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif weight.ndim == 2:
                std = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(0.0, std, generator=generator)


def rotary_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, each [positions, head_dim]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of `heads` [batch, heads, length, head_dim] by its position's angle."""
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)
