"""A random pair with a tokenizer, small enough to be loaded for a test."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.engines import hf_greedy
from support.models import save_tiny, tiny_hf_model, train_byte_level

from outrider.llm import LLM

VOCAB = 300
CHAT = (
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class TinyPair:
    """Folders of a target and a draft, and the target in transformers. No output ends by EOS."""

    target: Path
    draft: Path
    hf: Any


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    options: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": None}
    target = save_tiny(tmp_path_factory.mktemp("target"), seed=1, **options)
    draft = save_tiny(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1, **options)
    for folder in (target, draft):
        train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(CHAT)
    return TinyPair(target, draft, tiny_hf_model("llama", 1, **options))


@pytest.fixture(scope="session")
def llm(tiny_pair: TinyPair) -> Iterator[LLM]:
    """With a draft model; shared by the tests that only generate."""
    config = {"draft_trial": "off", "model": str(tiny_pair.draft), "num_speculative_tokens": 4}
    with LLM(tiny_pair.target, batch_invariant=True, threads=1, speculative_config=config) as made:
        yield made


@functools.cache
def _greedy(hf: Any, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    return tuple(hf_greedy(hf, list(prompt), length))


def greedy_ids(pair: TinyPair, prompt: list[int], length: int) -> list[int]:
    """What the target alone would say; computed once."""
    return list(_greedy(pair.hf, tuple(prompt), length))
