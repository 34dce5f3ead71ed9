"""The table of methods, and that whoever drafts reads it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.methods import LastToken

from outrider.cli.serve import ServeSettings
from outrider.draft_service.boot import load_methods
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.settings import GatewaySettings
from outrider.llm.config import SpeculativeConfig
from outrider.proposers import registry
from outrider.proposers.base import SequenceContext
from outrider.proposers.heads import loading
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.registry import HEADS, METHODS, TOKEN_METHODS, MethodSettings, head_of, make_proposer, method_of

OWN = "support.methods.LastToken"


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_what_its_factory_makes(name: str) -> None:
    row = METHODS[name]
    assert row.name == name == row.load().name and row.summary
    assert row.settings.model_fields.keys() <= MethodSettings.model_fields.keys()
    assert all(field.description for field in row.settings.model_fields.values())
    assert row.needs_model or row.one_hot  # weights are drawn from a model


def test_the_heads_are_those_that_load() -> None:
    assert HEADS.keys() == loading.HEADS.keys() and not HEADS.keys() & METHODS.keys()
    assert all(method_of(name) is row and row.load() is loading.load_head for name, row in HEADS.items())


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"speculators_model_type": "eagle", "architectures": ["EagleSpeculator", "LlamaDecoderLayer"]}, "eagle"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}, "eagle3"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None),
    ],
)
def test_a_head_is_told_by_its_config(config: dict[str, Any], method: str | None) -> None:
    assert head_of(config) == method


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_a_method_without_a_model_keeps_to_the_protocol(name: str) -> None:
    state = make_proposer(name, {}).open([5, 6, 7, 8] * 6, SequenceContext(20, "salt"))
    proposed = state.propose(4)
    assert state.num_tokens == 24 and len(proposed) <= 4
    state.append([5, 9])
    state.truncate(24)
    assert state.num_tokens == 24 and state.propose(4) == proposed and state.propose(0) == []


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_everybody_offers_it(name: str) -> None:
    methods, info = load_methods(DraftSettings(method=name))
    assert methods[0].name == name == info.methods[0].name == info.model.name
    others = {other for other in TOKEN_METHODS if not METHODS[other].learns}
    assert {method.name for method in methods} == others | {name}
    assert [method.learns for method in info.methods if method.name == name] == [METHODS[name].learns]
    gateway = GatewaySettings(target=["a:1"], draft=[name], tokenizer=Path("x"))
    assert gateway.local_methods == [name]
    local = LocalDrafter([make_proposer(name, dict(gateway))]).info
    assert local.methods == (info.methods[0],) and not local.methods[0].needs_features
    assert f"--method={name}" in ServeSettings.model_validate({"draft": {"method": name}}).draft_arguments()
    assert SpeculativeConfig.supported({"method": name, "num_speculative_tokens": 4})


def test_several_in_turn_are_everybodys() -> None:
    names = ("suffix", "ngram")
    methods, info = load_methods(DraftSettings(method="suffix, ngram"))
    assert tuple(method.name for method in methods[:2]) == names == info.default_methods == info.defaults
    assert info.model.name == "suffix,ngram"
    gateway = GatewaySettings(target=["a:1"], draft=["suffix,ngram"], tokenizer=Path("x"))
    assert gateway.local_methods == [*names]
    local = LocalDrafter([make_proposer(name, dict(gateway)) for name in gateway.local_methods], in_turn=True).info
    assert local.default_methods == names
    served = ServeSettings.model_validate({"draft": {"method": "suffix,ngram"}})
    assert "--method=suffix,ngram" in served.draft_arguments() and served.draft is not None
    assert served.draft.model is None
    with_model = ServeSettings.model_validate({"draft": {"method": "prediction,draft_model"}})
    assert with_model.draft is not None and with_model.draft.model is not None
    assert "--method=prediction,draft_model" in with_model.draft_arguments()
    assert load_methods(DraftSettings(method="ngram"))[1].default_methods == ()


def test_a_head_is_no_drafts_method() -> None:
    with pytest.raises(ValidationError, match="eagle3 is a head, which drafts beside the target"):
        DraftSettings(method="eagle3")
    assert ServeSettings.model_validate({"draft": {"method": "eagle3"}}).draft is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names none; allowed: at least one method"),
        ("ngram,ngram", "names 'ngram' twice; allowed: each method once"),
        ("ngram,sufix", "did you mean suffix"),
        ("ngram,", "there is no method ''"),
        (f"ngram,{OWN}", "allowed with allow_code"),
        ("ngram,eagle3", "names 'eagle3', which drafts beside the target; allowed: that alone"),
        ("draft_model,second", "names draft_model and second, which need a model each; allowed: one of these"),
    ],
)
def test_what_is_no_list(text: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    second = replace(METHODS["draft_model"], name="second")
    monkeypatch.setattr(registry, "METHODS", {**METHODS, "second": second})
    for make in (lambda: DraftSettings(method=text), lambda: ServeSettings.model_validate({"draft": {"method": text}})):
        with pytest.raises(ValidationError, match=problem):
            make()
    if text:
        with pytest.raises(ValidationError):
            GatewaySettings(target=["a:1"], draft=[text], tokenizer=Path("x"))


def test_its_settings_are_everybodys_flags() -> None:
    given = {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    made = make_proposer("ngram", {**given, "of_another": 1})
    assert isinstance(made, NgramProposer) and (made.prompt_lookup_min, made.prompt_lookup_max) == (2, 3)
    gateway = GatewaySettings(target=["a:1"], draft=["ngram"], tokenizer=Path("x"), **given)
    assert dict(gateway).items() >= given.items()
    served = ServeSettings.model_validate({"draft": {"method": "ngram", **given}})
    assert {"--method=ngram", "--prompt-lookup-min=2", "--prompt-lookup-max=3"} <= {*served.draft_arguments()}
    with pytest.raises(ValidationError, match="prompt_lookup_min"):
        DraftSettings(method="ngram", prompt_lookup_min=0)


def test_a_class_of_the_users_own_runs_where_code_is_allowed() -> None:
    methods, info = load_methods(DraftSettings(method=OWN, allow_code=True))
    assert isinstance(methods[0], LastToken) and info.methods[0].name == info.model.name == "last_token"
    gateway = GatewaySettings(target=["a:1"], draft=[f"{OWN},ngram"], tokenizer=Path("x"), allow_code=True)
    assert gateway.local_methods == [OWN, "ngram"]
    served = ServeSettings.model_validate({"draft": {"method": OWN, "allow_code": True}})
    assert {f"--method={OWN}", "--allow-code"} <= {*served.draft_arguments()}
    for config in ({"method": OWN}, {"model": OWN}, {"method": "custom_class", "model": OWN}):
        made = SpeculativeConfig.supported({**config, "num_speculative_tokens": 2})
        assert made is not None and (made.method, made.model) == (OWN, None)
    assert method_of("last_token").one_hot and not method_of(OWN).needs_model


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("eagel", "there is no method 'eagel': allowed: draft_model, ngram"),
        ("ngarm", "did you mean ngram"),
        ("support.methods.Missing", "support.methods.Missing cannot be used as a method: .*Missing"),
        ("nowhere.at_all.Class", "No module named 'nowhere'"),
        ("support.methods.Broken.open", "cannot be used"),
        ("support.methods.NoMethod", "allowed: a class with a name and open"),
        ("support.methods.Ngram", "has the name 'ngram'; allowed: one of its own"),
    ],
)
def test_what_is_no_method(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_proposer(name, {}, allow_code=True)


def test_a_class_is_refused_elsewhere() -> None:
    problem = re.escape(f"{OWN} is a class whose code would run here: allowed with allow_code (--allow-code) alone")
    for make in (
        lambda: make_proposer(OWN, {}),
        lambda: DraftSettings(method=OWN),
        lambda: ServeSettings.model_validate({"draft": {"method": OWN}}),
        lambda: GatewaySettings(target=["a:1"], draft=[OWN], tokenizer=Path("x")),
    ):
        with pytest.raises(ValueError, match=problem):
            make()


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        (["draft_model"], "draft_model needs a draft service"),
        (["ngram", "a:1"], "ngram would run in this process; allowed: methods alone, or addresses"),
        (["ngram,a:1"], "ngram would run in this process; allowed: methods alone, or addresses"),
        (["ngarm"], "allowed: host:port"),
    ],
)
def test_what_a_gateway_cannot_draft_with(draft: list[str], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        GatewaySettings(target=["a:1"], draft=draft, tokenizer=Path("x"))
