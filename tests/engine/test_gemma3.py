"""Gemma 3 with a vision tower (4B and larger): its text model is our decoder's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import KERNELS, TINY, cpu_kernels, tiny_hf_model
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.models.weights import text_model_state

TEXT = {
    **TINY,
    "num_hidden_layers": 7,  # of which the sixth sees all
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},  # of the layers that see all
}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WHOLE = {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4, "eos_token_id": [1, 106]}
PREFIXES = {  # of the text model's tensors, and of the others
    "new": ("model.language_model.", "lm_head.", "model."),
    "old": ("language_model.model.", "language_model.lm_head.", ""),
}
LENGTH, NEW = 30, 12  # past three windows


def gemma3(**options: Any) -> Gemma3ForConditionalGeneration:
    """A random one; its text model is as far from the identity as the other families'."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Gemma3ForConditionalGeneration(Gemma3Config(**WHOLE, **options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.uniform_(0.5, 1.5) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.12)
    model.set_attn_implementation("eager")
    return model


def save(model: Gemma3ForConditionalGeneration, folder: Path, prefixes: str) -> Path:
    """The checkpoint with either version's names, and a config.json that states little, as Google's do."""
    model.save_pretrained(folder)
    text, head, rest = PREFIXES[prefixes]
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if bare.startswith(("vision_tower.", "multi_modal_projector.")):
            state[rest + bare] = tensor
        else:
            state[head + bare.removeprefix("lm_head.") if bare.startswith("lm_head.") else text + bare] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tied = {"tie_word_embeddings": False} if "lm_head.weight" in " ".join(state) else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", **WHOLE, **tied}))
    return folder


def logits_of(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    return ModelRunner(loaded.model, 4).forward([BatchEntry(ids, 0, [2, 0, 1], len(ids))])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("prefixes", "tied"), [("new", True), ("old", True), ("old", False)])
def test_the_text_model_gives_transformers_logits_and_tokens(
    prefixes: str, tied: bool, kernels: str, tmp_path: Path
) -> None:
    model = gemma3(tie_word_embeddings=tied)
    ids = torch.randint(3, 97, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0]
        expected = model(input_ids=tokens[None]).logits[0]  # [tokens, vocab]
    save(model, tmp_path, prefixes)
    with cpu_kernels(kernels):
        loaded = load_model(tmp_path)
    assert isinstance(loaded.model, NativeDecoder if kernels == "c" else Decoder)
    assert loaded.model_type == "gemma3" and loaded.eos_token_ids == (1, 106)
    logits = logits_of(loaded, tokens.tolist())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits[LENGTH - 1 : -1].argmax(-1), tokens[LENGTH:])


def test_vision_weights_are_not_read() -> None:
    kept = {"model.norm.weight": torch.ones(1)}
    towers = ("vision_tower.x", "multi_modal_projector.x", "model.vision_tower.x", "model.multi_modal_projector.x")
    state = {"language_model.model.norm.weight": kept["model.norm.weight"], **dict.fromkeys(towers, torch.ones(1))}
    assert text_model_state(state) == kept
    plain = tiny_hf_model("gemma3_text").state_dict()
    assert text_model_state(plain) is plain
