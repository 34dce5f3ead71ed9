"""Heads as they are trained: what `outrider.proposers.heads` computes row by row, here of whole windows at once and
with gradients. Their parameters have the names of the public layouts.

A row is a token and the target's hidden states of the position before. From some rows of a window chains start: behind
the first token a chain takes the text's next one and what the head itself gave for the row before, as in drafting,
where the target's states end at the start of the chain (the training-time test of EAGLE-3, arXiv 2503.01840). Its rows
see the true rows up to its start, and its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.models.decoder_config import DecoderConfig, rotary_tables
from outrider.kernels.layers.reference import apply_rotary
from outrider.proposers.heads.head import TargetWeights
from outrider.proposers.heads.layer import layer_config
from outrider.proposers.heads.mlp_speculator import MlpConfig, normed
from outrider.training.language_head import LanguageHead


class HeadModule(nn.Module, ABC):
    """A head with gradients."""

    most_tokens: int | None = None  # of a chain; None: as many as are wanted
    sureness: Callable[[Tensor], Tensor] | None = None  # of what `language_head` takes, [..., hidden] -> [...]: the
    # logit of how likely what it says is accepted, if those before are

    def __init__(self, taps: tuple[int, ...], target: TargetWeights) -> None:
        super().__init__()
        self.taps = taps
        self._embeddings: Tensor  # [vocabulary, hidden]
        self._output: Tensor  # [vocabulary, hidden]
        self.register_buffer("_embeddings", target.embeddings, persistent=False)
        self.register_buffer("_output", target.output, persistent=False)

    @abstractmethod
    def forward(self, ids: Tensor, features: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
        """ids: [windows, length]; features: [windows, length, taps, hidden]; ends: [ends], from 1 on. What
        `language_head` takes for the `num_tokens` tokens after each of the places `ends`, [windows, ends, tokens,
        hidden]."""

    @property
    def language_head(self) -> LanguageHead:
        """Says the tokens: the target's own head, which is not trained."""
        output = self._output
        return LanguageHead(lambda states: F.linear(states.to(output.dtype), output), len(output))


class HeadNorm(nn.RMSNorm):
    """In float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


KeysValues = tuple[Tensor, Tensor]  # [windows, heads, rows, head_dim] each


class HeadAttention(nn.Module):
    """Of chains' rows to the true rows up to their start, and to their own."""

    def __init__(self, config: DecoderConfig, inputs: int, bias: bool) -> None:
        super().__init__()
        self._heads, self._dim, self._scale = config.num_heads, config.head_dim, config.attention_scale
        kv_heads = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_heads * config.head_dim, bias)
        self.k_proj = nn.Linear(inputs, kv_heads, bias)
        self.v_proj = nn.Linear(inputs, kv_heads, bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self._cos: Tensor  # [positions, 1, head_dim]
        self._sin: Tensor
        cos, signed_sin = rotary_tables(config, torch.float32)[config.rotary_types[0]]
        self.register_buffer("_cos", cos[:, None], persistent=False)
        self.register_buffer("_sin", signed_sin[:, None], persistent=False)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """x: [windows, rows, inputs]; positions: [rows]."""
        key = apply_rotary(self.normed_keys(self._by_head(self.k_proj(x))), self._cos[positions], self._sin[positions])
        value = self._by_head(self.v_proj(x))
        copies = self._heads // value.shape[2]
        key, value = (part.transpose(1, 2).repeat_interleave(copies, dim=1) for part in (key, value))
        return key, value

    def normed_keys(self, keys: Tensor) -> Tensor:  # [windows, rows, heads, head_dim] -> the same
        """As they are."""
        return keys

    def forward(self, x: Tensor, positions: Tensor, true: KeysValues, sees: Tensor, own: list[KeysValues]) -> Tensor:
        """x: [windows, chains, inputs]; sees: [chains, rows] of the true rows; `own` are the chains' rows."""
        query = apply_rotary(self._by_head(self.q_proj(x)), self._cos[positions], self._sin[positions])
        query = query.transpose(1, 2) * self._scale  # [windows, heads, chains, head_dim]
        scores = (query @ true[0].mT).masked_fill(~sees, -math.inf)
        scores = torch.cat([scores, *((query * keys).sum(-1, keepdim=True) for keys, _ in own)], dim=-1)
        probs = scores.float().softmax(-1)
        found = probs[..., : sees.shape[1]] @ true[1]
        for index, (_, values) in enumerate(own, start=sees.shape[1]):
            found = found + probs[..., index, None] * values
        output: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return output.float()

    def _by_head(self, rows: Tensor) -> Tensor:  # [windows, rows, heads * head_dim] -> [windows, rows, heads, head_dim]
        return rows.float().view(*rows.shape[:2], -1, self._dim)


class HeadMlp(nn.Module):
    """The gated feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class HeadLayer(nn.Module):
    """A decoder's layer, without the norm before it."""

    def __init__(self, config: DecoderConfig, inputs: int, norms: tuple[str, ...], bias: bool = False) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, inputs, bias)
        self.mlp = HeadMlp(config)
        self.post_attention_layernorm = HeadNorm(config.hidden_size, config.rms_norm_eps)
        for name in norms:
            self.add_module(name, HeadNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, x: Tensor, residual: Tensor, *attended: Any) -> Tensor:
        residual = residual + self.self_attn(x, *attended)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual)).float()
        return output


class LayerModule(HeadModule):
    """EAGLE-3 and MTP: as `proposers.heads.layer`."""

    @property
    @abstractmethod
    def layer(self) -> Any:
        """The head's."""

    @abstractmethod
    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """[windows, rows, hidden] each; returns what the layer's products take, and the residual stream."""

    @abstractmethod
    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[windows, chains, hidden]; returns what says the token behind, and the next state."""

    def features_to_state(self, features: Tensor) -> Tensor:  # [windows, rows, taps, hidden] -> [windows, rows, hidden]
        """Of the target's hidden states."""
        return features[:, :, 0]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:  # [windows, rows], [rows] -> [windows, rows, hidden]
        """Of the rows' tokens."""
        return F.embedding(ids, self._embeddings).float()

    def forward(self, ids: Tensor, features: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
        """Shapes: `HeadModule.forward`."""
        rows, starts = torch.arange(ids.shape[1] - 1, device=ids.device), ends - 1  # a row is a place less one
        x, residual = self.enter(self.embed(ids[:, 1:], rows), self.features_to_state(features[:, :-1]))
        attention, sees = self.layer.self_attn, rows <= starts[:, None]  # [chains, rows]
        true, own = attention.keys_values(x, rows), list[KeysValues]()
        x, residual = x[:, starts], residual[:, starts]
        found: list[Tensor] = []
        while True:
            positions = starts + len(found)
            says, state = self.leave(self.layer(x, residual, positions, true, sees, own))
            found.append(says)
            if len(found) == num_tokens:
                return torch.stack(found, dim=2)
            positions = positions + 1
            x, residual = self.enter(self.embed(ids[:, positions + 1], positions), state)
            own.append(attention.keys_values(x, positions))


class Eagle3Module(LayerModule):
    """Some taps, and a language-model head of its own, of the likelier part of the vocabulary where `ids` are given."""

    def __init__(self, config: Mapping[str, Any], target: TargetWeights, ids: Tensor | None = None) -> None:
        super().__init__(tuple(config["eagle_aux_hidden_state_layer_ids"]), target)
        parsed = layer_config(config, target)
        hidden, eps = parsed.hidden_size, parsed.rms_norm_eps
        self._norms_residual = bool(config["norm_before_residual"])
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.midlayer: Any = HeadLayer(parsed, 2 * hidden, ("input_layernorm", "hidden_norm"))
        self.norm = HeadNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, int(config["draft_vocab_size"]), bias=False)
        self._ids = ids  # [outputs], of the target
        if ids is not None:
            self.register_buffer("d2t", ids - torch.arange(len(ids)))
            self.register_buffer("t2d", torch.zeros(len(target.output), dtype=torch.bool).index_fill(0, ids, True))

    @property
    def layer(self) -> Any:
        """The head's."""
        return self.midlayer

    def features_to_state(self, features: Tensor) -> Tensor:
        """The layers' states, joined. Shapes: `LayerModule.features_to_state`."""
        state: Tensor = self.fc(features.flatten(2))
        return state.float()

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerModule.enter`."""
        normed_state = self.midlayer.hidden_norm(state)
        x = torch.cat([self.midlayer.input_layernorm(embedded), normed_state], dim=-1)
        return x, normed_state if self._norms_residual else state

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerModule.leave`."""
        return self.norm(hidden), hidden

    @property
    def language_head(self) -> LanguageHead:
        """Its own."""
        weight = self.lm_head.weight
        if self._ids is None:
            return LanguageHead(self.lm_head, len(weight), (weight,))
        return LanguageHead.of_ids(self.lm_head, (weight,), self._ids, len(self._output))


class MtpModule(LayerModule):
    """MiMo's layer, used again on its own output; the language-model head is the target's."""

    def __init__(self, config: Mapping[str, Any], target: TargetWeights) -> None:
        super().__init__((target.num_layers,), target)
        parsed = layer_config({**config, "model_type": "qwen2"}, target)
        norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
        layer = HeadLayer(parsed, parsed.hidden_size, norms, bias=True)
        layer.input_proj = nn.Linear(2 * parsed.hidden_size, parsed.hidden_size, bias=False)
        self.model = nn.ModuleDict({"mtp_layers": nn.ModuleList([layer])})

    @property
    def layer(self) -> Any:
        """The head's."""
        return self.get_submodule("model.mtp_layers.0")

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """A text's first token counts as nothing. Shapes: `LayerModule.embed`."""
        return super().embed(ids, positions) * (positions > 0)[:, None]

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerModule.enter`."""
        layer = self.layer
        joined = torch.cat([layer.hidden_layernorm(state), layer.token_layernorm(embedded)], dim=-1)
        residual = layer.input_proj(joined).float()
        return layer.input_layernorm(residual), residual

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerModule.leave`."""
        normed_state = self.layer.final_layernorm(hidden)
        return normed_state, normed_state


class MedusaModule(HeadModule):
    """Residual blocks before the target's language-model head, for each token its own."""

    def __init__(self, config: Mapping[str, Any], target: TargetWeights) -> None:
        super().__init__((target.num_layers,), target)
        self.most_tokens = int(config["num_heads"])
        hidden, depth = target.output.shape[1], int(config["num_hidden_layers"])
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))})
            for _ in range(self.most_tokens)
        )

    def forward(self, ids: Tensor, features: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
        """Shapes: `HeadModule.forward`."""
        found: list[Tensor] = []
        for index in range(num_tokens):
            hidden = features[:, ends - 1, 0]
            for layer in self.get_submodule(f"blocks.{index}.layers").children():
                hidden = hidden + F.silu(layer(hidden)).float()
            found.append(hidden)
        return torch.stack(found, dim=2)


class MlpModule(HeadModule):
    """The stages share their weights, but for the first projection."""

    def __init__(self, config: Mapping[str, Any], target: TargetWeights) -> None:
        super().__init__((target.num_layers,), target)
        parsed = MlpConfig.parse(config, target)
        inner = parsed.inner_dim
        self.most_tokens = parsed.num_heads
        self._token_weight = parsed.token_weight
        self.emb = nn.ModuleList([nn.Embedding(parsed.vocab_size, inner)])
        self.proj = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in (parsed.hidden_size, inner))
        self.ln = nn.ModuleList([nn.LayerNorm(inner)])  # for its weight and bias
        self.head = nn.ModuleList([nn.Linear(inner, parsed.vocab_size, bias=False)])

    def forward(self, ids: Tensor, features: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
        """Shapes: `HeadModule.forward`."""
        state, found = normed(features[:, ends - 1, 0]) / math.sqrt(2), list[Tensor]()
        weight, bias = self.get_parameter("ln.0.weight"), self.get_parameter("ln.0.bias")
        for index in range(num_tokens):
            mixed = self.proj[min(index, 1)](state).float() + self._token_weight * self.emb[0](ids[:, ends + index])
            state = F.gelu(normed(mixed) * weight + bias)
            found.append(state)
        return torch.stack(found, dim=2)

    @property
    def language_head(self) -> LanguageHead:
        """Its own."""
        head: Any = self.head[0]
        return LanguageHead(head, len(head.weight), (head.weight,))
