"""What a head shares with the model that it drafts beside."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outrider.engine import checkpoint
from outrider.engine.models.base import CausalLM, ReadableWeights, UnsupportedModel
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.weights import EMBEDDINGS, HEAD, with_its_head
from outrider.proposers.heads.head import TargetWeights


def target_weights(folder: Path, model: CausalLM, expanded: bool = False) -> TargetWeights:
    """Of the checkpoint that `model` was loaded from, or of which it is the expansion: the model's own tensors where
    they can be read, else those of the files. Raises UnsupportedModel."""
    hidden_size, num_layers, expanded_layers = model.hidden_size, len(model.layers), None
    if expanded:
        parsed = parse_config(checkpoint.read_config(folder))
        hidden_size, num_layers, expanded_layers = parsed.hidden_size, parsed.num_layers, num_layers
    embeddings, output = (model.embeddings, model.output) if isinstance(model, ReadableWeights) else (None, None)
    if embeddings is None or output is None:
        embeddings, output = _of_files(folder, model)
    widths = {embeddings.shape[1], output.shape[1]} - {hidden_size, model.hidden_size}
    if widths:
        raise UnsupportedModel(f"the target's embeddings or head are {max(widths)} wide; allowed: {model.hidden_size}")
    # The first channels of an expansion are the checkpoint's.
    parts = embeddings[:, :hidden_size], output[:, :hidden_size]
    return TargetWeights(*parts, num_layers, model.max_model_len, expanded_layers)


def _of_files(folder: Path, model: CausalLM) -> tuple[Tensor, Tensor]:  # [vocab, hidden] each
    """Copies: the model keeps its own in a layout of the product's alone."""
    held = checkpoint.read_weights(folder, checkpoint.weight_files(folder))
    config, state = with_its_head(parse_config(checkpoint.read_config(folder)), held)
    embeddings = state[EMBEDDINGS].to(device=model.device, dtype=model.dtype, copy=True)
    if config.tied_embeddings:
        return embeddings, embeddings
    return embeddings, state[HEAD].to(device=model.device, dtype=model.dtype, copy=True)
