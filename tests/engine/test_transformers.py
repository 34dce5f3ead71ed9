"""Every family of transformers causal models either gives its eager logits over the paged cache or is refused.

The check at load refuses what differs, long-RoPE is pinned, and checkpoints load from safetensors alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CodeGenForCausalLM,
    GPTJForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.kv_cache_manager import BLOCK_SIZE, BlockPool, CachedSequence, KVCacheManager
from outrider.engine.models import transformers
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.transformers import (
    MAX_WINDOW,
    RegistryModel,
    check_architecture,
    load_registry_model,
    refuse_early,
    small_copy,
)

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
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
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
    "hunyuan_v1_dense:dynamic": {"head_dim": 8, "rope_parameters": {**DYNAMIC, "alpha": 1000.0}},
    "llama:dynamic": {"rope_parameters": DYNAMIC},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": {**ROUTED, "head_dim": 16, "v_head_dim": 8, "sliding_window": WINDOW},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama:dynamic": ({"rope_parameters": DYNAMIC, "max_position_embeddings": MAX_MODEL_LEN - 1}, "dynamic NTK .* 127"),
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
    "bert": ({}, "neither causal nor a causal window"),
    "t5": ({}, "T5"),
}
# In the registry since transformers 5.24.
for later, model_class in (("gptj", GPTJForCausalLM), ("codegen", CodeGenForCausalLM)):
    if model_class._supports_attention_backend:
        SERVED[later] = {"rotary_dim": 4}
    else:
        REFUSED[later] = {}, "does not use the attention registry"


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
        return cast(Tensor, model(torch.tensor([tokens]), use_cache=False).logits[0])


class Engine:
    """The engine's own block tables under a model, without a runner."""

    def __init__(self, model: RegistryModel) -> None:
        self.model = model
        self.caches = KVCacheManager(BlockPool(32))
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


CHECKED: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHECKED_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
IDS = list(range(3, 23))


def config_of(name: str, **overrides: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(name, **{**CHECKED, **overrides})


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def paged_logits(model: Any, *entries: tuple[list[int], int]) -> Tensor:  # [rows, vocab]
    """Computes (ids, first position) pairs as sequences of their own over zeroed caches."""
    cache = KVCache.allocate(model.layers, 40, torch.float32, "cpu")
    tables = [range(20 * index, 20 * index + 20) for index in range(len(entries))]
    rows = [BatchEntry(ids, at, table, len(ids)) for (ids, at), table in zip(entries, tables, strict=True)]
    return cast(Tensor, model.forward(build_batch(rows, cache.block_size), cache))


@pytest.mark.parametrize(
    ("name", "overrides", "wrong"),
    [
        ("starcoder2", {"sliding_window": 30}, {"sliding_window": MAX_WINDOW + 1}),
        ("starcoder2", {"sliding_window": 30}, {"sliding_window": None}),
        ("gemma2", {}, {"softcap": None}),
        ("gemma2", {}, {"softcap": 2.1}),
        ("granite", {"attention_multiplier": 0.5}, {"scale": 0.49}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, {"sinks": None}),
    ],
)
def test_the_check_sees_every_mechanism(
    monkeypatch: pytest.MonkeyPatch, name: str, overrides: dict[str, Any], wrong: dict[str, Any]
) -> None:
    config = config_of(name, **overrides)
    check_architecture(config, 256, trust_remote_code=False)

    name = "plan_attention" if "sliding_window" in wrong else "planned_attention"
    right = getattr(transformers, name)
    monkeypatch.setattr(transformers, name, lambda *args, **kwargs: right(*args, **{**kwargs, **wrong}))
    with pytest.raises(UnsupportedModel, match=r"differs from its eager attention: .* at a spread of"):
        check_architecture(config, 256, trust_remote_code=False)


def test_the_copy_keeps_each_kind_of_layer_and_what_shapes_attention() -> None:
    config = AutoConfig.for_model("gemma2", num_hidden_layers=26, head_dim=16)
    small = small_copy(config, narrow=True, trust_remote_code=False).config
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_hidden_layers, small.head_dim, small.sliding_window) == (2, 16, MAX_WINDOW)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)
    assert 0 < small.attn_logit_softcapping < config.attn_logit_softcapping
    assert config.num_hidden_layers == 26  # the checkpoint's own is untouched


def test_the_check_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    check_architecture(config_of("llama"), 256, trust_remote_code=False)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("max_model_len", "probe"), [(64, 1), (65, 65), (256, 100)])
def test_long_rope_factors_follow_from_max_model_len(max_model_len: int, probe: int) -> None:
    """transformers' own choice for a text of `probe` more tokens, whatever the batch."""
    model = model_of(config_of("phi3", rope_parameters=CHECKED_LONGROPE))
    ids = (IDS * 6)[: max(probe, len(IDS))]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    paged = RegistryModel(model, max_model_len)
    alone = paged_logits(paged, (IDS, 0))
    torch.testing.assert_close(alone, expected[: len(IDS)], atol=1e-5, rtol=0)
    beside = paged_logits(paged, (IDS, 0), ([5], max_model_len - 1))[: len(IDS)]
    torch.testing.assert_close(beside, alone, atol=1e-6, rtol=0)


def test_a_window_that_exists_only_in_the_mask_is_found() -> None:
    config = config_of("gemma3_text", sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    model = model_of(config)
    for module in model.modules():
        if hasattr(module, "sliding_window"):
            module.sliding_window = None
    with torch.inference_mode():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(paged_logits(RegistryModel(model, 256), (IDS, 0)), expected, atol=1e-5, rtol=0)


def test_a_checkpoint_loads_and_two_live_in_one_process(tmp_path: Path) -> None:
    logits = []
    models = []
    for index, name in enumerate(("gpt_neox", "opt")):
        model = model_of(config_of(name))
        with torch.inference_mode():
            logits.append(model(torch.tensor([IDS]), use_cache=False).logits[0])
        model.save_pretrained(tmp_path / name)
        models.append(load(tmp_path / name))
        assert models[index].vocab_size == 97 and models[index].max_model_len == 256
    for model, expected in zip(models * 2, logits * 2, strict=True):
        torch.testing.assert_close(paged_logits(model, (IDS, 0)), expected, atol=1e-4, rtol=0)


def test_only_rows_that_want_logits_get_them() -> None:
    model = RegistryModel(model_of(config_of("llama")), 256)
    cache = KVCache.allocate(model.layers, 4, torch.float32, "cpu")
    batch = build_batch([BatchEntry(IDS, 0, [0, 1], 2), BatchEntry(IDS, 0, [2, 3], 1)], cache.block_size)
    logits = model.forward(batch, cache)
    assert logits.shape == (3, 97) and logits.dtype == torch.float32
    torch.testing.assert_close(logits[1], logits[2], atol=1e-5, rtol=0)


def load(path: Path, max_model_len: int | None = None) -> Any:
    config = json.loads((path / "config.json").read_text())
    return load_registry_model(path, config, dtype=torch.float32, device="cpu", max_model_len=max_model_len)


def test_a_refusal_names_checkpoint_architecture_and_reason(tmp_path: Path) -> None:
    config_of("lfm2", layer_types=["conv", "full_attention"]).save_pretrained(tmp_path / "small-fm")
    with pytest.raises(UnsupportedModel, match=r"small-fm \(lfm2\) is not served: it has layers of kind conv"):
        load(tmp_path / "small-fm")


def test_a_length_beyond_the_model_is_refused(tmp_path: Path) -> None:
    config_of("opt").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="max_model_len is 257, the model's own limit 256"):
        load(tmp_path, max_model_len=257)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = model_of(config_of("llama"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path)


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    model = model_of(config_of("llama"))
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UnsupportedModel, match=r"lacks 3 weights, model\.layers\.1\.mlp\.down_proj\.weight first"):
        load(tmp_path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModel, match=r"\(no_such_model\) is not served"):
        load(tmp_path)


def test_remote_code_runs_only_when_asked(tmp_path: Path) -> None:
    config = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.LM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UnsupportedModel, match="trust_remote_code"):
        load(tmp_path)


def test_bfloat16_gives_float32_logits_near_those_of_float32() -> None:
    model = model_of(config_of("granite"))
    exact = paged_logits(RegistryModel(model, 256), (IDS, 0))
    halved = RegistryModel(model.to(torch.bfloat16), 256)
    cache = KVCache.allocate(halved.layers, 2, torch.bfloat16, "cpu")
    logits = halved.forward(build_batch([BatchEntry(IDS, 0, [0, 1], len(IDS))], cache.block_size), cache)
    assert logits.dtype == torch.float32
    assert float((logits - exact).abs().max()) < 0.1 * float(exact.std())


def test_the_text_part_of_a_composite_model_is_served() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**CHECKED, "sliding_window": 8},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
    )
    check_architecture(config, 256, trust_remote_code=False)
    model = model_of(config)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(paged_logits(RegistryModel(model, 256), (IDS, 0)), expected, atol=1e-5, rtol=0)
