"""What a service says of its tokenizer, against the gateway's own reading of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizer_factory import train_byte_fallback, train_byte_level
from tokenizers import Tokenizer as Backend

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.vocabulary import read_vocabulary


def save(folder: Path, backend: Backend, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("train", [train_byte_level, train_byte_fallback])
@pytest.mark.parametrize("config", [{}, {"eos_token": {"content": "<|new|>"}, "pad_token": None}])
def test_agrees_with_the_gateways_tokenizer(tmp_path: Path, train: object, config: dict[str, object]) -> None:
    folder = save(tmp_path, train(), **config)  # type: ignore[operator]
    vocabulary = read_vocabulary(folder)
    tokenizer = Tokenizer.load(folder)
    assert vocabulary is not None and len(vocabulary.fingerprint) == 64
    assert (vocabulary.num_tokens, vocabulary.fingerprint) == (tokenizer.num_tokens, tokenizer.fingerprint)


def test_a_token_more_changes_the_fingerprint(tmp_path: Path) -> None:
    plain = read_vocabulary(save(tmp_path / "a", train_byte_level()))
    other = read_vocabulary(save(tmp_path / "b", train_byte_level(), eos_token="<|new|>"))
    assert plain is not None and other is not None
    assert other.num_tokens == plain.num_tokens + 1 and other.fingerprint != plain.fingerprint


def test_no_tokenizer_no_vocabulary(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None


def test_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, outrider.rpc.vocabulary; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
