"""A GGUF file opens as a folder: made once, anew for another file, somewhere else where no cache can be written; and
everything that takes a folder takes the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import Typed, write_gguf
from support.gguf_models import as_gguf
from support.models import save_tiny

from outrider.engine import checkpoint
from outrider.engine.loader import load_model
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gguf import folder as gguf_folder
from outrider.gguf.folder import folder_of, gguf_of
from outrider.gguf.header import KINDS, read_gguf
from outrider.llm import LLM, SamplingParams
from outrider.rpc.hub import ModelNotFound, locate, model_name

TYPES = "tokenizer.ggml.token_type"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were made."""
    made: list[Path] = []
    whole = gguf_folder._write

    def recorded(file: Path, folder: Path, source: dict[str, Any]) -> None:
        made.append(folder)
        whole(file, folder, source)

    monkeypatch.setattr(gguf_folder, "_write", recorded)
    return made


def model_in(folder: Path, name: str = "small-Q8_0.gguf", **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return as_gguf(folder / name, "llama", "Q8_0", **options)[0]


def test_it_is_made_once_and_anew_for_another_file(tmp_path: Path, written: list[Path]) -> None:
    file = model_in(tmp_path)
    folder = locate(file)
    assert locate(file) == folder and len(written) == 1
    assert model_name(folder) == "small-Q8_0" and checkpoint.weights_entry(folder) == "model.gguf"
    digest = load_model(folder).digest
    model_in(tmp_path, seed=1)
    assert locate(file) == folder and len(written) == 2
    assert load_model(folder).digest != digest
    shutil.copyfile(file, tmp_path / "copy.gguf")
    other = locate(tmp_path / "copy.gguf")
    assert other != folder and load_model(other).digest == load_model(folder).digest


def test_nothing_is_left_where_it_could_not_be_made(tmp_path: Path, caches: Path) -> None:
    file = model_in(tmp_path, metadata={"tokenizer.ggml.model": "riddle"})
    with pytest.raises(ModelNotFound, match=r"tokenizer\.ggml\.model.*riddle"):
        locate(file)
    assert [path.suffix for path in (caches / "outrider" / "gguf").iterdir()] == [".lock"]


def test_without_a_cache_it_is_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[Path]) -> None:
    (tmp_path / "caches").write_text("a file, where a folder should be")
    removed: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *given, **_: removed.append(given))
    folder = locate(model_in(tmp_path))
    assert load_model(folder).vocab_size == 97 and written == [folder] and (shutil.rmtree, folder) in removed
    shutil.rmtree(folder)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    file = model_in(tmp_path / "download")
    assert locate(tmp_path / "download") == locate(file)
    model_in(tmp_path / "download", "small-Q4_0.gguf")
    with pytest.raises(ModelNotFound, match=r"holds 2 GGUF models; allowed: the path of one of them: small-Q4_0\.gguf"):
        locate(tmp_path / "download")
    plain = save_tiny(tmp_path / "plain")
    shutil.copyfile(file, plain / "beside.gguf")
    assert locate(plain) == plain and gguf_of(plain) is None
    assert gguf_of(locate(file)) is None  # what stands for one is no other


def test_a_split_model_is_one_folder(tmp_path: Path) -> None:
    header = read_gguf(model_in(tmp_path / "whole"))
    numbers = {kind.name: number for number, kind in KINDS.items()}
    halves: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for index, place in enumerate(header.tensors.values()):
        raw = place.path.read_bytes()[place.start : place.start + place.num_bytes]
        halves[index % 2][place.name] = (place.shape, numbers[place.kind.name], raw)
    for number, tensors in enumerate(halves):
        said = {"split.no": Typed("u16", number), "split.count": Typed("u16", 2)}
        metadata = {**dict(header.metadata), **said} if number == 0 else said
        metadata = {
            key: Typed("i32", value) if key.endswith("token_type") else value for key, value in metadata.items()
        }
        (tmp_path / "split").mkdir(exist_ok=True)
        write_gguf(tmp_path / "split" / f"m-{number + 1:05d}-of-00002.gguf", metadata, tensors)
    folder = locate(tmp_path / "split")
    assert len(checkpoint.weight_files(folder)) == 2
    assert load_model(folder).digest == load_model(locate(tmp_path / "whole")).digest
    (tmp_path / "split" / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelNotFound, match="m-00002-of-00002.gguf is not beside it"):  # noqa: RUF043
        locate(tmp_path / "split")


def test_two_processes_make_it_once(tmp_path: Path, written: list[Path]) -> None:
    file = model_in(tmp_path)
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            os._exit(0 if load_config(folder_of(file)) else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert load_config(folder_of(file)) and not written


def load_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with LLM(model_in(tmp_path), speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as made:
        yield made


def test_an_llm_takes_the_file(llm: LLM, tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 5, 6, 7]
    found = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    with LLM(tmp_path / "small-Q8_0.gguf") as plain:
        expected = plain.generate(
            {"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        )
    assert found[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert Tokenizer.load(locate(tmp_path / "small-Q8_0.gguf")).encode("\u4e00\u4e01") == [1, 3, 4]
