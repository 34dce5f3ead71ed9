"""Checkpoint folders: what is read, and what is refused with which words."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import (
    FAMILIES,
    KERNELS,
    build_decoder,
    cpu_kernels,
    hf_logits,
    save_tiny,
    tiny_config,
    tiny_hf_model,
    tiny_state,
)
from transformers import AutoModelForCausalLM

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel, compute_dtype, find_device, load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.models.transformers import RegistryModel
from outrider.pairs.expansion import expand_llama
from outrider.proposers.heads.target import target_weights

IDS = [5, 17, 3, 44, 96, 0, 12]


def logits_of(loaded: LoadedModel) -> torch.Tensor:
    return ModelRunner(loaded.model, 2).forward([BatchEntry(IDS, 0, [1], len(IDS))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generation = {"eos_token_id": [2, 9], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    return save_tiny(tmp_path_factory.mktemp("tiny"), generation=generation)


@pytest.mark.parametrize(
    ("family", "options"),
    [(family, {"tie_word_embeddings": True} if family == "qwen2" else {}) for family in FAMILIES],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_saved_checkpoints_give_transformers_logits(
    family: str, options: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, **options)
    expected = hf_logits(tiny_hf_model(family, **options), IDS)
    with cpu_kernels(kernels):
        loaded = load_model(tmp_path)
    assert isinstance(loaded.model, NativeDecoder if kernels == "c" else Decoder)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: is 'gelu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act: is 'relu'"),
    ],
)
def test_configurations_that_our_decoder_does_not_compute_run_through_transformers(
    family: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    options = {**options, "max_position_embeddings": 64}
    save_tiny(tmp_path, family, **options)
    loaded = load_model(tmp_path)
    assert isinstance(loaded.model, RegistryModel) and not loaded.model.batch_invariant
    expected = hf_logits(tiny_hf_model(family, **options), IDS)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedModel, match=f"batch-invariant mode .* {named}"):
        load_model(tmp_path, batch_invariant=True)


def test_gemma_3_that_sees_later_tokens_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma3_text", use_bidirectional_attention=True, max_position_embeddings=64)
    with pytest.raises(UnsupportedModel, match=r"\(gemma3_text\) is not served: .*neither causal nor a causal window"):
        load_model(tmp_path)


def test_shards_are_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits_of(load_model(tmp_path)), hf_logits(tiny_hf_model(), IDS), atol=1e-4, rtol=1e-4)
    next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(WrongCheckpoint, match="names files that are not beside it"):
        load_model(tmp_path)


def other_weights_beside(folder: Path, family: str, **options: Any) -> None:
    """Older shards with their index, of another seed, and what else may lie beside a whole file."""
    older = save_tiny(folder / "older", family, seed=5, shard_size="100KB", **options)
    for path in [*older.glob("model-*"), older / "model.safetensors.index.json"]:
        path.rename(folder / path.name)
    shutil.copy(next(folder.glob("model-*")), folder / "model.fp16.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")


@pytest.mark.parametrize("options", [{}, {"hidden_act": "relu"}], ids=["our decoder", "transformers"])
def test_a_whole_file_comes_before_everything_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    save_tiny(tmp_path, **options)
    alone = load_model(tmp_path)
    assert not caplog.messages
    other_weights_beside(tmp_path, "llama", **options)
    loaded = load_model(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(alone)) and loaded.digest == alone.digest
    (line,) = caplog.messages
    assert "weights are read from model.safetensors alone, not from" in line and "consolidated.safetensors" in line
    for shard in tmp_path.glob("model-*"):
        shard.unlink()  # an index whose shards are gone
    assert load_model(tmp_path).digest == alone.digest


@pytest.mark.parametrize("options", [{}, {"hidden_act": "relu"}], ids=["our decoder", "transformers"])
@pytest.mark.parametrize("suffix", [".safetensors", ".safetensors.index.json"])
def test_what_the_configuration_names_comes_first(tmp_path: Path, options: dict[str, Any], suffix: str) -> None:
    of = {".safetensors": "5GB", ".safetensors.index.json": "100KB"}
    named = load_model(save_tiny(tmp_path / "named", seed=5, shard_size=of[suffix], **options))
    save_tiny(tmp_path / "folder", **options)
    for path in (tmp_path / "named").glob("model*"):
        path.rename(tmp_path / "folder" / path.name.replace("model.", "own."))
    config = json.loads((tmp_path / "folder/config.json").read_text()) | {"transformers_weights": f"own{suffix}"}
    (tmp_path / "folder/config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(load_model(tmp_path / "folder")), logits_of(named))
    (tmp_path / "folder" / f"own{suffix}").unlink()
    with pytest.raises(WrongCheckpoint, match=r"transformers_weights: is 'own\S+'; allowed: a file beside it"):
        load_model(tmp_path / "folder")


@pytest.mark.parametrize("options", [{}, {"hidden_act": "relu"}], ids=["our decoder", "transformers"])
def test_a_lone_file_of_another_name_is_a_drafts_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = logits_of(load_model(save_tiny(tmp_path, **options)))
    (tmp_path / "model.safetensors").rename(tmp_path / "model.fp16.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.fp16\.safetensors .* the name model\.safetensors"):
        load_model(tmp_path)
    assert torch.equal(logits_of(load_model(tmp_path, lone_file=True)), expected)


def test_shards_without_their_index_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (save_tiny(tmp_path, shard_size="100KB") / "model.safetensors.index.json").unlink()
    for lone_file in (False, True):
        with pytest.raises(UnsupportedModel, match=r"model-00001-of-.* the index that was saved with"):
            load_model(tmp_path, lone_file=lone_file)


def test_an_adapter_beside_a_model_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where PEFT is installed, transformers applies it."""
    from peft import LoraConfig, get_peft_model

    expected = logits_of(load_model(save_tiny(tmp_path, hidden_act="relu")))
    hf = tiny_hf_model(hidden_act="relu")
    peft = get_peft_model(hf, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    peft.save_pretrained(str(tmp_path))
    assert torch.equal(logits_of(load_model(tmp_path)), expected)
    assert "adapter_config.json, adapter_model.safetensors" in caplog.text


REGISTRY: Any = {"hidden_act": "relu"}  # which our decoder does not compute


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    state = change(load_file(folder / "model.safetensors"))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def transformers_logits(folder: Path) -> torch.Tensor:
    return hf_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), IDS)


OWN_HEAD = torch.randn(97, 64, generator=torch.Generator().manual_seed(9)) * 0.1


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_tied_model_with_another_head_has_that_head(
    family: str, kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path, family, tie_word_embeddings=True)
    with_tensors(folder, lambda state: {**state, "lm_head.weight": OWN_HEAD.clone()})
    with cpu_kernels(kernels):
        loaded = load_model(folder)
    torch.testing.assert_close(logits_of(loaded), transformers_logits(folder), atol=1e-4, rtol=1e-4)
    assert sum("lm_head.weight differs from the embeddings" in line for line in caplog.messages) == 1
    shared = target_weights(folder, loaded.model)
    torch.testing.assert_close(shared.output, OWN_HEAD, rtol=0, atol=0)
    assert not torch.equal(shared.embeddings, shared.output)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("as_bfloat16", [False, True])
def test_a_tied_model_with_the_same_head_is_tied(
    kernels: str, as_bfloat16: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(tmp_path, tie_word_embeddings=True)

    def doubled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embeddings = state["model.embed_tokens.weight"].bfloat16()
        head = embeddings.clone() if as_bfloat16 else embeddings.float()
        return {**state, "model.embed_tokens.weight": embeddings.float(), "lm_head.weight": head}

    with_tensors(folder, doubled)
    with cpu_kernels(kernels):
        loaded = load_model(folder)
    assert isinstance(loaded.model, Decoder | NativeDecoder) and loaded.model.config.tied_embeddings
    torch.testing.assert_close(logits_of(loaded), transformers_logits(folder), atol=1e-4, rtol=1e-4)
    assert not caplog.messages


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_tied_model_may_have_its_head_alone(kernels: str, tmp_path: Path) -> None:
    expected = logits_of(load_model(save_tiny(tmp_path, tie_word_embeddings=True)))
    with_tensors(tmp_path, lambda state: {"lm_head.weight": state.pop("model.embed_tokens.weight"), **state})
    with cpu_kernels(kernels):
        loaded = load_model(tmp_path)
    torch.testing.assert_close(logits_of(loaded), expected, atol=1e-5, rtol=1e-5)
    shared = target_weights(tmp_path, loaded.model)
    assert torch.equal(shared.embeddings, shared.output)
    with_tensors(save_tiny(tmp_path), lambda state: {k: v for k, v in state.items() if "embed" not in k})
    with pytest.raises(WrongCheckpoint, match=r"missing model\.embed_tokens\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("head", ["other", "alone"])
def test_an_expansion_has_the_head_of_a_tied_model(head: str, tmp_path: Path) -> None:
    def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = OWN_HEAD.clone() if head == "other" else state.pop("model.embed_tokens.weight")
        return {**state, "lm_head.weight": own}

    folder = with_tensors(save_tiny(tmp_path, tie_word_embeddings=True), changed)
    sizes: Any = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    expanded = load_model(folder, expand=partial(expand_llama, **sizes))
    torch.testing.assert_close(logits_of(expanded), logits_of(load_model(folder)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", ["another head", "the head alone", "no prefix"])
def test_models_of_transformers_have_their_heads(change: str, tmp_path: Path) -> None:
    def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if change == "no prefix":
            return {name.removeprefix("model."): tensor for name, tensor in state.items()}
        own = OWN_HEAD.clone() if change == "another head" else state.pop("model.embed_tokens.weight")
        return {**state, "lm_head.weight": own}

    folder = with_tensors(save_tiny(tmp_path, tie_word_embeddings=True, **REGISTRY), changed)
    loaded = load_model(folder)
    torch.testing.assert_close(logits_of(loaded), transformers_logits(folder), atol=1e-4, rtol=1e-4)
    assert torch.equal(target_weights(folder, loaded.model).output, OWN_HEAD) == (change == "another head")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_was_saved_without_its_heads_class_loads(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family, tie_word_embeddings=True)
    expected = logits_of(load_model(folder))
    with_tensors(folder, lambda state: {name.removeprefix("model."): tensor for name, tensor in state.items()})
    loaded = load_model(folder)
    assert torch.equal(logits_of(loaded), expected)
    assert torch.equal(target_weights(folder, loaded.model).output, target_weights(folder, loaded.model).embeddings)


def test_facts(folder: Path) -> None:
    loaded = load_model(folder, max_model_len=100)
    assert loaded.eos_token_ids == (2, 9)
    assert loaded.default_sampling == {"temperature": 0.6, "top_p": 0.9}
    assert (loaded.vocab_size, loaded.max_model_len, loaded.model.hidden_size) == (97, 100, 64)
    assert loaded.model.dtype == torch.float32


def test_pickled_weights_are_refused_with_the_way_out(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(UnsupportedModel, match=r"no \.safetensors"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsupportedModel, match="outrider model convert"):
        load_model(tmp_path)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        load_model(tmp_path)


def test_unknown_model_type_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(UnsupportedModel, match="no_such_model"):
        load_model(copy)
    with pytest.raises(UnsupportedModel, match="no_such_model"):
        load_model(copy, batch_invariant=True)


def test_dtype_by_name(folder: Path) -> None:
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(UnsupportedModel, match="float8"):
        load_model(folder, dtype="float8")


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_float16_checkpoint_computes_in_float32_on_a_cpu(folder: Path, kernels: str, tmp_path: Path) -> None:
    """Exactly as the same numbers stored in float32."""
    halves, floats = (shutil.copytree(folder, tmp_path / name) for name in ("halves", "floats"))
    state = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, halves / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in state.items()}, floats / "model.safetensors")
    with cpu_kernels(kernels):
        loaded, same = load_model(halves), load_model(floats)
    assert loaded.model.dtype == torch.float32 and torch.equal(logits_of(loaded), logits_of(same))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_weights_rounded_to_8_bits(family: str, tmp_path: Path) -> None:
    """The C kernels' and PyTorch's are the same numbers: near the checkpoint's, and not these; the embeddings stay."""
    found = {}
    for tied in (False, True):
        folder = save_tiny(tmp_path / str(tied), family, tie_word_embeddings=tied)
        for kernels in KERNELS:
            with cpu_kernels(kernels):
                loaded = load_model(folder, quantization="int8")
            assert loaded.dtype == "int8 in float32" and loaded.model.dtype == torch.float32
            found[kernels] = logits_of(loaded)
        exact = logits_of(load_model(folder))
        torch.testing.assert_close(found["c"], found["pytorch"], atol=1e-5, rtol=0)
        assert 1e-4 < float((found["c"] - exact).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "quantization: is 'int8' in bfloat16 on cpu; allowed: on a CPU, with dtype auto or"),
        ({"model_type": "gpt2"}, "quantization int8 is for llama, .*, not for 'gpt2'"),
        ({"hidden_act": "relu"}, "quantization int8 is for our own decoder, not for llama with hidden_act: is 'relu'"),
    ],
)
def test_what_is_not_rounded_to_8_bits(options: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text()) | options
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(copy, dtype=options.get("dtype", "auto"), quantization="int8")


def test_float16_is_for_gpus(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"dtype: is 'float16'; allowed on a CPU: auto, float32, bfloat16$"):
        load_model(folder, dtype="float16")


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        ({"model_type": "llama", "torch_dtype": "float16"}, "auto", torch.float16),
        ({"model_type": "llama", "dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"model_type": "llama"}, "auto", torch.bfloat16),
        ({"model_type": "llama"}, "float16", torch.float16),
        ({"model_type": "gemma3", "text_config": {"dtype": "float16"}}, "auto", torch.bfloat16),
        ({"model_type": "gemma2"}, "float16", "for 'gemma2': auto, float32, bfloat16$"),
    ],
)
def test_compute_types_on_a_gpu(config: dict[str, Any], name: str, expected: torch.dtype | str) -> None:
    """Gemma's hidden states exceed float16's range, from its second version on."""
    gpu = torch.device("cuda")
    if isinstance(expected, torch.dtype):
        assert compute_dtype(name, gpu, config) == expected
    else:
        with pytest.raises(UnsupportedModel, match=expected):
            compute_dtype(name, gpu, config)


def test_built_in_memory_equals_loaded(folder: Path) -> None:
    built = build_decoder(tiny_config(), tiny_state(tiny_hf_model()))
    assert torch.equal(logits_of(built), logits_of(load_model(folder)))
    assert built.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("count", "name", "message"),
    [
        (0, "foo", "device: is 'foo'; allowed: cpu, cuda or cuda:N"),
        (0, "cuda:x", "device: is 'cuda:x'; allowed: cpu, cuda or cuda:N"),
        (0, "meta", "device: is 'meta'; allowed: cpu, cuda or cuda:N"),
        (0, "cuda", "device: is 'cuda', and there is no CUDA device here; allowed: cpu"),
        (2, "cuda:2", "device: is 'cuda:2'; allowed: cpu, cuda, and cuda:0 to cuda:1"),
    ],
)
def test_devices_that_are_not_there(
    count: int, name: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ValueError) as raised:
        load_model(folder, device=name)
    assert str(raised.value) == message
    assert find_device("cpu").type == "cpu"
    if count:
        assert find_device("cuda:1").index == 1 and find_device("cuda").type == "cuda"


def test_loading_leaves_torchs_compiler_out(tmp_path: Path) -> None:
    """It takes a second, and is for transformers' activations alone; these are there for whom they are asked by."""
    script = (
        "import sys; from outrider.engine.loader import load_model; load_model(sys.argv[1]); "
        "print('torch._dynamo' in sys.modules); from transformers.activations import ACT2FN; print(len(ACT2FN) > 9)"
    )
    command = [sys.executable, "-c", script, str(save_tiny(tmp_path / "tiny"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "True"]
