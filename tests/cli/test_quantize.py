"""`outrider model convert --quantize`: what it writes is read as it was rounded, here and by transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.gateways import save_toy_tokenizer
from support.models import build_decoder, hf_logits, logits_of, save_tiny
from transformers import AutoModelForCausalLM

from outrider.cli import quantize as quantize_module
from outrider.cli.convert import main
from outrider.engine import checkpoint
from outrider.engine.loader import load_model

IDS = [(7 * index + 5) % 400 for index in range(40)]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_toy_tokenizer(save_tiny(tmp_path / "source", vocab_size=400, intermediate_size=128))


@pytest.mark.parametrize(("rounding", "group"), [("int8", None), ("int8", 32), ("int4", None), ("int4", 16)])
def test_it_is_read_as_it_was_rounded(
    rounding: str, group: int | None, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    to = tmp_path / "rounded"
    wanted = ["--quantize", rounding, "--text", str(tmp_path / "text.txt")]
    wanted += [] if group is None else ["--group", str(group)]
    assert main([str(source), str(to), *wanted]) == 0
    said = capsys.readouterr().out
    assert "layer 0: moved by " in said and "layer 1: moved by " in said and "loss: " in said
    rounded, plain = load_model(to, activations="float32"), load_model(source)
    assert rounded.digest != plain.digest and rounded.default_sampling == plain.default_sampling
    logits = logits_of(rounded, IDS)
    theirs = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
    torch.testing.assert_close(logits, hf_logits(theirs, IDS), atol=1e-4, rtol=1e-4)
    moved = (logits - logits_of(plain, IDS)).abs().mean()
    assert 0 < moved < (0.05 if rounding == "int8" else 0.6)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_experts_are_rounded_and_routers_are_not(family: str, tmp_path: Path) -> None:
    source = save_toy_tokenizer(save_tiny(tmp_path / "source", family, vocab_size=400, moe_intermediate_size=64))
    to = tmp_path / "rounded"
    assert main([str(source), str(to), "--quantize", "int8"]) == 0
    names = load_file(to / "model.safetensors").keys()
    experts = {
        name for name in load_file(source / "model.safetensors") if ".experts." in name or "shared_expert." in name
    }
    assert {name.replace(".weight", ".weight_packed") for name in experts} <= names
    routers = [name for name in names if name.endswith((".mlp.gate.weight", "shared_expert_gate.weight"))]
    assert len(routers) == (2 if family == "qwen3_moe" else 4)
    said = json.loads((to / "config.json").read_text())["quantization_config"]
    assert all(any(re.match(one.removeprefix("re:"), name[:-7]) for one in said["ignore"]) for name in routers)
    config, state = checkpoint.read_config(to), checkpoint.read_weights(to, checkpoint.weight_files(to))
    decoded = build_decoder(
        {n: v for n, v in config.items() if n != "quantization_config"}, {n: state[n] for n in state}
    )
    rounded = load_model(to, activations="float32")
    torch.testing.assert_close(logits_of(rounded, IDS), logits_of(decoded, IDS), atol=1e-4, rtol=1e-4)
    moved = (logits_of(rounded, IDS) - logits_of(load_model(source), IDS)).abs().mean()
    assert 0 < moved < 0.05


def test_files_are_written_as_they_fill(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([str(source), str(tmp_path / "one"), "--quantize", "int8"]) == 0
    monkeypatch.setattr(quantize_module, "MOST_BYTES", 20_000)
    assert main([str(source), str(tmp_path / "many"), "--quantize", "int8"]) == 0
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert load_model(tmp_path / "many").digest == load_model(tmp_path / "one").digest


def test_what_is_rounded_is_rounded_again(source: Path, tmp_path: Path) -> None:
    assert main([str(source), str(tmp_path / "eight"), "--quantize", "int8"]) == 0
    assert main([str(tmp_path / "eight"), str(tmp_path / "four"), "--quantize", "int4"]) == 0
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    load_model(tmp_path / "four")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--quantize", "int4", "--group", "48"],
            "group: is 48, and a matrix has rows of 128; allowed: a divisor",
        ),
        (["--group", "32"], "group is for --quantize int8 or int4"),
        (["--quantize", "int3"], "quantize"),
    ],
)
def test_what_cannot_be_leaves_nothing(
    arguments: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([str(source), str(tmp_path / "none"), *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status != 0 and message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_experts_of_one_tensor_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_toy_tokenizer(save_tiny(tmp_path / "source", "gpt_oss", vocab_size=400))
    assert main([str(source), str(tmp_path / "none"), "--quantize", "int8"]) != 0
    assert "source: gpt_oss keeps a layer's experts in one tensor" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
