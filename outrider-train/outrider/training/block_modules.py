"""Block drafters as they are trained: what `proposers.heads.block` computes of a block a sequence, here of many blocks
of whole windows at once and with gradients. Their parameters have the names of the public layouts.

A block stands behind each of the places that are learnt from: the text's token there and masks, which see the context
of the places before and one another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.engine.models.decoder_config import DecoderConfig
from outrider.kernels.layers.reference import apply_rotary
from outrider.proposers.heads.block_config import BlockConfig
from outrider.proposers.heads.head import TargetWeights
from outrider.training.head_modules import HeadAttention, HeadLayer, HeadModule, HeadNorm, KeysValues
from outrider.training.language_head import LanguageHead


class BlockAttention(HeadAttention):
    """Of blocks' rows to the context before them, and to their own block. Queries and keys are normed by head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (HeadNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def normed_keys(self, keys: Tensor) -> Tensor:
        """Shapes: `HeadAttention.normed_keys`."""
        found: Tensor = self.k_norm(keys)
        return found

    def forward(self, x: Tensor, positions: Tensor, true: KeysValues, sees: Tensor, own: list[KeysValues]) -> Tensor:
        """x: [windows, blocks * rows, hidden]; sees: [blocks, context]; `own` is that of x, of all blocks."""
        query = apply_rotary(self.q_norm(self._by_head(self.q_proj(x))), self._cos[positions], self._sin[positions])
        query = (query.transpose(1, 2) * self._scale).unflatten(
            2, (len(sees), -1)
        )  # [windows, heads, blocks, rows, dim]
        ((keys, values),) = [tuple(part.unflatten(2, (len(sees), -1)) for part in pair) for pair in own]
        of_context = torch.einsum("whbrd,whcd->whbrc", query, true[0]).masked_fill(~sees[:, None], -math.inf)
        probs = torch.cat([of_context, query @ keys.mT], dim=-1).float().softmax(-1)
        found = torch.einsum("whbrc,whcd->whbrd", probs[..., : sees.shape[1]], true[1])
        found = (found + probs[..., sees.shape[1] :] @ values).flatten(2, 3)  # [windows, heads, blocks * rows, dim]
        output: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return output.float()


class BlockLayer(HeadLayer):
    """A layer, with the norm before it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, config.hidden_size, ("input_layernorm",))
        self.self_attn = BlockAttention(config)


class DFlashModule(HeadModule):
    """The target's own head says the tokens."""

    anchor_first = False

    def __init__(self, config: Mapping[str, Any], target: TargetWeights) -> None:
        found = BlockConfig.parse(config, target, self.anchor_first)
        super().__init__(found.taps, target)
        self._rows, self._first_row, self.most_tokens = found.rows, found.first_row, found.most_tokens
        layer, hidden = found.layer, found.layer.hidden_size
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (HeadNorm(hidden, layer.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList([BlockLayer(layer) for _ in range(layer.num_layers)])
        loudness = target.embeddings.float().square().mean().sqrt()
        self.mask_embedding = nn.Parameter(loudness * torch.randn(hidden, generator=torch.Generator().manual_seed(0)))

    def forward(self, ids: Tensor, features: Tensor, ends: Tensor, num_tokens: int) -> Tensor:
        """Shapes: `HeadModule.forward`."""
        places = torch.arange(ids.shape[1], device=ids.device)
        context = self.hidden_norm(self.fc(features.flatten(2)).float())  # [windows, length, hidden]
        sees = places < ends[:, None]  # [blocks, length]
        positions = (ends[:, None] + torch.arange(self._rows, device=ids.device)).flatten()  # [blocks * rows]
        masks = self.mask_embedding.expand(len(ids), len(ends), self._rows - 1, -1)
        first = F.embedding(ids[:, ends], self._embeddings).float()[:, :, None]  # [windows, blocks, 1, hidden]
        residual = torch.cat([first, masks], dim=2).flatten(1, 2)  # [windows, blocks * rows, hidden]
        for layer in self.layers:
            attention: Any = layer.self_attn
            normed = layer.get_submodule("input_layernorm")(residual)
            true, own = attention.keys_values(context, places), attention.keys_values(normed, positions)
            residual = layer(normed, residual, positions, true, sees, [own])
        hidden = self.norm(residual).unflatten(1, (len(ends), self._rows))
        return self.behind(hidden[:, :, self._first_row : self._first_row + num_tokens], ids, ends)

    def behind(self, hidden: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """Of [windows, blocks, tokens, hidden] what the language-model head reads; the others as `forward`."""
        return hidden


class DSparkModule(DFlashModule):
    """With a Markov head of the first order, which learns behind the text's own tokens, and one that tells how likely
    each token is accepted, by the token before."""

    anchor_first = True

    def __init__(self, config: Mapping[str, Any], target: TargetWeights) -> None:
        super().__init__(config, target)
        vocab_size, rank = len(target.output), int(config["markov_rank"])
        rows, bias = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": rows, "markov_w2": bias})
        told = nn.Linear(target.output.shape[1] + rank, 1)
        self.confidence_head = nn.ModuleDict({"proj": told})
        # It learns to tell what the rest is worth, and does not change that.
        self.sureness = lambda states: told(states.detach().float()).squeeze(-1)

    def behind(self, hidden: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """With the rows of the tokens before, [windows, blocks, tokens, hidden + rank]."""
        before = ids[:, ends[:, None] + torch.arange(hidden.shape[2], device=ids.device)]  # [windows, blocks, tokens]
        return torch.cat([hidden, self.markov_head["markov_w1"](before).float()], dim=-1)

    @property
    def language_head(self) -> LanguageHead:
        """The target's, and what the token before adds."""
        output, bias = self._output, self.get_submodule("markov_head.markov_w2")
        hidden = output.shape[1]

        def product(states: Tensor) -> Tensor:
            said = F.linear(states[..., :hidden].to(output.dtype), output)
            added: Tensor = bias(states[..., hidden:])
            return said + added

        return LanguageHead(product, len(output), (self.get_parameter("markov_head.markov_w2.weight"),))
