"""gpt-oss keeps the experts of a layer in one tensor, in plain numbers or in floats of 4 bits: what is read of either
is what transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.four_bit_experts import SIZES, in_four_bits
from support.models import KERNELS, MIXTURES, cpu_kernels, hf_logits, logits_of, save_tiny, tiny_hf_model
from torch import Tensor

from outrider.engine.loader import load_model
from outrider.engine.models.base import WrongCheckpoint

IDS = [(7 * index + 5) % 97 for index in range(44)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_floats_of_four_bits_are_what_transformers_reads(kernels: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "gpt_oss", seed=1, **SIZES)
    model = in_four_bits(folder)
    with cpu_kernels(kernels):
        loaded = load_model(folder, activations="float32")
    assert loaded.dtype == "mxfp4 in float32" and loaded.engine.startswith("outrider-")
    torch.testing.assert_close(logits_of(loaded, IDS), hf_logits(model, IDS), atol=1e-4, rtol=1e-4)


def test_rows_of_integers_are_close(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "gpt_oss", seed=1, **SIZES)
    model = in_four_bits(folder)
    logits, expected = logits_of(load_model(folder), IDS), hf_logits(model, IDS)
    assert torch.nn.functional.cosine_similarity(logits, expected).median() > 0.999


@pytest.mark.parametrize("kernels", KERNELS)
def test_plain_numbers_stay_in_their_sixteen_bits(kernels: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "gpt_oss", seed=1, **SIZES)
    state = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = tiny_hf_model("gpt_oss", seed=1, **SIZES)
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
    with cpu_kernels(kernels):
        loaded = load_model(folder)
    torch.testing.assert_close(logits_of(loaded, IDS), hf_logits(model, IDS), atol=1e-4, rtol=1e-4)


def wrong(change: dict[str, Tensor | None], folder: Path) -> None:
    state: dict[str, Any] = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.1.mlp.experts.down_proj_blocks": None},
            "missing model.layers.1.mlp.experts.0.down_proj.weight",
        ),
        ({"model.layers.0.mlp.experts.gate_up_proj_scales": None}, "missing .*gate_up_proj_scales"),
        ({"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(2, 64)}, r"down_proj_bias has shape \(2, 64\)"),
        ({"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(9, 64)}, r"has shape \(9, 64\), not of 5 experts"),
        ({"model.layers.0.self_attn.sinks": torch.zeros(3)}, r"sinks has shape \(3,\), not \(4,\)"),
        (
            {"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(5, 64, 9, dtype=torch.uint8)},
            "down_proj: its _blocks and _scales have shapes that do not fit",
        ),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "gpt_oss", seed=1, **SIZES)
    in_four_bits(folder)
    wrong(change, folder)
    with pytest.raises(WrongCheckpoint, match=message):
        load_model(folder)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", [family for family in MIXTURES if family != "gpt_oss"])
def test_experts_may_lie_together_as_transformers_keeps_them(family: str, kernels: str, tmp_path: Path) -> None:
    model = tiny_hf_model(family, seed=1)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    with cpu_kernels(kernels):
        logits = logits_of(load_model(tmp_path), IDS)
    torch.testing.assert_close(logits, hf_logits(model, IDS), atol=1e-4, rtol=1e-4)
    wrong({"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(1, 8, 32)}, tmp_path)
    with pytest.raises(WrongCheckpoint, match=r"gate_up_proj has shape \(1, 8, 32\), not of \d experts"):
        load_model(tmp_path)
