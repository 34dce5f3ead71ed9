"""Every family of transformers causal models either gives its eager logits over the paged cache or is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.kv_cache_manager import BLOCK_SIZE, BlockPool, CachedSequence, SequenceCache
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.transformers import RegistryModel, check_architecture, refuse_early

MAX_MODEL_LEN = 128
WINDOW = 8
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
ALTERNATE = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}

SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama:llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama:yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "layer_types": ALTERNATE, "head_dim": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 16},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATE},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": WINDOW},
    "phi3:longrope": {"rope_parameters": LONGROPE},
    "phimoe": {"num_local_experts": 4},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ALTERNATE},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.5},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ALTERNATE},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "deepseek_v2": {**MLA, **ROUTED, "topk_method": "greedy"},
    "deepseek_v3": {**MLA, **ROUTED},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "exaone4": {"sliding_window": WINDOW, "layer_types": ALTERNATE, "head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": {**ROUTED, "head_dim": 16, "v_head_dim": 8, "sliding_window": WINDOW},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama:dynamic": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic NTK"),
    "phimoe:longrope": (
        {
            "num_local_experts": 4,
            "rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3},
        },
        "differs from its eager attention",
    ),
    "gemma3n_text": ({}, "share the keys and values"),
    "nemotron": ({"head_dim": 8}, "keyword arguments of its forward pass do not reach NemotronAttention"),
    "diffllama": ({}, "attends more than once"),
    "doge": ({}, "cannot be replaced"),
    "llama4_text": ({}, "layers of kind chunked_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, "layers of kind conv"),
    "recurrent_gemma": ({}, "layers of kind linear_attention|recurrent"),
    "mamba": ({}, "MambaForCausalLM does not use the attention registry"),
    "jamba": ({}, "JambaForCausalLM does not use"),
    "falcon_h1": ({}, "FalconH1ForCausalLM does not use"),
    "qwen3_next": ({}, "Qwen3NextForCausalLM does not use"),
    "zaya": ({}, "layers of kind hybrid"),
    "stablelm": ({}, "does not use the attention registry"),
    "bloom": ({}, "does not use the attention registry"),
    "falcon": ({}, "does not use the attention registry"),
    "mpt": ({}, "does not use the attention registry"),
    "gptj": ({}, "does not use the attention registry"),
    "codegen": ({}, "does not use the attention registry"),
    "bert": ({}, "neither causal nor a causal window"),
    "t5": ({}, "T5"),
}


def tiny_config(name: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(name.partition(":")[0], **{**TINY, **overrides})


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """In float32 with eager attention; biases and sinks are not left at zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    return model


def eager_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:  # [tokens, vocab]
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


class Engine:
    """The engine's own block tables under a model, without a runner."""

    def __init__(self, model: RegistryModel) -> None:
        self.model = model
        self.caches = SequenceCache(BlockPool(32))
        self.cache = KVCache.allocate(model.layers, 32, torch.float32, "cpu")

    def step(self, *work: tuple[CachedSequence, list[int]]) -> list[Tensor]:  # of each [new rows, vocab]
        """Appends ids to sequences and computes all that is not computed, the last `len(ids)` rows with logits."""
        entries = []
        for sequence, ids in work:
            start = sequence.num_computed_tokens
            self.caches.extend(sequence, ids)
            entries.append(BatchEntry(sequence.tokens[start:], start, sequence.block_table, len(ids)))
            sequence.num_computed_tokens = len(sequence)
        logits = self.model.forward(build_batch(entries, BLOCK_SIZE), self.cache)
        return list(torch.split(logits, [len(ids) for _, ids in work]))


def check_family(model: PreTrainedModel) -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(3, 97) for _ in range(length)] for length in (41, 23, 18)]
    expected = [eager_logits(model, text) for text in texts]
    engine = Engine(RegistryModel(model, 32 if "longrope" in str(model.config) else MAX_MODEL_LEN))
    sequences = [CachedSequence([]) for _ in texts]

    def compare(spans: dict[int, tuple[int, int]]) -> None:
        """Computes texts[i][start:end] in one batch, in the order given."""
        found = engine.step(*[(sequences[i], texts[i][start:end]) for i, (start, end) in spans.items()])
        for (i, (start, end)), logits in zip(spans.items(), found, strict=True):
            torch.testing.assert_close(logits, expected[i][start:end], atol=1e-4, rtol=0, check_dtype=True)

    compare({0: (0, 11)})  # a chunk alone
    compare({1: (0, 20), 0: (11, 12), 2: (0, 3)})  # prefill beside a single row and a short prompt
    engine.step((sequences[0], [5, 6, 7, 8, 9]), (sequences[2], [9, 9]))  # windows that are refused
    for index, length in ((0, 12), (2, 3)):
        engine.caches.truncate(sequences[index], length)
        sequences[index].num_computed_tokens = length
    compare({0: (12, 30), 2: (3, 9)})
    compare({2: (9, 18), 0: (30, 41), 1: (20, 23)})


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    config = tiny_config(name, SERVED[name])
    refuse_early(config)
    check_architecture(config, MAX_MODEL_LEN, trust_remote_code=False)
    check_family(tiny_model(config))
    print(f"{name}: served")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    overrides, reason = REFUSED[name]
    config = tiny_config(name, overrides)
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        refuse_early(config)
        check_architecture(config, MAX_MODEL_LEN, trust_remote_code=False)
    print(f"{name}: refused: {refusal.value}")
