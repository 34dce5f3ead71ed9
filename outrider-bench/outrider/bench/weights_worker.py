"""A worker of `outrider bench weights` that decodes by LLM, as a user gets it:

    python -m outrider.bench.weights_worker WAY TARGET DRAFT K

WAY is plain, suffix, self:int4, self:int8 or draft. Questions and answers are those of peers.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from outrider.bench.harness import Handler, serve_requests
from outrider.llm import LLM, SamplingParams, TokensPrompt

CONTEXT = 1024


def speculation(way: str, draft: str, k: int) -> dict[str, Any] | None:
    """What LLM is asked for."""
    if way == "plain":
        return None
    if way == "suffix":
        return {"method": "suffix"}
    return {"model": draft if way == "draft" else way, "num_speculative_tokens": k}


def make(way: str, target: Path, draft: str, k: int) -> Handler:
    """Answers questions; every one gets tokens that nothing is remembered of but what suffix memory keeps."""
    llm = LLM(target, speculative_config=speculation(way, draft, k), max_model_len=CONTEXT, enable_prefix_caching=False)

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in question["prompts"]]
        sampling = [
            SamplingParams(
                temperature=question["temperature"], max_tokens=question["max_tokens"], ignore_eos=True,
                seed=question["seed"] * 1000 + index, detokenize=False,
            )
            for index in range(len(prompts))
        ]  # fmt: skip
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "num_tokens": sum(map(len, tokens)), "tokens": tokens}

    return handle


if __name__ == "__main__":
    way_, target_, draft_, k_ = sys.argv[1:]
    sys.exit(serve_requests(lambda: make(way_, Path(target_), draft_, int(k_))))
