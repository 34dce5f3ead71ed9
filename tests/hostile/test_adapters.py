"""Adapters that are damaged, of another base, or made to harm: each is refused with the name of the file, the field or
the tensor, in bounded memory; none ends the process by another error."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile.test_checkpoints import BROKEN, in_little_memory
from safetensors.torch import load_file, save_file
from support.adapters import CONFIG_FILE, PREFIX, WEIGHTS_FILE, save_adapter
from support.models import SMALLEST, save_tiny
from torch import Tensor

from outrider.engine.adapters.config import UnsupportedAdapter
from outrider.engine.adapters.loader import load_adapter
from outrider.engine.loader import LoadedModel, load_model

FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny(tmp_path_factory.mktemp("base"), **SMALLEST))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: LoadedModel) -> Path:
    """An adapter that loads."""
    folder = tmp_path_factory.mktemp("whole")
    state = load_file(save_tiny(folder / "base", **SMALLEST) / "model.safetensors")
    load_adapter(save_adapter(folder / "adapter", state), base.model, base.digest)
    return folder / "adapter"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "broken"))


def refusal(folder: Path, base: LoadedModel) -> str:
    with in_little_memory(), pytest.raises(UnsupportedAdapter) as refused:
        load_adapter(folder, base.model, base.digest)
    assert str(folder) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", BROKEN)
def test_weights_that_are_none_are_refused(kind: str, folder: Path, base: LoadedModel) -> None:
    path = folder / WEIGHTS_FILE
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    refusal(folder, base)


def test_flipped_bytes(folder: Path, base: LoadedModel) -> None:
    """It loads, or is refused."""
    path, rng = folder / WEIGHTS_FILE, random.Random(5)
    raw = path.read_bytes()
    for _ in range(100):
        damaged = bytearray(raw)
        damaged[rng.randrange(4000)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            load_adapter(folder, base.model, base.digest)
        except UnsupportedAdapter as refused:
            assert str(folder) in str(refused)


def with_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return write


def set_first(value: Tensor) -> Callable[[Path], None]:
    return with_tensors(lambda tensors: tensors.update({FIRST: value}))


def set_number(value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[FIRST][1, 2] = value

    return with_tensors(change)


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS_FILE), folder / "adapter_model.bin")
    (folder / WEIGHTS_FILE).unlink()


def as_folder(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).mkdir()


def with_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / CONFIG_FILE).write_text(text)


MORE = f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle": (as_pickle, "holds only adapter_model.bin, which is a pickle; allowed: adapter_model.safetensors"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "holds no adapter_model.safetensors"),
    "a folder of weights": (as_folder, "holds no adapter_model.safetensors"),
    "no configuration": (lambda folder: (folder / CONFIG_FILE).unlink(), "holds no adapter_config.json"),
    "a configuration cut off": (with_config('{"peft_type":'), "holds no JSON"),
    "a configuration in a list": (with_config("[]"), "does not hold a JSON object"),
    "a configuration nested deep": (with_config("[" * 100_000), "holds no JSON"),
    "NaN": (set_number(float("nan")), f"{FIRST} holds NaN or infinity"),
    "infinity": (set_number(float("-inf")), f"{FIRST} holds NaN or infinity"),
    "another rank": (set_first(torch.zeros(5, 32)), f"{FIRST} has shape (5, 32), not (4, 32)"),
    "another base's width": (set_first(torch.zeros(4, 64)), f"{FIRST} has shape (4, 64), not (4, 32)"),
    "one dimension": (set_first(torch.zeros(128)), f"{FIRST} has shape (128,), not (4, 32)"),
    "integers": (set_first(torch.zeros(4, 32, dtype=torch.int8)), f"{FIRST} is of int8; allowed: float32"),
    "one tensor less": (with_tensors(lambda tensors: tensors.pop(FIRST)), f"{FIRST} is missing"),
    "another base's layers": (
        with_tensors(lambda tensors: tensors.update({MORE: torch.zeros(4, 32)})),
        f"{MORE} is there, which no targeted module of the base has",
    ),
    "DoRA's magnitudes": (
        with_tensors(lambda tensors: tensors.update({"x.lora_magnitude_vector": torch.zeros(32)})),
        "x.lora_magnitude_vector is there",
    ),
    "embeddings": (
        with_tensors(lambda tensors: tensors.update({f"{PREFIX}model.embed_tokens.weight": torch.zeros(97, 32)})),
        "model.embed_tokens.weight is there",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_named(kind: str, folder: Path, base: LoadedModel) -> None:
    change, said = WRONG[kind]
    change(folder)
    assert said in refusal(folder, base)


def test_an_adapter_of_another_base(whole: Path, tmp_path: Path) -> None:
    """Larger, smaller, and of another family."""
    for number, options in enumerate(({"hidden_size": 64}, {"num_hidden_layers": 2}, {"intermediate_size": 64})):
        other = load_model(save_tiny(tmp_path / str(number), **{**SMALLEST, **options}))
        assert "not an adapter of this base" in refusal(whole, other)
    fused = load_model(save_tiny(tmp_path / "phi", "phi3", **SMALLEST))
    assert "not an adapter of this base" in refusal(whole, fused)


def test_fields_of_any_kind(folder: Path, base: LoadedModel) -> None:
    """Each field with each odd value: it loads, or is refused."""
    given = json.loads((folder / CONFIG_FILE).read_text())
    odd: list[Any] = [None, True, -1, 0, 1 << 70, 1.5, "", "x", "(", [], [None], [[]], {}, {"x": None}, {"(": 1}, 1e308]
    for name in given:
        for value in odd:
            (folder / CONFIG_FILE).write_text(json.dumps({**given, name: value}))
            try:
                load_adapter(folder, base.model, base.digest)
            except UnsupportedAdapter as refused:
                assert str(folder) in str(refused), (name, value)


def test_a_link_to_elsewhere_is_read_as_what_it_names(folder: Path, base: LoadedModel, tmp_path: Path) -> None:
    (folder / WEIGHTS_FILE).rename(tmp_path / "elsewhere")
    (folder / WEIGHTS_FILE).symlink_to(tmp_path / "elsewhere")
    assert load_adapter(folder, base.model, base.digest).rank == 4
    (tmp_path / "elsewhere").unlink()
    assert "holds no adapter_model.safetensors" in refusal(folder, base)
