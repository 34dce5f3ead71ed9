"""EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840).

EAGLE guesses the target's next hidden state: token and state are joined by `fc`, and the target's own head reads the
result. EAGLE-3 guesses tokens alone: three of the target's layers are joined to a state, its layer attends to token and
state side by side, and a head of its own gives the likelier part of the vocabulary (`d2t`: how far id i of it is from
the target's id). EAGLE-3.1 (arXiv 2605.09992) norms each layer's states (`fc_norm`) and the state that is handed on
(`norm_output`). P-EAGLE (arXiv 2602.01469) has several layers and drafts all tokens in one pass, behind masks.

The library speculators keeps the layer's configuration apart, names EAGLE's tensors in its own way, and says by
`speculators_model_type` that a head is P-EAGLE's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.proposers.heads.head import HeadReader, MaskRow, TargetWeights, check_ids
from outrider.proposers.heads.layer import LayerHead, layer_config, layer_fields
from outrider.proposers.registry import drafts_at_once

LAYER = ("layers.0.", "model.layers.0.", "midlayer.", "model.midlayer.")  # as it is named, by who saved it
EAGLE_LAYER = (*LAYER, "transformer.")  # the last by speculators
MOST_LAYERS = 16  # of EAGLE-3's: trained heads have one, P-EAGLE's up to four
MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")


class EagleHead(LayerHead):
    """One layer of the target's shape, without a norm before it. Its state is a guess of the target's last one."""

    name = "eagle"

    def __init__(self, config: Mapping[str, Any], reader: HeadReader, target: TargetWeights) -> None:
        hidden, layer = target.output.shape[1], layer_fields(config)
        if layer.get("hidden_size") != hidden:
            raise WrongCheckpoint(f"hidden_size: is {layer.get('hidden_size')}; allowed: the target's, {hidden}")
        if config.get("layernorms"):
            raise UnsupportedModel(
                f"layernorms: is {config['layernorms']}; allowed: false, since norms of the embeddings, of what "
                "the layer takes and of what it gives are not computed"
            )
        super().__init__(layer_config(layer, target), reader, target, EAGLE_LAYER, hidden)
        self.taps = target.taps([target.num_layers])
        weight = reader.tensor((hidden, 2 * hidden), "fc.weight", "model.fc.weight", "fusion_fc.weight")
        biases = ("fc.bias", "model.fc.bias", "fusion_fc.bias")
        has_bias = config.get("fusion_bias") or any(name in reader for name in biases)
        self._fc = reader.product(weight, reader.tensor((hidden,), *biases) if has_bias else None)
        self._output = reader.product(target.output)

    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerHead.enter`."""
        joined = self._fc(torch.cat([embedded, state], dim=-1))  # [rows, hidden]
        return joined, joined

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerHead.leave`."""
        return self._output(hidden).float(), hidden


class Eagle3Head(LayerHead):
    """One layer that attends to token and state side by side."""

    name = "eagle3"

    def __init__(self, config: Mapping[str, Any], reader: HeadReader, target: TargetWeights) -> None:
        parsed = layer_config(layer_fields(config), target, MOST_LAYERS)
        hidden, of_target = parsed.hidden_size, target.output.shape[1]
        if (config.get("target_hidden_size") or of_target) != of_target:
            told = config["target_hidden_size"]
            raise WrongCheckpoint(f"target_hidden_size: is {told}; allowed: the target's, {of_target}")
        super().__init__(parsed, reader, target, LAYER, 2 * hidden)
        own = dict(config.get("eagle_config") or {}) | dict(config)
        self.taps = target.taps(own.get("eagle_aux_hidden_state_layer_ids") or default_taps(target.num_layers))
        names = ("embed_tokens.weight", "model.embed_tokens.weight")
        if any(name in reader for name in names):
            self._embeddings = reader.tensor((len(target.embeddings), hidden), *names)
        elif hidden != of_target:
            raise WrongCheckpoint(f"hidden_size: is {hidden}, without embeddings; allowed: the target's, {of_target}")
        width = len(self.taps) * of_target
        self._fc = reader.product(reader.tensor((hidden, width), "fc.weight", "model.fc.weight"))
        self._whole_norm = reader.tensor((width,), "input_norm.weight") if own.get("norm_before_fc") else None
        self._tap_norms = [
            reader.tensor((of_target,), f"fc_norm.{index}.weight", f"model.fc_norm.{index}.weight")
            for index in range(len(self.taps) if own.get("fc_norm") else 0)
        ]
        prefixed = [f"{prefix}{{}}.weight" for prefix in LAYER]
        self._token_norm, self._state_norm = (
            reader.tensor((hidden,), *(name.format(part) for name in prefixed))
            for part in ("input_layernorm", "hidden_norm")
        )
        by_default = own.get("speculators_model_type") == "eagle3"  # so vLLM reads these folders, and no others
        self._norms_residual = bool(own.get("norm_before_residual", by_default))
        self._norms_output = bool(own.get("norm_output", False))
        self._norm = reader.tensor((hidden,), "norm.weight", "model.norm.weight")
        self._vocab_size = len(target.output)
        num_outputs = int(config.get("draft_vocab_size") or self._vocab_size)
        self._head = reader.product(reader.tensor((num_outputs, hidden), "lm_head.weight"))
        self.mask = self._read_mask(own, reader, of_target)
        self._ids = None  # [outputs]: the target's, where they are fewer
        if num_outputs < self._vocab_size:
            self._ids = reader.tensor((num_outputs,), "d2t") + torch.arange(num_outputs, device=reader.device)
            check_ids("d2t", self._ids, self._vocab_size)

    def _read_mask(self, config: Mapping[str, Any], reader: HeadReader, of_target: int) -> MaskRow | None:
        if not drafts_at_once(config) and "mask_hidden" not in reader:
            return None
        found = {name: config[name] for name in MASK_TOKENS if config.get(name) is not None}
        if not found:
            raise WrongCheckpoint(
                f"{', '.join(MASK_TOKENS)}: none is there; allowed: the id of the mask token in one of them, of a head "
                "that drafts all tokens in one pass"
            )
        name, token_id = next(iter(found.items()))
        if not 0 <= int(token_id) < len(self._embeddings):
            raise WrongCheckpoint(f"{name}: is {token_id}; allowed: 0 to {len(self._embeddings) - 1}")
        features = reader.vector(len(self.taps) * of_target, "mask_hidden").view(len(self.taps), of_target)
        return MaskRow(int(token_id), features)

    def features_to_state(self, features: Tensor) -> Tensor:  # [rows, taps, of target] -> [rows, hidden]
        """The layers' states, joined."""
        if self._tap_norms:
            parts = [self.norm(features[:, index], weight) for index, weight in enumerate(self._tap_norms)]
            joined = torch.cat(parts, dim=-1)
        else:
            joined = features.flatten(1)  # [rows, taps * of target]
        if self._whole_norm is not None:
            joined = self.norm(joined, self._whole_norm)
        return self._fc(joined)

    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerHead.enter`."""
        normed = self.norm(state, self._state_norm)
        side_by_side = torch.cat([self.norm(embedded, self._token_norm), normed], dim=-1)  # [rows, 2 * hidden]
        return side_by_side, normed if self._norms_residual else state

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerHead.leave`."""
        normed = self.norm(hidden, self._norm)
        logits = self._head(normed).float()  # [rows, outputs]
        if self._ids is not None:
            whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
            logits = whole.index_copy_(1, self._ids, logits)
        return logits, normed if self._norms_output else hidden


def default_taps(num_layers: int) -> tuple[int, ...]:
    """An early layer, the middle and a late one, where the checkpoint does not say: what its trainers tapped."""
    return 2, num_layers // 2, num_layers - 3
