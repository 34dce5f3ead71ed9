"""Which drafts fit which targets."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.messages import ModelInfo
from outrider.rpc.pair import check_pair


def model(name: str, vocab_size: int, num_tokens: int = 0, fingerprint: str = "") -> ModelInfo:
    return ModelInfo(name, "d", vocab_size, 4096, num_tokens=num_tokens, tokenizer_fingerprint=fingerprint)


QWEN_7B = model("Qwen2.5-7B", 152_064, 151_665, "same")
QWEN_HALF = model("Qwen2.5-0.5B", 151_936, 151_665, "same")
LLAMA = model("Llama-3.1-8B", 128_256, 128_256, "other")


@pytest.mark.parametrize(
    ("target", "draft", "warning"),
    [
        (QWEN_7B, QWEN_HALF, ""),
        (QWEN_HALF, QWEN_7B, ""),
        (QWEN_7B, model("ngram", 0), ""),
        (model("Qwen2.5-7B", 152_064), model("Qwen2.5-0.5B", 151_936), "Qwen2.5-7B .* Qwen2.5-0.5B"),
        (model("a", 152_064, 151_665), model("b", 151_936, 151_665, "same"), "sizes"),
    ],
)
def test_pairs(target: ModelInfo, draft: ModelInfo, warning: str) -> None:
    said = check_pair(target, draft)
    if warning:
        assert re.search(warning, said)
    else:
        assert said == ""


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (QWEN_7B, LLAMA),
        (QWEN_7B, model("Qwen2-0.5B", 151_936, 151_646, "older")),  # not known to agree: their tokenizers are not given
        (model("Qwen2.5-7B", 152_064), model("Llama-3.1-8B", 128_256)),
        (model("Qwen2.5-7B", 152_064, 151_665), model("odd", 152_064, 32_000)),
    ],
)
def test_mismatches_name_both(target: ModelInfo, draft: ModelInfo) -> None:
    with pytest.raises(FailedPrecondition) as raised:
        check_pair(target, draft)
    assert target.name in str(raised.value) and draft.name in str(raised.value)
    assert raised.value.reason == "NOT_A_PAIR"


def test_a_draft_that_maps_the_targets_vocabulary_fits() -> None:
    target, draft = model("t", 500, 400, "f"), model("d", 300, 290, "g")
    assert check_pair(target, replace(draft, mapped_fingerprints=("e", "f"))) == ""
    with pytest.raises(FailedPrecondition, match="--target-tokenizer"):
        check_pair(target, replace(draft, mapped_fingerprints=("e",)))
