"""`outrider model convert`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_tiny, tiny_hf_model, tiny_state
from support.services import outrider, succeed

from outrider.cli import convert_file
from outrider.cli.convert import pickles
from outrider.engine.loader import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint with its weights in pytorch_model.bin."""
    folder = save_tiny(tmp_path / "old")
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").write_text("{}")
    torch.save(tiny_state(tiny_hf_model()), folder / "pytorch_model.bin")
    return folder


def split(folder: Path, state: dict[str, Any]) -> None:
    """The same weights in two files with an index."""
    names = sorted(state)
    shards = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, mine in shards.items():
        torch.save({name: state[name] for name in mine}, folder / file)
    weight_map = {name: file for file, mine in shards.items() for name in mine}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "pytorch_model.bin").unlink()


def test_one_file(folder: Path, tmp_path: Path) -> None:
    out = succeed("model", "convert", str(folder), str(tmp_path / "new"))
    assert out == f"{tmp_path / 'new'}: model.safetensors\n"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    state, converted = tiny_state(tiny_hf_model()), load_file(tmp_path / "new/model.safetensors")
    assert state.keys() == converted.keys()
    assert all(torch.equal(state[name], converted[name]) for name in state)
    assert load_model(tmp_path / "new").vocab_size == 97


def test_shards(folder: Path, tmp_path: Path) -> None:
    state = tiny_state(tiny_hf_model())
    split(folder, state)
    (folder / "consolidated.safetensors.index.json").write_text("{}")
    (folder / "adapter_config.json").write_text("{}")
    succeed("model", "convert", str(folder), str(tmp_path / "new"))
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in state.values())
    assert not list((tmp_path / "new").glob("*.bin*"))
    assert [path.name for path in (tmp_path / "new").glob("*.index.json")] == ["model.safetensors.index.json"]
    assert not (tmp_path / "new/adapter_config.json").exists()
    assert load_model(tmp_path / "new").vocab_size == 97


def test_one_file_comes_before_an_index(folder: Path) -> None:
    shutil.copy(folder / "pytorch_model.bin", folder / "whole")
    split(folder, tiny_state(tiny_hf_model()))
    (folder / "whole").rename(folder / "pytorch_model.bin")
    assert pickles(folder) == [folder / "pytorch_model.bin"]


def test_what_is_loaded_as_it_is_is_not_converted(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"of an adapter")
    assert pickles(folder) == [folder / "pytorch_model.bin"]
    (folder / "model.safetensors").write_bytes(b"whole")
    with pytest.raises(ValueError, match=r"holds model\.safetensors, from which it is loaded: nothing to convert"):
        pickles(folder)


def test_tied_tensors_are_copied(folder: Path, tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    torch.save({"a": shared, "b": shared, "c": shared.T}, folder / "pytorch_model.bin")
    assert convert_file.main(folder / "pytorch_model.bin", tmp_path / "model.safetensors") == 0
    converted = load_file(tmp_path / "model.safetensors")
    assert torch.equal(converted["a"], converted["b"]) and torch.equal(converted["c"], shared.T)


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    done = outrider("model", "convert", str(folder), str(tmp_path / "new"))
    assert done.returncode == 1 and "exists; nothing is overwritten" in done.stderr
    assert not list((tmp_path / "new").iterdir())


class Hostile:
    """A pickle that would make a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_runs_nothing(folder: Path, tmp_path: Path, legacy: bool) -> None:
    trap = tmp_path / "trap"
    torch.save({"weight": Hostile(trap)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    done = outrider("model", "convert", str(folder), str(tmp_path / "new"))
    assert done.returncode == 1 and f"cannot convert {folder / 'pytorch_model.bin'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not trap.exists() and not (tmp_path / "new").exists() and not (tmp_path / "new.partial").exists()


@pytest.mark.parametrize(
    ("absent", "complaint"), [("config.json", "is no checkpoint"), ("pytorch_model.bin", "lacks pytorch_model.bin")]
)
def test_what_is_absent_is_named(folder: Path, tmp_path: Path, absent: str, complaint: str) -> None:
    (folder / absent).unlink()
    done = outrider("model", "convert", str(folder), str(tmp_path / "new"))
    assert done.returncode == 1 and complaint in done.stderr and not (tmp_path / "new").exists()


def test_an_index_names_no_file_elsewhere(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "pytorch_model.bin", tmp_path / "outside.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.bin"}}))
    done = outrider("model", "convert", str(folder), str(tmp_path / "new"))
    assert done.returncode == 1 and "lacks ../outside.bin" in done.stderr
