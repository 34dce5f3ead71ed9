"""A transformers causal language model over the paged cache, through transformers' attention registry.

Nothing is read from the configuration that can be asked of the model: one forward pass of one row shows what each layer
stores and which keys it may see."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.engine.batch import Batch
from outrider.engine.kv_cache import KVCache, LayerShape
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.registry_attention import INSPECT, PAGED, Inspection, PagedStep, register_attention
from outrider.engine.models.registry_rotary import pin_rotary


class RegistryModel:
    """A transformers model behind the `CausalLM` protocol. Raises UnsupportedModel for one that is not sound here."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        register_attention()
        refuse_by_class(type(model), model.config)
        text: Any = model.config.get_text_config()
        pin_rotary(model, max_model_len)
        self._model: Any = model.eval().requires_grad_(False)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.max_model_len = max_model_len
        self.hidden_size = int(text.hidden_size)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.batch_invariant = False
        self.vocab_size, seen = self._inspect()
        self.layers: tuple[LayerShape, ...] = tuple(seen.shapes[layer] for layer in range(text.num_hidden_layers))
        self._windows = tuple(seen.windows[layer] for layer in range(text.num_hidden_layers))
        self._model.set_attn_implementation(PAGED)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:  # [logit rows, vocab_size] float32
        """Stores the keys and values of all rows in `cache`; returns the logits of `batch.logit_rows` alone."""
        step = PagedStep(batch, cache, self._windows)
        keep = {"logits_to_keep": batch.logit_rows} if self._takes_rows else {}
        logits: Tensor = self._call(batch.token_ids, batch.positions, step, **keep)  # [logit rows or rows, vocab_size]
        return (logits if self._takes_rows else logits[batch.logit_rows]).float()

    def _call(self, token_ids: Tensor, positions: Tensor, step: PagedStep | Inspection, **keep: Tensor) -> Tensor:
        """One sequence of all rows, as far as transformers is concerned."""
        output = self._model(
            input_ids=token_ids[None],  # [1, rows]
            position_ids=positions[None],  # [1, rows]
            use_cache=False,
            outrider_step=step,
            **keep,
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _inspect(self) -> tuple[int, Inspection]:
        """Runs one row and returns the width of the logits and what every layer was seen to do."""
        seen = Inspection(self.max_model_len, self.dtype)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._model.set_attn_implementation(INSPECT)
        try:
            vocab_size = self._call(row, row, seen).shape[-1]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"its attention cannot be replaced: {type(error).__name__}: {error}") from error
        if seen.problems:
            raise UnsupportedModel(seen.problems[0])
        layers = set(range(self._model.config.get_text_config().num_hidden_layers))
        if missing := sorted(layers - seen.shapes.keys()):
            raise UnsupportedModel(f"layers {missing} do not attend through the registry (recurrent or other)")
        if unknown := sorted(seen.shapes.keys() - layers):
            raise UnsupportedModel(f"it has attention layers {unknown} beyond those of its configuration")
        return vocab_size, seen


def refuse_by_class(model_class: type[Any], config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for what class and configuration alone rule out."""
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{model_class.__name__} does not use the attention registry of transformers")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder")
    text = config.get_text_config()
    if kinds := sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModel(f"it has layers of kind {', '.join(kinds)}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{text.num_kv_shared_layers} layers share the keys and values of others")
