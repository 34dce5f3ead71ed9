"""Which products an adapter may change, by a configuration alone: what the loaded model says, by the same names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models import FAMILIES, save_tiny

from outrider.engine.adapters.base import linears_of
from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.loader import load_model
from outrider.engine.models.base import TakesAdapters

QUANTISED = {"quantization_config": {"quant_method": "compressed-tensors"}}


def save(folder: Path, family: str) -> Path:
    if family in FAMILIES:
        return save_tiny(folder, family)
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": None}
    config = AutoConfig.for_model(family, num_attention_heads=2, num_key_value_heads=1, **size)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [*FAMILIES, "olmo2"])
def test_they_are_the_models(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family)
    model = load_model(folder).model
    assert isinstance(model, TakesAdapters)
    assert linears_of(folder) == model.adapters.linears


def test_quantised_weights_have_the_same(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    before = linears_of(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **QUANTISED}))
    assert linears_of(folder) == before and len(before) == 14


def test_a_model_that_nobody_knows(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "made_up"}))
    with pytest.raises(UnsupportedAdapter, match=r"which products of .* an adapter may change is not known: .*made_up"):
        linears_of(folder)
