"""A GGUF file's model is that of the checkpoint from which it was made: every family, every trap of the format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_models import ARCHITECTURES, as_gguf, gates_beside_ups, one_by_one
from support.models import KERNELS, MIXTURES, cpu_kernels, hf_logits, logits_of
from transformers import AutoModelForCausalLM

from outrider.engine.loader import load_model
from outrider.gguf.config import config_of
from outrider.gguf.header import read_gguf
from outrider.rpc.hub import locate

IDS = [(7 * index + 5) % 97 for index in range(44)]
TRANSFORMERS_READS = ("llama", "qwen2")  # of the others not all that these files say: sizes of heads, caps


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_are_the_checkpoints(family: str, kernels: str, tmp_path: Path) -> None:
    file, model = as_gguf(tmp_path / "model.gguf", family)
    with cpu_kernels(kernels):
        loaded = load_model(locate(file))
    torch.testing.assert_close(logits_of(loaded, IDS), hf_logits(model, IDS), atol=1e-4, rtol=1e-4)
    assert loaded.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
@pytest.mark.parametrize("family", TRANSFORMERS_READS)
def test_quantised_logits_are_transformers(family: str, kind: str, tmp_path: Path) -> None:
    file, _ = as_gguf(tmp_path / "model.gguf", family, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    torch.testing.assert_close(
        logits_of(load_model(locate(file), activations="float32"), IDS), hf_logits(theirs, IDS), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
@pytest.mark.parametrize("family", MIXTURES)
def test_quantised_experts_stay_as_they_are_stored(family: str, kind: str, tmp_path: Path) -> None:
    """Each is a part of a tensor of all of a layer; PyTorch computes with their numbers."""
    widths = {"intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    own: dict[str, Any] = {
        name: width for name, width in widths.items() if family.startswith("qwen") or name == "intermediate_size"
    }
    file, model = as_gguf(tmp_path / "model.gguf", family, kind, **own)
    found = []
    for kernels in KERNELS:
        with cpu_kernels(kernels):
            found.append(logits_of(load_model(locate(file), activations="float32"), IDS))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)
    least = 0.6 if kind == "Q4_0" else 0.95  # random scores lie close: four bits choose other experts now and then
    assert torch.nn.functional.cosine_similarity(found[0], hf_logits(model, IDS)).median() > least


def test_experts_are_as_many_as_is_said(tmp_path: Path) -> None:
    file, _ = as_gguf(tmp_path / "model.gguf", "olmoe", metadata={"olmoe.expert_count": 6})
    with pytest.raises(ValueError, match=r"ffn_\w+_exps\.weight: is of 7 experts; allowed: expert_count, 6"):
        load_model(locate(file))


@pytest.mark.parametrize("arranged", [gates_beside_ups, one_by_one])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", [family for family in MIXTURES if family != "gpt_oss"])
def test_experts_may_lie_otherwise(family: str, kind: str, arranged: Any, tmp_path: Path) -> None:
    """Gates and ups in one tensor, or every expert in its own: the numbers are the same."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    own: dict[str, Any] = {
        name: size for name, size in sizes.items() if family.startswith("qwen") or name != "moe_intermediate_size"
    }
    found = []
    for name, how in (("usual", dict), ("other", arranged)):
        file, _ = as_gguf(tmp_path / f"{name}.gguf", family, kind, arranged=how, **own)
        found.append(logits_of(load_model(locate(file), activations="float32"), IDS))
    assert torch.equal(*found)


def test_where_yarns_frequencies_change_is_read(tmp_path: Path) -> None:
    scaling = {
        "type": "yarn",
        "factor": 8.0,
        "original_context_length": 64,
        "yarn_beta_fast": 20.0,
        "yarn_beta_slow": 2.0,
    }
    file, _ = as_gguf(
        tmp_path / "model.gguf",
        "gpt_oss",
        metadata={f"gpt-oss.rope.scaling.{key}": one for key, one in scaling.items()},
    )
    found = config_of(read_gguf(file))["rope_parameters"]
    assert (found["rope_type"], found["beta_fast"], found["beta_slow"]) == ("yarn", 20.0, 2.0)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("expert_weights_norm", True, "False"), ("expert_weights_scale", 2.5, "0.0, 1.0"),
        ("expert_gating_func", 2, "0, 1"), ("expert_group_count", 4, "0, 1"),
    ],
)  # fmt: skip
def test_routing_that_is_not_the_architectures_is_refused(key: str, value: Any, allowed: str, tmp_path: Path) -> None:
    file, _ = as_gguf(tmp_path / "model.gguf", "olmoe", metadata={f"olmoe.{key}": value})
    with pytest.raises(ValueError, match=rf"olmoe\.{key}: is {value}; allowed: {allowed}"):
        load_model(locate(file))


def test_without_a_width_of_experts_that_of_a_feed_forward_is_taken(tmp_path: Path) -> None:
    file, _ = as_gguf(
        tmp_path / "model.gguf", "olmoe", arranged=gates_beside_ups, metadata={"olmoe.feed_forward_length": 24}
    )
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight has shape"):
        load_model(locate(file))


def test_factors_of_frequencies_are_llama_3s(tmp_path: Path) -> None:
    """`rope_freqs.weight` is what llama.cpp's converter makes of rope_type "llama3"."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    file, model = as_gguf(tmp_path / "model.gguf", "llama", rope_parameters=scaling)
    plain = logits_of(load_model(locate(file)), IDS)
    factors = []
    for index in range(0, 16, 2):
        length = 2 * math.pi * 10_000.0 ** (index / 16)
        smooth = (64 / length - 1) / (4 - 1)
        factors.append(1.0 if length < 16 else 8.0 if length > 64 else 1 / ((1 - smooth) / 8 + smooth))
    table = np.array(factors, dtype=np.float32)
    file, model = as_gguf(
        tmp_path / "scaled.gguf", "llama", rope_parameters=scaling,
        tables={"rope_freqs.weight": (table.shape, int(gguf.GGMLQuantizationType.F32), table.tobytes())},
    )  # fmt: skip
    logits = logits_of(load_model(locate(file)), IDS)
    torch.testing.assert_close(logits, hf_logits(model, IDS), atol=1e-4, rtol=1e-4)
    assert (plain - logits).abs().max() > 1e-2


def test_an_own_head_is_not_the_embeddings(tmp_path: Path) -> None:
    for tied in (True, False):
        file, model = as_gguf(tmp_path / f"{tied}.gguf", "qwen2", tie_word_embeddings=tied)
        loaded = load_model(locate(file))
        torch.testing.assert_close(logits_of(loaded, IDS), hf_logits(model, IDS), atol=1e-4, rtol=1e-4)
