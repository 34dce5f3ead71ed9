"""A tiny target of several layers, and a text to learn from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.models import save_with_tokenizer

VOCAB, LAYERS = 400, 6
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "def", "main", "return", "class", "self"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer(tmp_path_factory.mktemp("target"), VOCAB, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(" ".join(random.Random(1).choices(WORDS, k=2500)))
    return path
