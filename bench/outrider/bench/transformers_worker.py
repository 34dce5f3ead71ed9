"""A worker that decodes with transformers' `generate`: `python -m outrider.bench.transformers_worker TARGET DRAFT
THREADS K`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.bench.worker import Handler, serve_requests

LOOKUP_NGRAM = 2


def make_handler(arguments: Sequence[str]) -> Handler:
    """Answers {"mode", "prompts", "max_tokens", "temperature", "seed"} with seconds and the number of tokens."""
    target, draft, threads, k = arguments
    torch.set_num_threads(int(threads))
    model, assistant = _load(target), _load(draft)
    assistant.generation_config.num_assistant_tokens = int(k)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    extra: dict[str, dict[str, Any]] = {
        "plain": {},
        "assisted": {"assistant_model": assistant},
        "prompt-lookup": {"prompt_lookup_num_tokens": int(k), "max_matching_ngram_size": LOOKUP_NGRAM},
    }

    @torch.inference_mode()
    def handle(question: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(question["prompts"])
        temperature = question["temperature"]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        torch.manual_seed(question["seed"])
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=question["max_tokens"],
            pad_token_id=0,
            **({"do_sample": False} | sampling),
            **extra[question["mode"]],
        )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "num_tokens": (output.shape[1] - ids.shape[1]) * len(ids)}

    return handle


def _load(folder: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    model.generation_config.eos_token_id = None  # every completion has the same length
    return model


if __name__ == "__main__":
    sys.exit(serve_requests(make_handler))
