"""Trained models as Hugging Face folders: bfloat16 safetensors, config, generation config and tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from outrider.training.model import Llama, LlamaShape
from outrider.training.tokenizer import save_tokenizer

WEIGHTS_FILE = "model.safetensors"


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `folder` so that transformers, and every engine that reads its layout, can load it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_json(folder / "config.json", model.shape.to_config())
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_length": model.shape.max_positions}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, model.shape.max_positions)


def read_weights(folder: Path, shape: LlamaShape, dtype: torch.dtype) -> Llama:
    """The exported model, computing in `dtype`: what was saved is on the bfloat16 grid, and so is this."""
    model = Llama(shape, dtype=dtype)
    weights: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
