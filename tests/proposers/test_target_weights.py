"""What a head shares with its target is the checkpoint's, whatever computes the target."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.models import cpu_kernels, save_tiny, tiny_hf_model

from outrider.engine.loader import load_model
from outrider.engine.models.transformers import RegistryModel
from outrider.pairs.expansion import expand_llama
from outrider.proposers.heads.target import target_weights


@pytest.mark.parametrize("kernels", ["c", "pytorch"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_decoder(tmp_path: Path, kernels: str, tied: bool, dtype: str) -> None:
    folder, hf = save_tiny(tmp_path, tie_word_embeddings=tied), tiny_hf_model(tie_word_embeddings=tied)
    with cpu_kernels(kernels):
        model = load_model(folder, dtype=dtype).model
    weights = target_weights(folder, model)
    for found, module in (
        (weights.embeddings, hf.get_input_embeddings()),
        (weights.output, hf.get_output_embeddings()),
    ):
        torch.testing.assert_close(found, module.weight.detach().to(model.dtype), rtol=0, atol=0)
    assert (weights.num_layers, weights.max_model_len) == (2, 512)
    assert weights.taps([0, 1, 2]) == (0, 1, 2)


def test_a_model_of_the_registry(tmp_path: Path) -> None:
    hf = tiny_hf_model()
    weights = target_weights(tmp_path, RegistryModel(tiny_hf_model(), 128))
    torch.testing.assert_close(weights.embeddings, hf.get_input_embeddings().weight.detach())
    torch.testing.assert_close(weights.output, hf.get_output_embeddings().weight.detach())


@pytest.mark.parametrize("kernels", ["c", "pytorch"])
def test_an_expansion(tmp_path: Path, kernels: str) -> None:
    folder, hf = save_tiny(tmp_path), tiny_hf_model()
    sizes = partial(expand_llama, hidden_size=128, intermediate_size=128, num_layers=4, num_heads=8, num_kv_heads=4)
    with cpu_kernels(kernels):
        model = load_model(folder, expand=sizes).model
    weights = target_weights(folder, model, expanded=True)
    torch.testing.assert_close(weights.embeddings, hf.get_input_embeddings().weight.detach())
    torch.testing.assert_close(weights.output, hf.get_output_embeddings().weight.detach())
    assert weights.num_layers == 2 and weights.taps([0, 2]) == (0, 4), "the last norm is behind the last layer"
