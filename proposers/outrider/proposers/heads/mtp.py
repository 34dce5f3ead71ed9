"""MTP, the next layer that some checkpoints bring along for the token after the next; here MiMo's dense layout
(`model.mtp_layers.0` in the target's own files). Used again on its own output it drafts further."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.proposers.heads.head import HeadReader, TargetWeights
from outrider.proposers.heads.layer import LayerHead, layer_config

LAYER = ("model.mtp_layers.0.",)


class MtpHead(LayerHead):
    """The target's last hidden state and the token's embedding, each normed, joined by `input_proj`."""

    name = "mtp"

    def __init__(self, config: Mapping[str, Any], reader: HeadReader, target: TargetWeights) -> None:
        layer = {**config, "num_hidden_layers": 1, "model_type": "qwen2"}  # MiMo's layer is Qwen2's
        layer.pop("layer_types", None)
        hidden = target.output.shape[1]
        super().__init__(layer_config(layer, target), reader, target, LAYER, hidden)
        self.taps = target.taps([target.num_layers])
        prefix = LAYER[0]
        self._projection = reader.product(reader.tensor((hidden, 2 * hidden), f"{prefix}input_proj.weight"))
        self._token_norm, self._state_norm, self._input_norm, self._last_norm = (
            reader.tensor((hidden,), f"{prefix}{name}.weight")
            for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
        )
        self._output = reader.product(target.output)

    def enter(self, embedded: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first token of a text counts as nothing, as in training. Shapes: `LayerHead.enter`."""
        embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        joined = torch.cat([self.norm(state, self._state_norm), self.norm(embedded, self._token_norm)], dim=-1)
        residual = self._projection(joined)  # [rows, hidden]
        return self.norm(residual, self._input_norm), residual

    def leave(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: `LayerHead.leave`."""
        normed = self.norm(hidden, self._last_norm)
        return self._output(normed).float(), normed
