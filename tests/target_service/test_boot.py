"""What a target says of its checkpoint when it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.gguf_models import as_gguf
from support.models import KERNELS, cpu_kernels, logits_of, save_tiny

from outrider.cli.doctor import _model
from outrider.cli.quantize import quantize
from outrider.engine.loader import LoadedModel, Quantization, load_model
from outrider.engine.models.base import UnsupportedModel
from outrider.rpc.hub import locate
from outrider.rpc.messages import ModelInfo
from outrider.target_service.boot import load
from outrider.target_service.settings import TargetSettings


def test_it_warns_once_of_what_a_generation_config_asks_for_in_vain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path)
    settings = TargetSettings.model_validate({"model": folder})
    load(settings)
    assert not caplog.records
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [1, 2], "min_new_tokens": 3}))
    load(settings)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "suppress_tokens, min_new_tokens has no effect" in record.getMessage()


ROUNDINGS: tuple[Quantization, ...] = ("int8", "int4")


def load_rounded(folder: Path, quantization: str | None) -> LoadedModel:
    return load(TargetSettings(model=folder, quantization=quantization))


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_target_rounded_as_it_is_loaded_is_another_model(
    kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It computes what a draft of that rounding does, and says so: its type, its digest, a line of the log."""
    folder, ids = save_tiny(tmp_path / "model", hidden_size=64, intermediate_size=128), list(range(3, 40))
    caplog.set_level("INFO")
    computed = "int16" if kernels == "c" else "float32"
    with cpu_kernels(kernels):
        found = {name: load_rounded(folder, name) for name in (None, *ROUNDINGS)}
        assert "rounded to int8" in caplog.text and "rounded to int4" in caplog.text
        assert len({loaded.digest for loaded in found.values()}) == 3
        assert [loaded.dtype for loaded in found.values()] == ["float32", "int8 in float32", f"int4 in {computed}"]
        for name in ROUNDINGS:
            logits = logits_of(found[name], ids)
            assert torch.equal(logits, logits_of(load_model(folder, quantization=name), ids))
            assert not torch.equal(logits, logits_of(found[None], ids))
    assert load_rounded(folder, "int8").digest == found["int8"].digest


def test_the_name_of_what_a_checkpoint_is_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    list(quantize(save_tiny(tmp_path / "plain"), tmp_path / "packed", "int8", None))
    file, _ = as_gguf(tmp_path / "tiny.gguf", "llama", "Q8_0", hidden_size=64, intermediate_size=128)
    for folder, name in ((tmp_path / "packed", "compressed-tensors"), (locate(file), "gguf")):
        named, bare = load_rounded(folder, name), load_rounded(folder, None)
        assert (named.digest, named.dtype) == (bare.digest, bare.dtype) and named.dtype == f"{name} in int16"
        with pytest.raises(UnsupportedModel, match=rf"'int4', .* quantised already \({name}\); allowed: none, {name}$"):
            load_rounded(folder, "int4")
    halves, _ = as_gguf(tmp_path / "halves.gguf", "llama", "F16", hidden_size=64, intermediate_size=128)
    assert load_rounded(locate(halves), "int8").dtype == "int8 in float32"


def test_it_says_that_input_activations_are_not_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and wherever its weights' type is shown."""
    folder = tmp_path / "packed"
    list(quantize(save_tiny(tmp_path / "plain"), folder, "int8", None))
    config = json.loads((folder / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]
    scheme["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    before = load_rounded(folder, None)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_rounded(folder, None)
    assert "group_0: input_activations are not applied" in caplog.text
    assert before.dtype == "compressed-tensors in int16"
    assert loaded.dtype == "compressed-tensors (input_activations not applied) in int16"
    assert f"{loaded.dtype} on cpu" in _model(ModelInfo("m", "d", 9, 9, dtype=loaded.dtype))
    assert torch.equal(logits_of(loaded, [5, 6, 7]), logits_of(before, [5, 6, 7]))


@pytest.mark.parametrize("name", ["fp8", "awq", "gguf", "int3", ""])
def test_names_of_what_a_checkpoint_is_not_are_refused(name: str, tmp_path: Path) -> None:
    expected = rf"quantization: is '{name}', .*plain numbers; allowed: none, int8, int4$"
    with pytest.raises(UnsupportedModel, match=expected):
        load_rounded(save_tiny(tmp_path), name)
