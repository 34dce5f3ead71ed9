"""SpeculativeConfig and the keywords of LLM: what is inferred, what acts, what is refused and why.

Arguments of another kind: one clear line, before anything is loaded or generated."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pairs import TinyPair

from outrider.llm import LLM, SamplingParams, Unsupported
from outrider.llm.arguments import FIXED, EngineArguments, take_speculation
from outrider.llm.backends import speculation_options
from outrider.llm.config import MISSING, REFUSED, SpeculativeConfig
from outrider.llm.inputs import conversations_of, parse_prompts
from outrider.llm.sampling_params import params_per_prompt
from outrider.llm.validation import fixed_fields
from outrider.pairs import pair_path
from outrider.rpc.words.request import DRAFT_OPTIONS
from outrider.rpc.words.sampling_params import LogprobsMode

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
DRAFT: dict[str, Any] = {"method": "draft_model", "model": "x"}
RIGHT: dict[str, Any] = {"rejection_sample_method": "fly"}  # of a field that takes some texts alone


def config(**fields: Any) -> SpeculativeConfig:
    made = SpeculativeConfig.of({**NGRAM, **fields})
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (5, 5)), ({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2)),
     ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4))],
)  # fmt: skip
def test_lookup_bounds_copy_one_another(given: dict[str, int], expected: tuple[int, int]) -> None:
    made = config(**given)
    assert (made.prompt_lookup_min, made.prompt_lookup_max) == expected


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min=5 must be <="),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 129}, "128"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is needed"),
        ({"disable_by_batch_size": 1}, "disable_by_batch_size"),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
        ({"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth"),
        ({"suffix_decoding_max_cached_requests": -1}, "suffix_decoding_max_cached_requests"),
        ({"suffix_decoding_max_spec_factor": -1}, "suffix_decoding_max_spec_factor"),
        ({"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob"),
        ({"draft_sample_method": "best"}, "draft_sample_method"),
        ({"method": "guess"}, "unknown speculative method 'guess'"),
        ({"method": "draft_model"}, "needs 'model'"),
        ({"method": "eagle"}, "needs 'model'"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"disable_by_batch_size": 2.5}, "disable_by_batch_size"),
        ({"rejection_sample_method": "typical"}, "rejection_sample_method"),
        ({"use_heterogeneous_vocab": True}, "for draft models"),
        ({"quantization": "int8"}, "quantization='int8' is for draft models"),
        *(
            ({name: high + 0.5}, rf"{name} must be a number in \[{low}, {high}\]")
            for name, (low, high) in DRAFT_OPTIONS.items()
        ),
        ({"parallel_drafting": True}, "parallel_drafting is for draft models, not for method 'ngram'"),
        ({"method": "medusa", "model": "x", "parallel_drafting": True}, "for draft models, not for method 'medusa'"),
        ({"method": "eagle3", "model": "x", "quantization": "int8"}, "quantization='int8' is for draft models"),
        (
            {"method": "eagle3", "model": "x", "draft_confidence": 0.3},
            "draft_confidence=0.3 is for draft models, and for",
        ),
        ({"method": "eagle3", "model": "x", "use_heterogeneous_vocab": True}, "for draft models"),
        ({"speculative_token_tree": "(0,"}, "list of tuples"),
        ({"speculative_token_tree": "[0, 1]"}, "list of tuples"),
        (DRAFT | {"speculative_token_tree": "[(0, 0)]"}, r"has \(0, 0\) without \(0,\)"),
        ({"speculative_token_tree": "[(0,), (1,)]", "rejection_sample_method": "block"}, "is for chains"),
        ({"num_speculative_tokens_per_batch_size": [(2, 4, 1)]}, "must start at a batch size of 1"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 5), (4, 8, 1)]}, "overlaps"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 6)]}, "0 to num_speculative_tokens"),
    ],
)
def test_values_that_cannot_be(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config(**given)


def test_trees() -> None:
    tree = "[(0,), (1,), (0, 0)]"
    eagle = SpeculativeConfig(method="eagle", model="x", speculative_token_tree=tree)
    assert eagle.num_speculative_tokens == 3 and eagle.tree is not None
    eagle.require_supported()
    chain = SpeculativeConfig(method="draft_model", model="x", speculative_token_tree="[(0,), (0, 0)]")
    assert chain.num_speculative_tokens == 2 and chain.tree is None
    chain.require_supported()
    SpeculativeConfig(method="draft_model", model="x", speculative_token_tree=tree).require_supported()
    with pytest.raises(Unsupported, match="is a tree, and method pard drafts chains"):
        SpeculativeConfig(method="pard", model="x", speculative_token_tree=tree).require_supported()


def test_unknown_keys_say_what_was_meant() -> None:
    with pytest.raises(TypeError, match="did you mean 'num_speculative_tokens'"):
        config(num_spec_tokens=3)
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        EngineArguments.of({"model": ".", "max_model_length": 3})
    with pytest.raises(ValueError, match="'method' or 'model'"):
        SpeculativeConfig(num_speculative_tokens=3)


def test_the_method_follows_from_the_model(tmp_path: Path) -> None:
    def method(model: Any) -> str | None:
        return SpeculativeConfig(model=model, num_speculative_tokens=3).method

    assert method("[ngram]") == method("ngram") == "ngram"
    assert method(tmp_path) == "draft_model"
    assert method("org/EAGLE-Model-8B") == "eagle" and method("org/EAGLE3-Model") == "eagle3"
    assert method("org/Model-P-EAGLE") == method("org/Model-speculator.peagle") == "eagle3"
    assert (
        method("package.module.Proposer") == "package.module.Proposer" and method("org/Model-3.1-8B") == "draft_model"
    )
    for kind, expected in (("medusa", "medusa"), ("mlp_speculator", "mlp_speculator"), ("deepseek_mtp", "mtp")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert method(tmp_path) == expected
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]})
    )
    assert method(tmp_path) == "eagle3"
    for said, expected in (
        ({"speculators_model_type": "dflash2", "architectures": ["Draft"]}, "dflash"),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"]}, "dspark"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert method(tmp_path) == expected
    for read in (SpeculativeConfig.supported, speculation_options):
        with pytest.warns(DeprecationWarning, match="qwen3_next_mtp"):
            options = read({"method": "qwen3_next_mtp"})
        assert options is not None and options.method == "mtp"


def test_heads_say_how_many_tokens_they_predict(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlp_speculator", "n_predict": 3}))

    def k(given: int | None) -> int | None:
        return SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=given).num_speculative_tokens

    assert (k(None), k(2), k(6)) == (3, 2, 6)
    with pytest.raises(ValueError, match="divisible by the draft's n_predict=3"):
        k(4)
    assert SpeculativeConfig(method="suffix").num_speculative_tokens == 24
    with pytest.raises(ValueError, match="num_speculative_tokens is needed"):
        SpeculativeConfig(method="eagle", model="x")
    block = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 8}
    for said, tokens in (({}, 7), ({"sample_from_anchor": True}, 8), ({"architectures": ["Qwen3DSparkModel"]}, 8)):
        (tmp_path / "config.json").write_text(json.dumps(block | said))
        assert (k(None), k(2)) == (tokens, 2)


def speculators(proposal_methods: Any, kind: str = "eagle3") -> dict[str, Any]:
    return {"speculators_model_type": kind, "speculators_config": {"proposal_methods": proposal_methods}}


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle"])
def test_a_folder_of_speculators_says_how_many_tokens_to_draft(kind: str, tmp_path: Path) -> None:
    said = speculators([{"proposal_type": "greedy", "speculative_tokens": 5}, {"speculative_tokens": 3}], kind)
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert SpeculativeConfig(model=str(tmp_path)).num_speculative_tokens == 5
    (tmp_path / "config.json").write_text(json.dumps(speculators([{"speculative_tokens": 129}], kind)))
    with pytest.raises(ValueError, match="num_speculative_tokens must be 1 to 128, got 129"):
        SpeculativeConfig(model=str(tmp_path))
    for given in (2, 7):  # it is no limit, and more need not be a multiple
        assert SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=given).num_speculative_tokens == given


@pytest.mark.parametrize(
    "said", [None, {}, "x", [], ["x"], [{}], [{"speculative_tokens": 0}], [{"speculative_tokens": True}]]
)
def test_a_folder_of_speculators_that_does_not_say_it(said: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(speculators(said)))
    with pytest.raises(ValueError, match="num_speculative_tokens is needed"):
        SpeculativeConfig(model=str(tmp_path))


def test_a_head_is_located_beside_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id says nothing before its folder is there; without `model` mtp is of the target's own checkpoint."""
    from outrider.llm import config as module

    monkeypatch.setattr(module, "locate", lambda model, **_: tmp_path if model[:4] == "org/" else Path(model))

    def located(said: dict[str, Any], **given: Any) -> tuple[Any, ...]:
        (tmp_path / "config.json").write_text(json.dumps(said))
        made = SpeculativeConfig(**given).located(tmp_path)
        return made.method, made.num_speculative_tokens, made.model

    assert located({"model_type": "mlp_speculator", "n_predict": 3}, model="org/name", num_speculative_tokens=2) == (
        "mlp_speculator", 2, tmp_path,
    )  # fmt: skip
    mtp = {"model_type": "mimo", "num_nextn_predict_layers": 2}
    assert located(mtp, method="mtp") == ("mtp", 2, tmp_path)
    assert located(mtp, method="mtp", num_speculative_tokens=4) == ("mtp", 4, tmp_path)
    assert located(mtp, method="draft_model", model="org/name", num_speculative_tokens=4)[0] == "draft_model"
    assert located(mtp, model="org/name", num_speculative_tokens=4)[0] == "mtp"
    assert located({}, model="org/name-accelerator-eagle3", num_speculative_tokens=1)[0] == "eagle3"
    with pytest.raises(ValueError, match="num_speculative_tokens=3 must be divisible by the draft's n_predict=2"):
        located(mtp, method="mtp", num_speculative_tokens=3)
    with pytest.raises(ValueError, match="num_speculative_tokens is needed"):
        located({}, method="mtp")
    with pytest.raises(ValueError, match="there is no folder /no/such"):
        SpeculativeConfig(method="medusa", model="/no/such", num_speculative_tokens=3).located(tmp_path)
    proposed = speculators([{"speculative_tokens": 7}], "peagle")
    for name in ("org/Model-speculator.eagle3", "org/Model-speculator.peagle"):
        assert located(proposed, model=name) == ("eagle3", 7, tmp_path)
        with pytest.raises(ValueError, match="num_speculative_tokens is needed"):
            located({}, model=name)
    for said, is_parallel in ((proposed, True), (speculators([]), False)):
        (tmp_path / "config.json").write_text(json.dumps(said))
        config = SpeculativeConfig(model=tmp_path, num_speculative_tokens=4).located(tmp_path)
        assert config.parallel_drafting is is_parallel  # vLLM has to be told
    lookup = SpeculativeConfig(**NGRAM)
    assert lookup.located(tmp_path) is lookup


def test_the_embedded_pairs_name_is_what_it_has_for_the_method() -> None:
    pair = pair_path()

    def model(**given: Any) -> Any:
        return SpeculativeConfig(model="python", num_speculative_tokens=4, **given).located(pair.target).model

    assert model() == model(method="draft_model") == model(method="suffix,draft_model") == pair.draft
    assert model(method="pard") == model(parallel_drafting=True) == pair.pard
    assert {name: model(method=name) for name in pair.heads} == pair.heads
    named = SpeculativeConfig(model="python/eagle3", num_speculative_tokens=4)
    assert (named.method, named.model) == ("eagle3", pair.heads["eagle3"])


@pytest.mark.parametrize("method", MISSING)
def test_methods_to_come_are_refused_by_name(method: str, tiny_pair: TinyPair) -> None:
    with pytest.raises(Unsupported, match=f"{method}.*allowed: draft_model.*; ngram"):
        LLM(tiny_pair.target, speculative_config={"method": method, "model": "x", "num_speculative_tokens": 2})
    with pytest.raises(Unsupported, match=method):  # whatever else is wrong
        LLM(tiny_pair.target, speculative_config={"method": method})


# Every speculative_config of vLLM's pages on speculative decoding, and what becomes of it.
PAGES: list[tuple[dict[str, Any], str]] = [
    ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, ""),
    ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "disable_by_batch_size": 16}, ""),
    ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "disable_by_batch_size": 8}, ""),
    (
        {"method": "eagle", "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3},
        "",
    ),
    (
        {
            "method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-70B", "num_speculative_tokens": 3,
            "draft_tensor_parallel_size": 1,
        },
        "",
    ),
    (
        {"model": "ibm-ai-platform/llama3-70b-accelerator", "draft_tensor_parallel_size": 1},
        "mlp_speculator",
    ),
    (
        {
            "method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_spec_factor": 1.0,
            "suffix_decoding_min_token_prob": 0.1, "suffix_decoding_max_cached_requests": 1000,
        },
        "",
    ),
]  # fmt: skip


@pytest.mark.parametrize("given, inferred", PAGES)
def test_what_vllms_pages_show_is_served(given: dict[str, Any], inferred: str) -> None:
    served = SpeculativeConfig.supported(given)
    assert served is not None and served.method == given.get("method", inferred)


def test_a_model_is_refused_by_what_it_is(tmp_path: Path) -> None:
    for name in ("dflash", "dspark"):
        assert SpeculativeConfig(model=f"org/{name}_model", num_speculative_tokens=3).method == name
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlp_speculator"}))
    assert SpeculativeConfig(model=str(tmp_path)).method == "mlp_speculator"
    named_so = tmp_path / "my-accelerator"
    named_so.mkdir()
    (named_so / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert SpeculativeConfig(model=named_so, num_speculative_tokens=3).method == "draft_model"


@pytest.mark.parametrize("read", [SpeculativeConfig.supported, speculation_options])
def test_the_method_may_be_a_list(read: Any) -> None:
    assert read({"method": ["ngram"], "num_speculative_tokens": 5}).method == "ngram"
    for several in (["prediction", "suffix", "[ngram]"], "prediction, suffix, ngram"):
        assert read({"method": several, "num_speculative_tokens": 5}).method == "prediction,suffix,ngram"
    for method, problem in (
        (["ngram", "[ngram]"], r"\['method'\] names 'ngram' twice; allowed: each method once"),
        (
            ["ngram", 3],
            r"\['method'\] is \['ngram', 3\]; allowed: the name of a method, or a list of names, of draft_model",
        ),
        ([], r"\['method'\] names none; allowed: at least one method"),
        (7, r"\['method'\] is 7; allowed: the name of a method, or a list of names, of draft_model, ngram"),
    ):
        with pytest.raises(ValueError, match=problem):
            read({"method": method, "num_speculative_tokens": 5})


def test_every_method_of_a_list_is_checked(tiny_pair: TinyPair) -> None:
    given = {"num_speculative_tokens": 5}
    with pytest.raises(Unsupported, match="speculative method 'ngram_gpu'"):
        SpeculativeConfig.supported(given | {"method": ["suffix", "ngram_gpu"]})
    with pytest.raises(ValueError, match="names 'eagle', which drafts beside the target; allowed: that alone"):
        SpeculativeConfig.supported(given | {"method": ["suffix", "eagle"]})
    with pytest.raises(ValueError, match="unknown speculative method 'sufix'"):
        SpeculativeConfig.supported(given | {"method": ["ngram", "sufix"]})
    with pytest.raises(ValueError, match="method 'draft_model' needs 'model'"):
        SpeculativeConfig.supported(given | {"method": ["suffix", "draft_model"]})


@pytest.mark.parametrize("method", [["suffix", "draft_model"], ["suffix", "ngram"]])
def test_a_list_drafts_in_this_process(method: list[str], tiny_pair: TinyPair) -> None:
    """With the model and without; what comes out is the target's, and the metrics say which drafted."""
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 9, 4] * 6]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = []
    for speculative in (
        None,
        {"method": method, "num_speculative_tokens": 4, "draft_trial": "off", "model": tiny_pair.draft},
    ):
        if speculative is not None and "draft_model" not in method:
            del speculative["model"]
        with LLM(tiny_pair.target, speculative_config=speculative) as llm:
            outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, sampling, **QUIET)])
            if speculative is not None:
                info = llm._backend.engine.drafter.info  # type: ignore[attr-defined]
                assert info.default_methods == tuple(method)
    assert outputs[0] == outputs[1]


def test_a_model_that_is_no_path() -> None:
    with pytest.raises(ValueError, match=r"\['model'\] is \['a'\]; allowed: the path of a checkpoint"):
        SpeculativeConfig.supported({"model": ["a"], "num_speculative_tokens": 5})


@pytest.mark.parametrize("name", sorted(REFUSED | fixed_fields(SpeculativeConfig)))
def test_fields_that_do_not_act_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        config(**DRAFT | {name: RIGHT.get(name, "x")}).require_supported()
    config(**DRAFT, use_heterogeneous_vocab=True, draft_sample_method="probabilistic").require_supported()
    config(draft_tensor_parallel_size=1, rejection_sample_method="standard").require_supported()
    config(rejection_sample_method="block").require_supported()
    with pytest.raises(ValueError, match="draft_tensor_parallel_size"):
        config(draft_tensor_parallel_size=2).require_supported()


def test_a_drafts_weights_may_have_8_bits(tiny_pair: TinyPair) -> None:
    """... and the output stays the target's."""
    drafts: dict[str, Any] = {"draft_trial": "off", "model": tiny_pair.draft, "num_speculative_tokens": 3}
    found = []
    for quantization in (None, "int8"):
        with LLM(tiny_pair.target, speculative_config=drafts | {"quantization": quantization}) as llm:
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12), **QUIET)
            found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_a_targets_weights_may_have_few_bits(rounding: str, tiny_pair: TinyPair) -> None:
    """With a draft of its own checkpoint rounded in the same way nearly all is accepted, and nothing changes."""
    drafts = {"model": f"self:{rounding}", "num_speculative_tokens": 3}
    found = []
    for speculation in (None, drafts):
        with LLM(tiny_pair.target, quantization=rounding, speculative_config=speculation) as llm:
            outputs = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=12), **QUIET)
            found.append(outputs[0].outputs[0].token_ids)
    assert found[0] == found[1] and len(found[0]) > 3


@pytest.mark.parametrize("name", sorted(FIXED))
def test_keywords_with_one_value_say_why(name: str, tmp_path: Path) -> None:
    allowed, reason = FIXED[name]
    for value in allowed:
        EngineArguments.of({"model": tmp_path, name: value})
    with pytest.raises(Unsupported) as raised:
        EngineArguments.of({"model": tmp_path, name: "something else"})
    assert name in str(raised.value) and reason in str(raised.value)


def test_keywords_that_act(tmp_path: Path) -> None:
    def made(**given: Any) -> EngineArguments:
        return EngineArguments.of({"model": str(tmp_path), **given})

    import torch

    assert made().seed == 0 and made().dtype == "auto" and made().gpu_memory_utilization == 0.9
    assert made(dtype=torch.bfloat16).dtype == "bfloat16" and made(dtype="float").dtype == "float32"
    assert made(dtype=torch.float16).dtype == made(dtype="half").dtype == "float16"
    assert made(logprobs_mode="processed_logits").logprobs_mode is LogprobsMode.PROCESSED_LOGITS
    assert made(served_model_name=["a", "b"]).served_model_name == "a" and made(max_model_len=-1).max_model_len is None
    for name, value in (
        ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.1), ("max_logprobs", -2), ("max_num_seqs", 0),
        ("generation_config", "own"), ("acceptance", "typical"), ("logprobs_mode", "logits"), ("model", "/no/such"),
        ("mode", "fast"), ("per_request_spec_decode_metrics", "all"), ("max_model_len", 1),
        ("override_generation_config", {"typical_p": 1}),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            made(**{name: value})
    with pytest.raises(ValueError, match="gateway"):
        EngineArguments.of({})
    with pytest.raises(ValueError, match="gateway"):
        made(gateway="127.0.0.1:1")
    with pytest.raises(ValueError, match="are shown to a gateway"):
        made(token="3c1f0a6be2d94d7c")
    with pytest.raises(TypeError, match="credentials must be of grpc"):
        EngineArguments.of({"gateway": "127.0.0.1:1", "credentials": "ca.pem"})


def test_old_keywords_warn_and_act() -> None:
    options: dict[str, Any] = {
        "speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4,
        "use_v2_block_manager": True, "seed": 3,
    }  # fmt: skip
    with pytest.warns(DeprecationWarning, match="speculative_model"):
        given = take_speculation(options)
    made = SpeculativeConfig.of(given)
    assert made is not None and options == {"seed": 3}
    assert (made.method, made.num_speculative_tokens, made.prompt_lookup_max) == ("ngram", 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert take_speculation({"spec_method": "ngram", "spec_tokens": 2}) == NGRAM | {"num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="beside it"), pytest.warns(DeprecationWarning):
        take_speculation({"speculative_config": NGRAM, "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="without a draft"), pytest.warns(DeprecationWarning):
        take_speculation({"num_speculative_tokens": 2})
    with pytest.raises(Unsupported, match="typical"):
        take_speculation({"spec_decoding_acceptance_method": "typical_acceptance_sampler"})


def test_a_gpus_memory_is_shared_out(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the weights and the working share leave of the utilization; as many blocks for the draft as for the
    target."""
    import torch

    from outrider.engine.loader import load_model
    from outrider.llm import memory

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 << 20, 1000 << 20))
    arguments = EngineArguments.of({"model": tiny_pair.target, "gpu_memory_utilization": 0.5})
    left = memory.cache_bytes(arguments, "cuda", 20 << 20)
    assert left == (500 - 300 - 50 - 20) << 20
    with pytest.raises(ValueError, match="leaves no memory"):
        memory.cache_bytes(EngineArguments.of({"model": tiny_pair.target, "gpu_memory_utilization": 0.3}), "cuda", 0)
    target, draft = load_model(tiny_pair.target), load_model(tiny_pair.draft)  # two layers and one
    per_layer = 2 * 2 * 16 * 4 * 16
    assert memory.num_blocks(target, None, 10 * per_layer, arguments) == 5
    assert memory.num_blocks(target, draft, 10 * per_layer, arguments) == 3
    assert memory.num_blocks(target, draft, left, arguments) == 256 * 512 // 16  # no more than can be used


def test_a_cache_that_is_too_small(tiny_pair: TinyPair) -> None:
    """A length that was asked for must fit; else the longest is what the cache holds."""
    per_block = 2 * 2 * 2 * 16 * 4 * 16  # layers, keys and values, heads, width, bytes, tokens
    with pytest.raises(ValueError, match="does not fit"):
        LLM(tiny_pair.target, max_model_len=512, kv_cache_memory_bytes=4 * per_block)
    with LLM(tiny_pair.target, kv_cache_memory_bytes=4 * per_block) as made:
        assert made._backend.info.max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len 513 exceeds the model's 512"):
        LLM(tiny_pair.target, max_model_len=513)
    with pytest.raises(ValueError, match="more than the target's 64"):
        LLM(
            tiny_pair.target, max_model_len=64,
            speculative_config={"draft_trial": "off", "model": tiny_pair.draft, "num_speculative_tokens": 2,
                                "max_model_len": 65},
        )  # fmt: skip


QUIET: dict[str, Any] = {"use_tqdm": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": "a"}, "seed must be an integer, or None, got 'a'"),
        ({"seed": True}, "seed must be an integer, or None, got True"),
        ({"threads": 0}, "threads must be an integer from 1 to 256, or None, got 0"),
        ({"threads": "2"}, "threads must be an integer from 1 to 256, or None, got '2'"),
        ({"max_model_len": "9"}, "max_model_len must be an integer of at least 2, or None, got '9'"),
        ({"max_num_seqs": "a"}, "max_num_seqs must be an integer of at least 1, or None, got 'a'"),
        ({"max_num_batched_tokens": 10**6}, "max_num_batched_tokens must be an integer from 1 to 65536, or None, "
         "got 1000000"),
        ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization must be a number in (0, 1], got 'a'"),
        ({"trust_remote_code": "no"}, "trust_remote_code must be True or False, got 'no'"),
        ({"override_generation_config": "a"}, "override_generation_config must be a dict, got 'a'"),
        ({"model": 5}, "model must be a folder's path or a hub id, a str or a Path; got 5"),
        ({"tokenizer": b"x"}, "tokenizer must be a folder's path or a hub id, a str or a Path; got b'x'"),
    ],
)  # fmt: skip
def test_keywords_of_llm(given: dict[str, Any], message: str, tiny_pair: TinyPair) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        LLM(**{"model": tiny_pair.target, **given})
    assert str(raised.value) == message


def test_keywords_that_may_be_none(tiny_pair: TinyPair) -> None:
    names = ("seed", "threads", "max_model_len", "max_num_seqs", "max_logprobs", "enable_prefix_caching")
    made = EngineArguments.of({"model": tiny_pair.target, **dict.fromkeys(names)})
    assert (made.seed, made.threads, made.max_num_seqs, made.max_logprobs) == (None, None, 256, 20)
    assert type(EngineArguments.of({"model": tiny_pair.target, "threads": np.int64(2)}).threads) is int


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"abc", "a list of token ids or a dict, not bytes"),
        (bytearray(b"abc"), "not bytearray"),
        ([b"abc"], "not b'abc'"),
        ([[True, False]], r"not \[True, False\]"),
        ({"prompt": 5}, "a prompt's 'prompt' must be a str, got 5"),
        ({"prompt": "a", "cache_salt": 5}, "a prompt's 'cache_salt' must be a str, got 5"),
        ({"prompt_token_ids": "12"}, "'prompt_token_ids' must be a list of token ids, got '12'"),
        ({"prompt_token_ids": b"12"}, "'prompt_token_ids' must be a list of token ids, got b'12'"),
        ({"prompt_token_ids": [1.5]}, r"'prompt_token_ids' must be a list of token ids, got \[1.5\]"),
        ({"prompt_token_ids": 5}, "'prompt_token_ids' must be a list of token ids, got 5"),
    ],
)
def test_prompts(prompts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        parse_prompts(prompts)


def test_prompts_that_are_no_unicode() -> None:
    for prompts in ("a\ud800", ["a\ud800"], {"prompt": "a\ud800"}):
        with pytest.raises(ValueError, match=r"must be Unicode; '\\ud800' at 1") as raised:
            parse_prompts(prompts)
        assert type(raised.value) is ValueError
    (prompt,) = parse_prompts({"prompt_token_ids": np.array([3, 4])})
    assert prompt.token_ids == (3, 4)


def test_sampling_params_of_a_call() -> None:
    given: Any
    for given in ({"temperature": 0}, [{"temperature": 0}], "a", 5, [None]):
        with pytest.raises(TypeError, match="sampling_params must be a SamplingParams, or a list of one for each"):
            params_per_prompt(given, 1)
    with pytest.raises(TypeError, match=r"write SamplingParams\(\.\.\.\)"):
        params_per_prompt({"temperature": 0}, 1)
    assert params_per_prompt((SamplingParams(seed=3),), 1)[0].seed == 3


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        ([{"content": "hi"}], ValueError, "needs a 'role', such as 'user', got {'content': 'hi'}"),
        ([[{"role": 5, "content": "hi"}]], ValueError, "needs a 'role'"),
        (["hi"], TypeError, "messages are a list of"),
        ([["hi"]], TypeError, r"got \['hi'\]"),
        (b"hi", TypeError, "messages are a list of"),
        ([{"role": "user", "content": 5}], TypeError, "'content' is a str or a list of parts, got 5"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "part needs a 'text'"),
    ],
)
def test_messages(messages: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        conversations_of(messages)


def test_calls_of_an_llm(llm: LLM) -> None:
    """What is checked alone above holds for the methods, too; keywords say what was meant, warnings where."""
    params: Any = {"temperature": 0}
    with pytest.raises(TypeError, match="must be a SamplingParams"):
        llm.generate(["a"], params, **QUIET)
    for prompts in (b"abc", {"prompt": 5}, "\ud800"):
        with pytest.raises((TypeError, ValueError), match="a prompt"):
            llm.generate(prompts, **QUIET)
    for content in ("hi", "\ud800"):
        role = {} if content == "hi" else {"role": "user"}
        with pytest.raises(ValueError, match=r"role|Unicode"):
            llm.chat([{**role, "content": content}], **QUIET)
    with pytest.raises(TypeError, match="generate has no keyword 'sampling_parms'; did you mean 'sampling_params'"):
        llm.generate(["a"], sampling_parms=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="chat has no keyword 'chat_templat'; did you mean 'chat_template'"):
        llm.chat([], chat_templat="")  # type: ignore[call-arg]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.generate(prompt_token_ids=[[5]], sampling_params=SamplingParams(max_tokens=1), **QUIET)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("own", "share", "dtype"),  # random weights bear little
    [("self:int8", 0.6, "auto"), ("self:int4", 0.1, "auto"), ("self:int4", 0.0, "bfloat16")],
)
def test_a_target_drafts_for_itself_in_few_bits(own: str, share: float, dtype: str, tiny_pair: TinyPair) -> None:
    """By its own weights, rounded; the tokens are plain decoding's. `dtype` is the target's."""
    prompts = [{"prompt_token_ids": [5, 9, 3, 7 + number]} for number in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {"dtype": dtype, "batch_invariant": True}
    with LLM(tiny_pair.target, **options) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params, use_tqdm=False)]
    with LLM(tiny_pair.target, **options, speculative_config={"model": own, "num_speculative_tokens": 4}) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        counts = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    assert [output.outputs[0].token_ids for output in found] == expected
    drafted = counts["vllm:spec_decode_num_draft_tokens"]
    assert counts["vllm:spec_decode_num_accepted_tokens"] > share * drafted and drafted > 10
