"""Which engine runs an LLM's target, by its arguments and the checkpoint, and what is said where none can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.pairs import TinyPair

from outrider.llm import LLM, SpeculativeConfig, Unsupported, services
from outrider.llm import local as local_module
from outrider.llm.arguments import EngineArguments
from outrider.llm.engine_choice import OURS, VLLM, beyond_ours, choose_engine, require_vllm_can, vllms_own

AWQ = {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
QUANTISED = {"quantization_config": {"quant_method": "compressed-tensors"}}


def arguments_of(folder: Path, **given: Any) -> EngineArguments:
    return EngineArguments.of({"model": folder, **given})


@pytest.mark.parametrize(
    ("given", "config", "reason"),
    [
        ({}, {}, ""),
        ({"tensor_parallel_size": 1, "quantization": None}, {"quantization_config": None}, ""),
        ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size=2"),
        ({"quantization": "awq"}, {}, "quantization='awq': .*; allowed: none, int8, int4"),
        ({"quantization": "fp8"}, AWQ, "quantization='fp8': .*; allowed: none, int8, int4, awq"),
        ({"quantization": "gguf"}, {}, "quantization='gguf'"),
        ({"quantization": "int8"}, {}, ""),
        ({"quantization": "awq"}, AWQ, ""),
        ({}, {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, ""),
        ({"quantization": "awq_marlin"}, AWQ, ""),
        ({"enable_lora": True, "max_lora_rank": 64}, {}, ""),
        ({"enable_lora": True, "max_lora_rank": 128}, {}, "max_lora_rank=128: our engine takes ranks to 64"),
        ({}, QUANTISED, r"quantised \(compressed-tensors\)"),
        ({}, {"compression_config": {}}, "quantised"),
    ],
)
def test_auto_takes_vllm_where_ours_cannot(
    given: dict[str, Any], config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    arguments = arguments_of(tmp_path, **given)
    why = beyond_ours(arguments, config)
    assert choose_engine(arguments, why, True) == (VLLM if reason else OURS)
    if not reason:
        assert choose_engine(arguments, why, False) == OURS
        return
    with pytest.raises(Unsupported, match=rf"{reason}.*install outrider\[vllm\]"):
        choose_engine(arguments, why, False)
    with pytest.raises(Unsupported, match=rf"engine='outrider'.*{reason}.*outrider\[vllm\]"):
        choose_engine(arguments_of(tmp_path, **given, engine="outrider"), why, True)


def test_an_engine_that_is_named_is_taken(tmp_path: Path) -> None:
    assert choose_engine(arguments_of(tmp_path, engine="vllm"), "", True) == VLLM
    assert choose_engine(arguments_of(tmp_path, engine="outrider"), "", True) == OURS
    with pytest.raises(Unsupported, match=r"engine='vllm'.*install outrider\[vllm\]"):
        choose_engine(arguments_of(tmp_path, engine="vllm"), "", False)
    for name, value in (("engine", "sglang"), ("tensor_parallel_size", 0), ("tensor_parallel_size", True)):
        with pytest.raises(ValueError, match=name):
            arguments_of(tmp_path, **{name: value})


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "has_vllm", lambda: False)


def test_without_vllm_the_error_names_the_extra(tiny_pair: TinyPair, no_vllm: None) -> None:
    with pytest.raises(Unsupported, match=r"tensor_parallel_size=2: .* install outrider\[vllm\]"):
        LLM(tiny_pair.target, tensor_parallel_size=2)
    with pytest.raises(Unsupported, match=r"engine='vllm'; .* install outrider\[vllm\]"):
        LLM(tiny_pair.target, engine="vllm")


def changed(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return to


def test_a_checkpoint_that_ours_refuses_names_the_extra(tiny_pair: TinyPair, tmp_path: Path, no_vllm: None) -> None:
    """With the loader's own reason; a setting's fault is told as ever."""
    with pytest.raises(Unsupported, match=r"quantised, and its quantization_config.*install outrider\[vllm\]"):
        LLM(changed(tiny_pair.target, tmp_path / "quantised", **QUANTISED))
    with pytest.raises(ValueError, match=r"(?s)made_up.*vLLM may run it: install outrider\[vllm\]"):
        LLM(changed(tiny_pair.target, tmp_path / "other", model_type="made_up"))
    with pytest.raises(ValueError, match="dtype") as raised:
        LLM(tiny_pair.target, dtype="float16", device="cpu")
    assert "vLLM" not in str(raised.value)


def test_what_ours_refuses_goes_to_vllm(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """... and that is said."""
    monkeypatch.setattr(local_module, "has_vllm", lambda: True)
    folder = changed(tiny_pair.target, tmp_path / "other", model_type="made_up")

    async def refuse(settings: Any, flush: Any) -> Any:
        assert settings.engine == "vllm" and settings.model == folder
        raise ValueError("as far as this test goes")

    monkeypatch.setattr(services, "engine_of", lambda name: SimpleNamespace(start_engine=refuse))
    with pytest.raises(ValueError, match="as far as this test goes"):
        LLM(folder)
    assert "the target runs on vLLM" in caplog.text and "made_up" in caplog.text
    with pytest.raises(ValueError, match="made_up") as raised:
        LLM(folder, engine="outrider")
    assert "as far as" not in str(raised.value)


def test_a_second_rounding_is_refused_on_either_engine(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM knows no int4: it is not asked."""
    monkeypatch.setattr(local_module, "has_vllm", lambda: True)
    folder = changed(tiny_pair.target, tmp_path / "awq", **AWQ)
    with pytest.raises(ValueError, match=r"quantization: is 'int4', .* quantised already \(awq\)"):
        LLM(folder, quantization="int4")


def head_config(method: str, **given: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, model="head", num_speculative_tokens=3, **given)


@pytest.mark.parametrize(
    ("speculation", "given", "named"),
    [
        (None, {"batch_invariant": True}, "batch_invariant"),
        (head_config("mlp_speculator"), {}, "mlp_speculator.*tensor_parallel_size=1"),
        (head_config("medusa", disable_by_batch_size=4), {}, "disable_by_batch_size"),
        (head_config("draft_model", speculative_token_tree="[(0,), (1,), (0, 0)]"), {}, "speculative_token_tree"),
    ],
)
def test_what_only_ours_does_is_refused_by_name(
    speculation: SpeculativeConfig | None, given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    require_vllm_can(arguments_of(tmp_path), None)
    with pytest.raises(Unsupported, match=named):
        require_vllm_can(arguments_of(tmp_path, **given), speculation)


def test_heads_are_vllms_own() -> None:
    require = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    assert vllms_own(head_config("eagle3")) == require
    own = vllms_own(head_config("eagle3", draft_tensor_parallel_size=1, parallel_drafting=True))
    assert own == require | {"draft_tensor_parallel_size": 1, "parallel_drafting": True}
    assert vllms_own(SpeculativeConfig(method="mtp", num_speculative_tokens=1)) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
    }
