"""The check at load refuses what differs, long-RoPE is pinned, and checkpoints load from safetensors alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.models import transformers
from outrider.engine.models.base import UnsupportedModel
from outrider.engine.models.transformers import (
    MAX_WINDOW,
    RegistryModel,
    check_architecture,
    load_registry_model,
    small_copy,
)

TINY: dict[str, Any] = {
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
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
IDS = list(range(3, 23))


def config_of(name: str, **overrides: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(name, **{**TINY, **overrides})


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def paged_logits(model: Any, *entries: tuple[list[int], int]) -> Tensor:  # [rows, vocab]
    """Computes (ids, first position) pairs as sequences of their own over zeroed caches."""
    cache = KVCache.allocate(model.layers, 40, torch.float32, "cpu")
    tables = [range(20 * index, 20 * index + 20) for index in range(len(entries))]
    rows = [BatchEntry(ids, at, table, len(ids)) for (ids, at), table in zip(entries, tables, strict=True)]
    return model.forward(build_batch(rows, cache.block_size), cache)


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
    model = model_of(config_of("phi3", rope_parameters=LONGROPE))
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
        text_config={**TINY, "sliding_window": 8},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
    )
    check_architecture(config, 256, trust_remote_code=False)
    model = model_of(config)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(paged_logits(RegistryModel(model, 256), (IDS, 0)), expected, atol=1e-5, rtol=0)
