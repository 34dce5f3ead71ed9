"""What makes two checkpoints one model: the contents of their weights, and nothing else; and what is kept of that."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import cpu_kernels, save_tiny

from outrider.engine import checkpoint
from outrider.engine import checkpoint as engine_checkpoint
from outrider.engine.checkpoint import CACHE_NAME, checkpoint_digest
from outrider.engine.loader import load_model
from outrider.engine.models.base import WrongCheckpoint
from outrider.pairs.expansion import expand_llama

KNOWN = "0" * 64  # no digest of anything


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were written this moment are taken for old ones."""
    monkeypatch.setattr(engine_checkpoint, "SETTLED_NS", 0)


@pytest.fixture
def hashed_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files were hashed."""
    hashed: list[Path] = []
    whole = engine_checkpoint._hash_range

    def recorded(path: Path, start: int, end: int) -> str:
        hashed.append(path)
        return whole(path, start, end)

    monkeypatch.setattr(engine_checkpoint, "_hash_range", recorded)
    return hashed


def flip_last_byte(path: Path) -> None:
    """As a fault of a disk would: size and time stay."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.usefixtures("settled")
def test_one_flipped_byte_is_another_model(folder: Path) -> None:
    before = load_model(folder).digest
    assert len(bytes.fromhex(before)) == 32 and load_model(folder).digest == before
    flip_last_byte(folder / "model.safetensors")
    assert load_model(folder).digest != before
    flip_last_byte(folder / "model.safetensors")
    assert load_model(folder).digest == before


def test_the_config_counts_but_not_its_layout(folder: Path) -> None:
    before = load_model(folder).digest
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert load_model(folder).digest == before
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    assert load_model(folder).digest != before


def test_other_files_of_the_same_weights_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    before = load_model(folder).digest
    parts = save_tiny(tmp_path / "parts", shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1 and load_model(parts).digest == before


def test_arithmetic_is_told_apart(folder: Path) -> None:
    with cpu_kernels("c"):
        native, narrow = load_model(folder), load_model(folder, dtype="bfloat16")
    with cpu_kernels("pytorch"):
        plain = load_model(folder)
    assert native.digest == narrow.digest == plain.digest
    assert native.kernels.startswith("c-") and plain.kernels.startswith("torch-")
    assert native.engine == plain.engine and native.engine.startswith("outrider-")


def test_layers_of_transformers_are_named(tmp_path: Path) -> None:
    loaded = load_model(save_tiny(tmp_path, hidden_act="relu"))
    assert loaded.engine.startswith("transformers-") and loaded.kernels.startswith("torch-")


def test_types_and_shapes_of_equal_bits_differ(tmp_path: Path) -> None:
    def digest(**state: torch.Tensor) -> str:
        save_file(state, tmp_path / "model.safetensors")
        with checkpoint_digest(tmp_path, (tmp_path / "model.safetensors",)) as result:
            return result()

    bits = torch.arange(6, dtype=torch.int16)
    assert len({digest(w=bits.view(dtype)) for dtype in (torch.int16, torch.bfloat16, torch.float16)}) == 3
    assert len({digest(w=bits), digest(w=bits.view(2, 3)), digest(v=bits.view(2, 3))}) == 3
    assert digest(w=torch.tensor(1.0), e=torch.empty(0))  # neither axes nor numbers


def test_an_expansion_is_of_its_weights_and_its_sizes(folder: Path) -> None:
    def expanded(**sizes: Any) -> str:
        options = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
        return load_model(folder, expand=partial(expand_llama, **options | sizes)).digest

    first = expanded()
    assert first == expanded() and len({first, expanded(num_layers=3), load_model(folder).digest}) == 3
    flip_last_byte(folder / "model.safetensors")
    assert expanded() != first


@pytest.mark.usefixtures("settled")
def test_a_known_digest_is_not_taken_again(folder: Path, hashed_files: list[Path]) -> None:
    first = load_model(folder).digest
    assert hashed_files and (folder / CACHE_NAME).is_file()
    hashed_files.clear()
    assert load_model(folder).digest == first and not hashed_files
    os.utime(folder / "model.safetensors")
    assert load_model(folder).digest == first and hashed_files


@pytest.mark.usefixtures("settled")
def test_what_was_copied_with_a_folder_is_not_believed(folder: Path, tmp_path: Path) -> None:
    first = load_model(folder).digest
    kept = json.loads((folder / CACHE_NAME).read_text())
    (folder / CACHE_NAME).write_text(json.dumps(kept | {"weights": KNOWN}))
    assert load_model(folder).digest != first  # here it is believed
    copy = shutil.copytree(folder, tmp_path / "copy")  # with its times
    assert load_model(copy).digest == first
    aside = folder.rename(tmp_path / "aside")
    copy.rename(folder)  # even under the old name
    assert load_model(folder).digest == first and load_model(aside).digest == first


@pytest.mark.usefixtures("settled")
def test_where_the_folder_takes_no_file_the_users_cache_has_it(folder: Path, hashed_files: list[Path]) -> None:
    (folder / CACHE_NAME).mkdir()  # nothing can be written there, not even by root
    first = load_model(folder).digest
    hashed_files.clear()
    assert load_model(folder).digest == first and not hashed_files
    for kept in (folder.parent / "cache").rglob("*"):
        if kept.is_file():
            kept.write_text("damaged")
    assert load_model(folder).digest == first and hashed_files


def test_files_that_have_just_changed_are_not_remembered(folder: Path, hashed_files: list[Path]) -> None:
    """They may change again within one tick of the clock."""
    assert load_model(folder).digest == load_model(folder).digest
    num_tensors = len(load_file(folder / "model.safetensors"))
    assert not (folder / CACHE_NAME).exists() and len(hashed_files) == 2 * num_tensors


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("known", [False, True])
def test_files_that_change_while_they_are_read_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    state, read = load_file(folder / "model.safetensors"), checkpoint.read_tensors
    if known:
        load_model(folder)

    def replaced(files: tuple[Path, ...]) -> Mapping[str, torch.Tensor]:
        save_file(state, folder / "model.safetensors")
        return read(files)

    monkeypatch.setattr(checkpoint, "read_tensors", replaced)
    with pytest.raises(WrongCheckpoint, match="changed while they were read"):
        load_model(folder)
    assert (folder / CACHE_NAME).exists() == known


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\2\0\0\0\0\0\0\0[]", b"\x0d\0\0\0\0\0\0\0" + b'{"w":{"x":1}}']
)
def test_a_file_without_a_header_is_refused_by_name(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WrongCheckpoint, match=r"model\.safetensors has no header"):
        load_model(folder)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"suppress_tokens": [1], "bad_words_ids": [[2, 3]], "min_new_tokens": 4},
            ["suppress_tokens", "bad_words_ids"],
        ),
        ({"min_new_tokens": 4, "temperature": 0.5}, ["min_new_tokens", "(min_new_tokens: min_tokens)"]),
        ({"no_repeat_ngram_size": 1}, ["no_repeat_ngram_size has no effect"]),
        ({"forced_bos_token_id": 0}, ["forced_bos_token_id"]),
        ({"suppress_tokens": [], "bad_words_ids": None, "min_new_tokens": 0, "num_beams": 1, "typical_p": 1.0}, []),
        ({"temperature": 0.5, "eos_token_id": [1, 2], "do_sample": True, "max_new_tokens": 9}, []),
    ],
)
def test_what_of_a_generation_config_has_no_effect_is_said(said: dict[str, Any], told: list[str]) -> None:
    text = checkpoint.unheeded_rules(said)
    assert bool(text) == bool(told) and all(name in text for name in told) and "temperature" not in text
