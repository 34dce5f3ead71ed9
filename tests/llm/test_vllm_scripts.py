"""Scripts as vLLM's documentation has them, for each method that there is here: with another import line and other
models they run as they are."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.adapters import save_adapter
from support.heads import random_head_of, save_mimo

from outrider.llm import LLM
from outrider.pairs import pair_path

TARGET = r"meta-llama/(Meta-)?Llama-3\.1-\d+B-Instruct|facebook/opt-6\.7b"
DRAFT = r"facebook/opt-125m"
HEADS = {
    "eagle": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    "eagle3": "yuhuili/EAGLE3-LLaMA3.1-Instruct-70B",
    "mlp_speculator": "ibm-ai-platform/llama3-70b-accelerator",
}
ONE_DEVICE = ("tensor_parallel_size=4", "tensor_parallel_size=1")
SHOW = """
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
MAY_DRAFT_NOTHING = ("disable_by_batch_size", "ngram by its old name")  # too many at once; 16 sampled tokens
SCRIPTS = {
    "eagle": """
from vllm import LLM, SamplingParams

# Initialize with EAGLE for better acceptance rates
llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    tensor_parallel_size=1,
    speculative_config={
        "method": "eagle",
        "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        "num_speculative_tokens": 3,
    },
    enforce_eager=False,
    gpu_memory_utilization=0.9,
)

# Generate text
prompts = ["Explain quantum computing in simple terms."]
sampling_params = SamplingParams(temperature=0.0, max_tokens=200)
outputs = llm.generate(prompts, sampling_params)

# Retrieve acceptance metrics
metrics = llm.get_metrics()

for metric in metrics:
    if metric.name == "vllm:spec_decode_num_accepted_tokens":
        print(f"Accepted tokens: {metric.value}")
    elif metric.name == "vllm:spec_decode_num_draft_tokens":
        print(f"Draft tokens: {metric.value}")

# Calculate acceptance rate
num_drafts = sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_drafts")
num_accepted = sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_accepted_tokens")
if num_drafts > 0:
    mean_acceptance_length = 1 + (num_accepted / num_drafts)
    print(f"Mean acceptance length: {mean_acceptance_length:.2f}")
""",
    "eagle with log probabilities": """
from vllm import LLM, SamplingParams

llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "eagle",
        "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        "num_speculative_tokens": 3,
    }
)

prompts = ["The Eiffel Tower is located in"]
sampling_params = SamplingParams(
    temperature=0.0,
    max_tokens=50,
    logprobs=5,  # Request top-5 logprobs per token
)

outputs = llm.generate(prompts, sampling_params)

# Access per-token logprobs
output = outputs[0]
for i, token_logprobs in enumerate(output.outputs[0].logprobs):
    print(f"Token {i}: {token_logprobs}")

# Get speculation metrics
metrics = llm.get_metrics()
for metric in metrics:
    if "spec_decode" in metric.name:
        print(f"{metric.name}: {metric.value}")
""",
    "eagle3": """
from vllm import LLM, SamplingParams

# EAGLE3 with tensor parallelism on target model
llm = LLM(
    model="meta-llama/Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,  # Target model uses 4 GPUs
    speculative_config={
        "method": "eagle3",
        "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-70B",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,  # EAGLE runs on single GPU
    },
    gpu_memory_utilization=0.85,
)

prompts = ["Write a detailed essay about climate change."]
outputs = llm.generate(prompts, SamplingParams(max_tokens=500))

for output in outputs:
    print(output.outputs[0].text)
""",
    "mlp_speculator": """
from vllm import LLM, SamplingParams

# MLP speculator for balanced performance
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "ibm-ai-platform/llama3-70b-accelerator",
        # num_speculative_tokens auto-detected from draft model config
        "draft_tensor_parallel_size": 1,
    },
    gpu_memory_utilization=0.85,
)

prompts = ["def factorial(n):"]
sampling_params = SamplingParams(
    temperature=0.0,
    max_tokens=150,
)
outputs = llm.generate(prompts, sampling_params)
""",
    "mtp": """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="XiaomiMiMo/MiMo-7B-Base",
    tensor_parallel_size=1,
    speculative_config={
        "method": "mtp",
        "num_speculative_tokens": 1,
    },
)
outputs = llm.generate(prompts, sampling_params)
"""
    + SHOW,
    "ngram": """
from vllm import LLM, SamplingParams

# Initialize with ngram speculation (no draft model needed)
llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    }
)

# Generate with speculation
prompts = ["The capital of France is", "Write a Python function to"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=100)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt}")
    print(f"Generated: {output.outputs[0].text}")
    print("-" * 50)
""",
    "suffix": """
from vllm import LLM, SamplingParams

# Suffix decoding excels at repetitive patterns
# Requires: pip install arctic-inference
llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "suffix",
        "num_speculative_tokens": 32,  # Maximum, adjusted dynamically
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 1000,
    }
)

# Example: Code refactoring (repetitive patterns)
prompts = [
    "Refactor this code to use list comprehension: result = []\\nfor i in range(10):\\n    result.append(i*2)"
]
outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200))
""",
    "disable_by_batch_size": """
from vllm import LLM, SamplingParams

# Disable speculation when batch size is large
llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "disable_by_batch_size": 8,  # Disable if batch > 8
    }
)

# Large batch - speculation may be disabled automatically
large_batch = ["Prompt " + str(i) for i in range(10)]
outputs = llm.generate(large_batch, SamplingParams(max_tokens=50))
""",
    "tokens": """
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B-Instruct")
llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    }
)

# Pre-tokenize for fine control
prompts_text = [
    "def add(a, b): return a + b\\ndef subtract(a, b):",
    "The first law of thermodynamics states",
]

tokens_prompts = [
    TokensPrompt(prompt_token_ids=tokenizer.encode(p, add_special_tokens=False))
    for p in prompts_text
]

outputs = llm.generate(
    tokens_prompts,
    SamplingParams(temperature=0.0, max_tokens=100)
)
""",
    "draft_model": """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_model="facebook/opt-125m",
    num_speculative_tokens=5,
    use_v2_block_manager=True,
)
outputs = llm.generate(prompts, sampling_params)
"""
    + SHOW,
    "ngram by its old name": """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_model="[ngram]",
    num_speculative_tokens=5,
    ngram_prompt_lookup_max=4,
    use_v2_block_manager=True,
)
outputs = llm.generate(prompts, sampling_params)
"""
    + SHOW,
    "lora": """
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

sql_lora_path = "yard1/llama-2-7b-sql-lora-test"

llm = LLM(
    model="meta-llama/Llama-3.1-8B-Instruct",
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
    enable_lora=True,
    max_loras=1,
    max_lora_rank=8,
    max_cpu_loras=2,
    max_num_seqs=256,
)

prompts = [
    "def add(a, b): return a + b\\ndef subtract(a, b):",
    "def add(a, b): return a + b\\ndef add_all(a, b):",
]
sampling_params = SamplingParams(temperature=0, max_tokens=64)

outputs = llm.generate(
    prompts,
    sampling_params,
    lora_request=LoRARequest("sql_adapter", 1, sql_lora_path)
)
"""
    + SHOW,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For the names of checkpoints in the scripts: heads of random weights in their public layouts, a target that
    brings an MTP layer, and an adapter."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = {name: random_head_of(pair_path().target, method, root / method) for method, name in HEADS.items()}
    state = load_file(weights_of(pair_path().target))
    found["yard1/llama-2-7b-sql-lora-test"] = save_adapter(root / "sql", state, r=8)
    return found | {"XiaomiMiMo/MiMo-7B-Base": save_mimo(root / "mimo", pair_path().target)}


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_vllm_runs(name: str, folders: dict[str, Path]) -> None:
    script = re.sub(r"^from vllm((?:\.\w+)*) import", r"from outrider.llm\1 import", SCRIPTS[name], flags=re.MULTILINE)
    script = re.sub(DRAFT, str(pair_path().draft), re.sub(TARGET, str(pair_path().target), script))
    for checkpoint, folder in folders.items():
        script = script.replace(checkpoint, str(folder))
    script = script.replace("speculative_config={", 'speculative_config={"draft_trial": "off", ')  # of random weights
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # for keywords of before speculative_config
        exec(script.replace(*ONE_DEVICE), names)
    llm, outputs = names["llm"], names["outputs"]
    assert isinstance(llm, LLM)
    with llm:
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert outputs and all(output.finished and output.outputs[0].token_ids for output in outputs)
    drafted = metrics["vllm:spec_decode_num_draft_tokens"]
    assert drafted or name in MAY_DRAFT_NOTHING
    assert (outputs[0].lora_request is not None) == (name == "lora")
