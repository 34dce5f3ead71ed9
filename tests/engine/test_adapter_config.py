"""PEFT's configuration, by PEFT itself: the same modules, ranks and factors; and what is refused, by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.adapters import ALL, ATTENTION, CONFIG, merged, save_adapter
from support.models import build_decoder, hf_logits, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.adapters.config import Patterns, UnsupportedAdapter, parse_adapter_config
from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import BatchEntry
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.low_rank import decoder_linears

LINEARS = decoder_linears(parse_config(tiny_config(num_hidden_layers=3)))
OTHERS = ("model.embed_tokens", "lm_head")

ACTING: dict[str, dict[str, Any]] = {
    "names": {},
    "some names": {"target_modules": ["q_proj", "down_proj"]},
    "a longer name": {"target_modules": ["self_attn.q_proj", "0.mlp.up_proj"]},
    "whole names": {"target_modules": ["model.layers.1.mlp.gate_proj", "v_proj"], "layers_to_transform": [0]},
    "names that are not there": {"target_modules": ["q_proj", "c_attn"]},
    "a pattern": {"target_modules": r"model\.layers\.[02]\.(self_attn|mlp)\.(q|up)_proj"},
    "a pattern with a look ahead": {"target_modules": r".*(?<!up)(?<!gate)_proj"},
    "all": {"target_modules": "all-linear"},
    "all, in capitals": {"target_modules": "ALL-linear"},
    "all but some": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "0.mlp.up_proj"]},
    "all but a pattern": {"target_modules": list(ALL), "exclude_modules": r".*\.1\..*"},
    "one layer": {"layers_to_transform": 1},
    "some layers": {"layers_to_transform": [0, 2]},
    "no layers": {"layers_to_transform": []},
    "some layers of a name": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "layers of names": {"layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 16, "^model.layers.0.self_attn.k_proj": 3}},
    "ranks by patterns": {"rank_pattern": {r"[a-z]_proj": 2, r"layers\.\d\.mlp\..*": 5}},
    "factors": {"alpha_pattern": {"v_proj": 64, r"layers\.[01]\.self_attn\.o_proj": 1}},
    "rank-stabilised": {"use_rslora": True, "r": 7, "rank_pattern": {"up_proj": 16}, "alpha_pattern": {"k_proj": 3}},
    "the first pattern counts": {"rank_pattern": {"q_proj": 2, "self_attn.q_proj": 5}},
    "half of a name is none": {"rank_pattern": {"proj": 2, "_attn.q_proj": 5, "layers.1": 9}},
}


def peft_modules(config: dict[str, Any], **options: Any) -> dict[str, tuple[int, float]]:
    """Of every module that PEFT changes, rank and scaling."""
    from peft import LoraConfig, get_peft_model

    kept = {name: value for name, value in config.items() if name not in ("peft_type", "revision")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(tiny_hf_model(**options), LoraConfig(**kept))
    return {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and len(module.lora_A)
    }


@pytest.mark.parametrize("name", ACTING)
def test_modules_ranks_and_factors_are_pefts(name: str) -> None:
    given = {**CONFIG, "target_modules": list(ALL), **ACTING[name]}
    found = parse_adapter_config(json.loads(json.dumps(given))).modules(LINEARS, OTHERS)
    expected = peft_modules(given, num_hidden_layers=3)
    assert {module: (rank.rank, rank.scaling) for module, rank in found.items()} == expected


def test_what_peft_wrote_computes_what_peft_computes(tmp_path: Path) -> None:
    """Saved by PEFT, and merged by it into transformers' model: greedy tokens, and logits to 1e-4."""
    from peft import LoraConfig, get_peft_model

    hf, ids = tiny_hf_model(), [(31 * index + 7) % 97 for index in range(40)]
    state = tiny_state(hf)
    config = LoraConfig(
        r=8, lora_alpha=12, target_modules="all-linear", rank_pattern={"v_proj": 3}, use_rslora=True,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        model = get_peft_model(hf, config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(str(tmp_path / "adapter"))
        expected = hf_logits(model.merge_and_unload(), ids)
    loaded = build_decoder(tiny_config(), state)
    resident = ResidentAdapters(loaded.model, AdapterRoom(1, 64))
    adapter = resident.prepare(load_adapter(tmp_path / "adapter", loaded.model, ""))
    runner = ModelRunner(loaded.model, 4, adapters=resident)
    logits = runner.forward([BatchEntry(ids, 0, [0, 1, 2], len(ids), adapter=adapter)])
    assert float((logits - expected).abs().max() / expected.std()) < 1e-4
    assert torch.equal(logits.argmax(1), expected.argmax(1))
    plain = runner.forward([BatchEntry(ids, 0, [0, 1, 2], len(ids))])
    assert float((plain - expected).abs().max() / expected.std()) > 0.1


def test_the_formula_of_the_tests_is_pefts(tmp_path: Path) -> None:
    """What other tests take for merged weights."""
    from peft import PeftModel

    hf = tiny_hf_model()
    state = tiny_state(hf)
    folder = save_adapter(tmp_path / "adapter", state, ATTENTION)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = PeftModel.from_pretrained(hf, str(folder)).merge_and_unload().state_dict()
    for name, weight in merged(state, folder).items():
        assert torch.allclose(whole[name], weight, atol=1e-6), name
    assert len(load_file(folder / "adapter_model.safetensors")) == 16


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type: is 'IA3'; allowed: LORA"),
    "no method": ({"peft_type": None}, "peft_type: is None; allowed: LORA"),
    "DoRA": ({"use_dora": True}, "use_dora: is True, which is not computed here"),
    "biases": ({"bias": "lora_only"}, "bias: is 'lora_only'; allowed: none"),
    "biases of its own": ({"lora_bias": True}, "lora_bias: is True"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out: is True"),
    "modules beside": ({"modules_to_save": ["lm_head"]}, r"modules_to_save: is \['lm_head'\]; allowed: none"),
    "tokens beside": ({"trainable_token_indices": [1]}, "trainable_token_indices: is"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: is"),
    "Megatron": ({"megatron_config": {"tensor_model_parallel_size": 2}}, "megatron_config: is"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: is"),
    "activated late": ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens: is"),
    "quantised": ({"use_qalora": True}, "use_qalora: is True"),
    "a base taken apart": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights: is 'pissa_niter_16'"),
    "a classifier": ({"task_type": "SEQ_CLS"}, "task_type: is 'SEQ_CLS'"),
    "a key of tomorrow": ({"use_magic": 2}, "use_magic: is 2, which is not computed here; allowed: to leave it out"),
    "rank 65": ({"r": 65}, "r: is 65; allowed: 1 to 64"),
    "rank 0": ({"r": 0}, "r: is 0"),
    "rank true": ({"r": True}, "r: is True"),
    "rank of a text": ({"r": "8"}, "r: is '8'"),
    "a module's rank": ({"rank_pattern": {"q_proj": 100}}, r"rank_pattern\[q_proj\]: is 100; allowed: 1 to 64"),
    "ranks in a list": ({"rank_pattern": [8]}, "rank_pattern: is .*; allowed: an object"),
    "no number": ({"lora_alpha": float("nan")}, "lora_alpha: is nan"),
    "a huge number": ({"lora_alpha": 10**400}, "lora_alpha: is 1000"),
    "a module's factor": ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\[q_proj\]: is None"),
    "a flag of a number": ({"use_rslora": 1}, "use_rslora: is 1; allowed: true, false"),
    "no targets": ({"target_modules": None}, "target_modules: is None; allowed: names"),
    "targets in an object": ({"target_modules": {"q_proj": 1}}, "target_modules: is .*; allowed: a text"),
    "a target of a number": ({"target_modules": ["q_proj", 1]}, "target_modules: is .*; allowed: a text"),
    "layers of a pattern": ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform: is"),
    "a layer below 0": ({"layers_to_transform": [-1]}, "layers_to_transform: is"),
    "a layer of a text": ({"layers_to_transform": "0"}, "layers_to_transform: is '0'"),
    "a long pattern": ({"target_modules": "q" * 2001}, "target_modules: has 2001 characters; allowed: at most 2000"),
}  # fmt: skip
NOWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules: has model.embed_tokens"),
    "the head": ({"target_modules": ["lm_head"]}, "target_modules: has lm_head; allowed: products of the layers"),
    "all by a pattern": ({"target_modules": ".*"}, "target_modules: has model.embed_tokens, lm_head"),
    "nothing": ({"target_modules": ["c_attn"]}, r"target_modules: is \('c_attn',\), which no module of the base has"),
    "no layer": ({"layers_to_transform": [99]}, "which no module of the base has"),
    "no pattern": ({"target_modules": "(q_proj"}, r"'\(q_proj' is no pattern"),
    "no pattern of ranks": ({"rank_pattern": {"*": 2}}, "is no pattern"),
    "a pattern for ever": ({"target_modules": r"(.|..)*[A-Z]"}, "takes too long to search for"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    options, said = REFUSED[name]
    with pytest.raises(UnsupportedAdapter, match=said):
        parse_adapter_config({**CONFIG, "target_modules": list(ALL), **options})


@pytest.mark.parametrize("name", NOWHERE)
def test_modules_that_no_adapter_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.adapters.config.MATCHING_S", 0.2)
    options, said = NOWHERE[name]
    config = parse_adapter_config({**CONFIG, "target_modules": list(ALL), **options})
    with pytest.raises(UnsupportedAdapter, match=said):
        config.modules(LINEARS, OTHERS)


def test_patterns_share_their_time() -> None:
    now = [0.0]
    find = Patterns(1.0, lambda: now[0])
    assert find("b+", "bbc") == "bb" and find("b+", "abc") is None
    now[0] = 2.0
    with pytest.raises(UnsupportedAdapter, match="takes too long"):
        for _ in range(100):
            find(r"(.|..)*[A-Z]", "a" * 60)
