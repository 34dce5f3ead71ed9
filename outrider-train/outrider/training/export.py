"""Trained models as Hugging Face folders: bfloat16 safetensors, config, generation config and tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from outrider.training.model import LlamaShape
from outrider.training.tokenizer import save_tokenizer

WEIGHTS_FILE = "model.safetensors"


def export(model: LlamaForCausalLM, shape: LlamaShape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `folder` so that transformers, and every engine that reads its layout, can load it."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_json(folder / "config.json", shape.to_config())
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_length": shape.max_positions}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, shape.max_positions)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
