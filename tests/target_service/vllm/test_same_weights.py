"""Folders of which vLLM would load something else than our engine, and what their digest says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf_models import as_gguf
from support.models import save_tiny

from outrider.engine.models.base import UnsupportedModel
from outrider.rpc.hub import locate
from outrider.target_service.settings import TargetSettings
from outrider.vllm.target import assembly, node
from outrider.vllm.target.adapters import digest_of
from outrider.vllm.target.same_weights import require_same_weights


def settings_of(folder: Path, **engine_args: Any) -> TargetSettings:
    return TargetSettings(model=folder, engine="vllm", engine_args=engine_args)


def test_what_both_read_alike_is_served(tmp_path: Path) -> None:
    require_same_weights(settings_of(save_tiny(tmp_path / "whole")))
    shards = save_tiny(tmp_path / "shards", shard_size="100KB")
    save_file({"w": torch.ones(1)}, shards / "adapter_model.safetensors")  # which the index does not name
    require_same_weights(settings_of(shards))


def test_files_that_vllm_would_read_in_addition_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    save_file({"w": torch.ones(1)}, folder / "model.fp16.safetensors")
    expected = r"vLLM would read model.fp16.safetensors, model.safetensors, and .* model.safetensors: move model.fp16"
    with pytest.raises(UnsupportedModel, match=expected):
        require_same_weights(settings_of(folder))


def test_older_shards_that_vllm_would_read_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-1.safetensors"}}))
    expected = r"would read nothing, .* model.safetensors: move model.safetensors.index.json elsewhere"
    with pytest.raises(UnsupportedModel, match=expected):
        require_same_weights(settings_of(folder))
    save_file({"w": torch.ones(1)}, folder / "model-1.safetensors")
    with pytest.raises(UnsupportedModel, match=r"would read model-1.safetensors, "):
        require_same_weights(settings_of(folder))


def test_gguf_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would find no weights in the folder that stands for one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, _ = as_gguf(tmp_path / "tiny-Q8_0.gguf", "llama", "Q8_0")
    expected = "model: tiny-Q8_0 is a GGUF file, which vLLM does not read since 0.32; allowed: engine outrider, or"
    with pytest.raises(UnsupportedModel, match=expected):
        require_same_weights(settings_of(locate(file)))


def test_vllm_is_told_how_weights_are_kept_and_the_digest_of_what_it_rounds(tmp_path: Path) -> None:
    """The name of what a checkpoint is makes no other model of it; a rounding does, whoever asks for it."""
    folder = save_tiny(tmp_path)
    plain, rounded = settings_of(folder), TargetSettings(model=folder, engine="vllm", quantization="fp8")
    assert "quantization" not in assembly.engine_args(plain) and assembly.engine_args(rounded)["quantization"] == "fp8"
    asked_of_vllm = settings_of(folder, quantization="fp8")
    assert digest_of(rounded) == digest_of(asked_of_vllm) != digest_of(plain)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert digest_of(rounded) == digest_of(plain)


def test_mistrals_own_layout_is_refused_where_vllm_prefers_it(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, shard_size="100KB")
    save_file({"w": torch.ones(1)}, folder / "consolidated.safetensors")
    with pytest.raises(UnsupportedModel, match=r"would read consolidated.safetensors, .* move consolidated"):
        require_same_weights(settings_of(folder))
    require_same_weights(settings_of(folder, load_format="safetensors"))


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # of gemma2 config.json does not say that it is tied
def test_a_tied_models_own_head_which_vllm_would_drop_is_refused(family: str, tmp_path: Path) -> None:
    file = save_tiny(tmp_path, family, tie_word_embeddings=True) / "model.safetensors"
    state = load_file(file)
    embeddings = state["model.embed_tokens.weight"]
    save_file({**state, "lm_head.weight": embeddings.clone()}, file)
    require_same_weights(settings_of(tmp_path))
    save_file({**state, "lm_head.weight": embeddings + 1}, file)
    with pytest.raises(UnsupportedModel, match="set tie_word_embeddings to false"):
        require_same_weights(settings_of(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_same_weights(settings_of(tmp_path))


async def test_nothing_of_vllm_is_started_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(assembly, "new_llm", None)
    save_file({"w": torch.ones(1)}, save_tiny(tmp_path) / "model.fp16.safetensors")
    with pytest.raises(UnsupportedModel, match="vLLM would read"):
        await assembly.start_engine(settings_of(tmp_path), lambda: None)
    with pytest.raises(UnsupportedModel, match="vLLM would read"):
        node.compute(settings_of(tmp_path))
