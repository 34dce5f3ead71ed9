"""Greedy output of a real model with every kind of draft is plain decoding's, token for token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider.llm import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_PROMPTS, MAX_TOKENS, PROMPT_CHARACTERS = 200, 128, 160
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix"},
    "self": {"model": "self:int4", "num_speculative_tokens": 4},
    "head": {"method": "eagle3", "num_speculative_tokens": 3, "draft_trial": "warn"},
}


def decode(model: Path, prompts: tuple[str, ...], config: dict[str, Any] | None) -> tuple[list[list[int]], float]:
    """Tokens of every prompt, and the share of drafted tokens that were accepted."""
    with LLM(model, speculative_config=config, max_model_len=512) as llm:
        outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafted = counts.get("vllm:spec_decode_num_draft_tokens", 0)
    share = counts.get("vllm:spec_decode_num_accepted_tokens", 0) / max(1, drafted)
    return [list(output.outputs[0].token_ids) for output in outputs], share


@cache
def plain(model: Path, prompts: tuple[str, ...]) -> list[list[int]]:
    return decode(model, prompts, None)[0]


@pytest.mark.parametrize("method", CONFIGS)
def test_tokens_are_plain_decodings(method: str, model: Path, head: Path, paragraphs: list[str]) -> None:
    prompts = tuple(text[:PROMPT_CHARACTERS] for text in paragraphs[:NUM_PROMPTS])
    assert len(prompts) == NUM_PROMPTS
    config = CONFIGS[method] | ({"model": str(head)} if method == "head" else {})
    wanted = plain(model, prompts)
    tokens, accepted = decode(model, prompts, config)
    differing = sum(ours != theirs for ours, theirs in zip(tokens, wanted, strict=True))
    print(f"{method}: {NUM_PROMPTS} x {MAX_TOKENS} tokens, {accepted:.2f} of the drafted ones accepted")
    assert differing == 0
    assert 0 < accepted < 1
