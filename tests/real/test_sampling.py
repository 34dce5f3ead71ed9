"""Tokens that a real model draws at temperature 1 follow its law, on a vocabulary cut to its likeliest tokens, whatever
drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lossless.chi_square import LEAST_P, p_value_by_context
from support.models import logits_of

from outrider.engine.loader import load_model
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM, SamplingParams
from outrider.rpc.hub import locate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TOP_K, DEPTH, NUM_DRAWS = 6, 3, 1500
PROMPT = "The three largest cities of the country are"


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_draws_follow_the_models_law(acceptance: str, model: Path, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode(PROMPT))
    config: dict[str, Any] = {"model": "self:int4", "num_speculative_tokens": DEPTH}
    sampling = [
        SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=DEPTH, seed=seed, ignore_eos=True, detokenize=False)
        for seed in range(NUM_DRAWS)
    ]
    with LLM(model, speculative_config=config, acceptance=acceptance, max_model_len=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids}] * NUM_DRAWS, sampling, use_tqdm=False)
    draws = np.array([list(output.outputs[0].token_ids) for output in outputs])  # [draws, depth]
    loaded = load_model(locate(model))
    laws: dict[tuple[int, ...], tuple[list[int], Any]] = {}
    for depth in range(DEPTH):
        contexts = [()] if not depth else [(*context, token) for context in laws if len(context) == depth - 1
                                           for token in laws[context][0]]  # fmt: skip
        for context in contexts:
            laws[context] = likeliest(logits_of(loaded, [*ids, *context])[-1])
    for depth in range(DEPTH):
        contexts = [context for context in laws if len(context) == depth]
        counts, law = np.zeros((len(contexts), TOP_K)), np.zeros((len(contexts), TOP_K))
        for row, context in enumerate(contexts):
            tokens, law[row] = laws[context]
            chosen = draws[(draws[:, :depth] == context).all(axis=1), depth]
            assert set(chosen.tolist()) <= set(tokens), "a token that cannot be drawn"
            counts[row] = [(chosen == token).sum() for token in tokens]
        found = p_value_by_context(counts, law)
        print(f"{acceptance}, token {depth}: {len(contexts)} contexts, p {found:.3g}")
        assert counts.sum() == NUM_DRAWS
        assert found > LEAST_P


def likeliest(logits: torch.Tensor) -> tuple[list[int], Any]:  # logits: [vocab]
    """The cut vocabulary, and its law."""
    values, tokens = logits.double().topk(TOP_K)
    return tokens.tolist(), values.softmax(-1).numpy()
