"""Our decoder against transformers' own logits: every family and option, in every way of cutting a sequence into
steps.

Gemma 3 with a vision tower (4B and larger): its text model is our decoder's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import (
    KERNELS,
    MIXTURES,
    TINY,
    build_decoder,
    cpu_kernels,
    hf_logits,
    logits_of,
    tiny_config,
    tiny_hf_model,
    tiny_state,
)
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from outrider.engine.batch import BatchEntry
from outrider.engine.loader import load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import UnsupportedModel, WrongCheckpoint
from outrider.engine.models.decoder import Decoder
from outrider.engine.models.decoder_config import parse_config
from outrider.engine.models.decoder_cpu import NativeDecoder
from outrider.engine.models.weights import WeightReader, text_model_state

ROPE = {"rope_theta": 10000.0}
LONGROPE = {
    **ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {**ROPE, "rope_type": "dynamic", "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 2, "head_dim": 24}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 4, "head_dim": None}),
    "llama-llama3-rope": ("llama", {"rope_parameters": {**ROPE, **LLAMA3}}),
    "llama-old-rope-layout": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    "llama-linear-rope": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 3.0}}),
    "llama-yarn-rope": (
        "llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "llama-dynamic-rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 90}),  # all that it has
    "mistral-window": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-window-biases": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
}
MODELS |= {
    "gemma": ("gemma", {}),
    "gemma-gelu-of-old-biases-own-head": (
        "gemma",
        {"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-high-softcaps": ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-old-rope-layout": (
        "gemma3_text",
        {
            "rope_theta": 20000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": None,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 4,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3-both-rotary-tables-scaled": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {**ROPE, "rope_type": "linear", "factor": 2.0},
                "full_attention": {**ROPE, **LLAMA3},
            }
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-no-window-tied": ("phi3", {"sliding_window": None, "tie_word_embeddings": True}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3-partly-turned": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-partly-turned-longrope-of-old": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]},
        },
    ),
}
MODELS |= {
    "mixtral": ("mixtral", {}),
    "mixtral-window-all-experts": ("mixtral", {"sliding_window": 20, "num_experts_per_tok": 5}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-dense-layers-normalised-no-biases": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 3, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-dense-layer-not-normalised-biases": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-one-expert-normalised": ("olmoe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
}
LENGTH = 90  # beyond twice every window, and beyond the length from which long-RoPE takes its long factors


class Case:
    """A model of ours, and what transformers says of three sequences."""

    def __init__(self, name: str, kernels: str = "c") -> None:
        family, options = MODELS[name]
        model = tiny_hf_model(family, **options)
        with cpu_kernels(kernels):
            ours = build_decoder(tiny_config(family, **options), tiny_state(model)).model
        self.runner = ModelRunner(ours, num_blocks=40)
        generator = torch.Generator().manual_seed(1)
        self.ids = [torch.randint(0, 97, (LENGTH,), generator=generator).tolist() for _ in range(3)]
        self.expected = [hf_logits(model, ids) for ids in self.ids]
        self.tables = [list(range(start, start + 6)) for start in (30, 3, 17)]

    def entry(self, index: int, start: int, end: int, ids: list[int] | None = None) -> BatchEntry:
        """Rows start to end of a sequence, all of which want logits."""
        tokens = (self.ids[index] if ids is None else ids)[start:end]
        return BatchEntry(tokens, start, self.tables[index], len(tokens))

    def check(self, entries: list[tuple[int, int, int]]) -> None:
        """Runs (sequence, start, end) in one batch and compares every row."""
        logits = self.runner.forward([self.entry(*entry) for entry in entries])
        expected = torch.cat([self.expected[index][start:end] for index, start, end in entries])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module", params=[(name, kernels) for name in MODELS for kernels in KERNELS], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_whole_prefill(case: Case) -> None:
    case.check([(0, 0, LENGTH)])


def test_chunked_prefill_then_one_by_one(case: Case) -> None:
    for start, end in ((0, 7), (7, 40), (40, 80), *((at, at + 1) for at in range(80, LENGTH))):
        case.check([(1, start, end)])


def test_ragged_batch_of_several_sequences(case: Case) -> None:
    case.check([(0, 0, 50), (1, 0, 3), (2, 0, 33)])
    case.check([(0, 50, 51), (1, 3, 40), (2, 33, 38)])
    case.check([(1, 40, 41), (2, 38, 39), (0, 51, 56)])


def test_rejected_window_leaves_no_trace(case: Case) -> None:
    case.check([(2, 0, 70)])
    for start in range(70, 86, 2):
        wrong = case.ids[2][: start + 1] + [(token + 1) % 97 for token in case.ids[2][start + 1 : start + 5]]
        logits = case.runner.forward([case.entry(2, start, start + 5, wrong)])
        torch.testing.assert_close(logits[0], case.expected[2][start], atol=1e-4, rtol=1e-4)
        case.check([(2, start + 1, start + 2)])


def test_only_the_rows_asked_for_have_logits() -> None:
    case = Case("llama")
    whole = case.runner.forward([case.entry(0, 0, 20), case.entry(1, 0, 9)])
    entries = [BatchEntry(case.ids[0][:20], 0, case.tables[0], 0), BatchEntry(case.ids[1][:9], 0, case.tables[1], 2)]
    logits: Tensor = case.runner.forward(entries)
    assert logits.shape == (2, 97)
    torch.testing.assert_close(logits, whole[-2:], atol=1e-5, rtol=1e-5)


def test_longrope_factors_follow_max_model_len_alone() -> None:
    options: Any = {"rope_parameters": LONGROPE}
    model = tiny_hf_model(**options)
    ids = list(range(40))  # short: transformers takes the short factors
    short = build_decoder(tiny_config(**options), tiny_state(model), max_model_len=64).model
    long = build_decoder(tiny_config(**options), tiny_state(model), max_model_len=65).model
    entry = BatchEntry(ids, 0, [0, 1, 2], 40)
    expected = hf_logits(model, ids)
    torch.testing.assert_close(ModelRunner(short, 4).forward([entry]), expected, atol=1e-4, rtol=1e-4)
    assert (ModelRunner(long, 4).forward([entry]) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", *MIXTURES])
def test_bfloat16_is_close(family: str) -> None:
    model = tiny_hf_model(family)
    runner = ModelRunner(build_decoder(tiny_config(family), tiny_state(model), dtype="bfloat16").model, 8)
    ids = list(range(30))
    logits = runner.forward([BatchEntry(ids, 0, [0, 1], 30)])
    assert logits.dtype == torch.float32
    close = torch.nn.functional.cosine_similarity(logits, hf_logits(model, ids)) > 0.995
    assert close.sum() >= len(ids) - (family in MIXTURES)  # a rounded score may choose another expert


def test_gemma_norms_multiply_in_float32() -> None:
    state = tiny_state(tiny_hf_model("gemma2"))
    reader = WeightReader(parse_config(tiny_config("gemma2")), state, torch.bfloat16, torch.device("cpu"))
    weight = state["model.norm.weight"].bfloat16().float()
    assert torch.equal(reader.norm("model.norm.weight"), 1 + weight)


def test_dynamic_rope_is_refused_beyond_the_original_length() -> None:
    config = tiny_config(rope_parameters=DYNAMIC)
    with pytest.raises(UnsupportedModel, match="max_model_len 513 exceeds the model's 512 positions"):
        build_decoder(config, tiny_state(tiny_hf_model()), max_model_len=513)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        (tiny_config(hidden_act="gelu"), "gelu"),
        (
            tiny_config("gemma2", hidden_activation="gelu"),
            "gemma2 with hidden_activation: is 'gelu'; allowed: gelu_pytorch_tanh, silu",
        ),
        (
            tiny_config("gemma", use_bidirectional_attention=True),
            "use_bidirectional_attention: is True; allowed: False",
        ),
        (
            tiny_config("qwen3", layer_types=["chunked_attention"] * 2),
            "layer_types: has chunked_attention; allowed: full",
        ),
        (tiny_config("phi3", partial_rotary_factor=0.7), "partial_rotary_factor: is 0.7, which turns 11 of 16"),
        (tiny_config("qwen3", partial_rotary_factor=0.5), "partial_rotary_factor: is 0.5; allowed: 1.0"),
        (tiny_config("mixtral", num_experts_per_tok=6), "mixtral with num_experts_per_tok: is 6; allowed: 1 to 5"),
        (tiny_config("qwen3_moe", num_experts=0), "qwen3_moe with num_experts: is 0; allowed: 1 to 4096"),
        (
            tiny_config("mixtral", num_local_experts=4096, num_hidden_layers=17),
            "4096 experts in each of 17 layers; allow",
        ),
        (tiny_config("olmoe", clip_qkv=3.0), "olmoe with clip_qkv: is 3.0; allowed: null"),
        (tiny_config("qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step: is 0; allowed: 1 to"),
        (tiny_config("qwen2_moe", moe_intermediate_size=-4), "moe_intermediate_size: is -4; allowed: 1 to"),
        (tiny_config(num_attention_heads=3), "multiple of the number of attention heads"),
    ],
)
def test_unsupported_configurations_are_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        build_decoder(config, {})


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("mixtral", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
        ("mixtral", {"sliding_window": 9, "use_sliding_window": False, "mlp_only_layers": [0]}),
        ("mixtral", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 2}),
        ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_what_a_familys_code_does_not_look_at_changes_nothing(family: str, given: dict[str, Any]) -> None:
    """transformers' objects keep it all the same."""
    ids, model = list(range(3, 43)), tiny_hf_model(family, **given)
    logits = logits_of(build_decoder(tiny_config(family, **given), tiny_state(model)), ids)
    torch.testing.assert_close(logits, hf_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_wrong_tensors_are_named() -> None:
    state = tiny_state(tiny_hf_model())
    state["model.layers.7.extra"] = state.pop("model.norm.weight")
    state["lm_head.weight"] = torch.zeros(3, 64)
    with pytest.raises(WrongCheckpoint) as error:
        build_decoder(tiny_config(), state)
    for part in ("missing model.norm.weight", "unexpected model.layers.7.extra", r"lm_head.weight has shape (3, 64)"):
        assert part in str(error.value)


def test_max_model_len_is_bounded_by_the_positions() -> None:
    with pytest.raises(UnsupportedModel, match="513"):
        build_decoder(tiny_config(), tiny_state(tiny_hf_model()), max_model_len=513)


TEXT = {
    **TINY,
    "num_hidden_layers": 7,  # of which the sixth sees all
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},  # of the layers that see all
}
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WHOLE = {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4, "eos_token_id": [1, 106]}
PREFIXES = {  # of the text model's tensors, and of the others
    "new": ("model.language_model.", "lm_head.", "model."),
    "old": ("language_model.model.", "language_model.lm_head.", ""),
}
GEMMA3_LENGTH, NEW = 30, 12  # past three windows


def gemma3(**options: Any) -> Gemma3ForConditionalGeneration:
    """A random one; its text model is as far from the identity as the other families'."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Gemma3ForConditionalGeneration(Gemma3Config(**WHOLE, **options)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.uniform_(0.5, 1.5) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.12)
    model.set_attn_implementation("eager")
    return model


def save(model: Gemma3ForConditionalGeneration, folder: Path, prefixes: str) -> Path:
    """The checkpoint with either version's names, and a config.json that states little, as Google's do."""
    model.save_pretrained(folder)
    text, head, rest = PREFIXES[prefixes]
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if bare.startswith(("vision_tower.", "multi_modal_projector.")):
            state[rest + bare] = tensor
        else:
            state[head + bare.removeprefix("lm_head.") if bare.startswith("lm_head.") else text + bare] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tied = {"tie_word_embeddings": False} if "lm_head.weight" in " ".join(state) else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", **WHOLE, **tied}))
    return folder


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("prefixes", "tied"), [("new", True), ("old", True), ("old", False)])
def test_the_text_model_gives_transformers_logits_and_tokens(
    prefixes: str, tied: bool, kernels: str, tmp_path: Path
) -> None:
    model = gemma3(tie_word_embeddings=tied)
    ids = torch.randint(3, 97, (1, GEMMA3_LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0]
        expected = model(input_ids=tokens[None]).logits[0]  # [tokens, vocab]
    save(model, tmp_path, prefixes)
    with cpu_kernels(kernels):
        loaded = load_model(tmp_path)
    assert isinstance(loaded.model, NativeDecoder if kernels == "c" else Decoder)
    assert loaded.model_type == "gemma3" and loaded.eos_token_ids == (1, 106)
    logits = logits_of(loaded, tokens.tolist())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits[GEMMA3_LENGTH - 1 : -1].argmax(-1), tokens[GEMMA3_LENGTH:])


def test_vision_weights_are_not_read() -> None:
    kept = {"model.norm.weight": torch.ones(1)}
    towers = ("vision_tower.x", "multi_modal_projector.x", "model.vision_tower.x", "model.multi_modal_projector.x")
    state = {"language_model.model.norm.weight": kept["model.norm.weight"], **dict.fromkeys(towers, torch.ones(1))}
    assert text_model_state(state) == kept
    plain = tiny_hf_model("gemma3_text").state_dict()
    assert text_model_state(plain) is plain


def test_a_model_that_was_saved_without_its_heads_class_has_its_own_names() -> None:
    plain = tiny_hf_model("gemma3_text").model.state_dict()  # no head
    named = {f"model.{name}" for name in plain}
    assert text_model_state(plain).keys() == named
    with_vision = {f"language_model.{name}": tensor for name, tensor in plain.items()}
    assert text_model_state({**with_vision, "vision_tower.x": torch.ones(1)}).keys() == named
    with pytest.raises(WrongCheckpoint, match="twice"):
        text_model_state({**plain, "model.norm.weight": torch.ones(1)})
