"""StructuredOutputsParams, and what older versions of vLLM had in its place: forms, checks, the way to the wire."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel
from support.gateways import save_thinking

from outrider.llm import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams, Unsupported
from outrider.llm.sampling_params import to_wire, with_guided
from outrider.pairs import pair_path
from outrider.rpc.words.sampling_params import LogprobsMode
from outrider.rpc.words.structured import StructuredOutput


class Colour(BaseModel, extra="forbid"):
    name: Literal["red", "blue"]
    depth: int


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


def wire(constraint: StructuredOutputsParams) -> StructuredOutput:
    sampling = to_wire(SamplingParams(structured_outputs=constraint), LogprobsMode.RAW_LOGPROBS, 20, 512)
    assert sampling.structured_output is not None
    return sampling.structured_output


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"json": SCHEMA}, StructuredOutput(json_schema=json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA, indent=1)}, StructuredOutput(json_schema=json.dumps(SCHEMA))),
        ({"json": Colour}, StructuredOutput(json_schema=json.dumps(Colour.model_json_schema()))),
        ({"regex": r"\d+"}, StructuredOutput(regex=r"\d+")),
        ({"choice": ["yes", "no"]}, StructuredOutput(choice=("yes", "no"))),
        ({"choice": ("yes",)}, StructuredOutput(choice=("yes",))),
        ({"grammar": 'start: "a"'}, StructuredOutput(grammar='start: "a"')),
        ({"json_object": True}, StructuredOutput(json_object=True)),
        ({"structural_tag": TAG}, StructuredOutput(structural_tag=json.dumps(TAG))),
        ({"structural_tag": json.dumps(TAG)}, StructuredOutput(structural_tag=json.dumps(TAG))),
    ],
)
def test_every_kind_reaches_the_wire(given: dict[str, Any], sent: StructuredOutput) -> None:
    assert wire(StructuredOutputsParams(**given)) == sent
    old = GuidedDecodingParams(**given, backend="guidance", disable_fallback=True)
    with pytest.warns(DeprecationWarning, match="use structured_outputs=StructuredOutputsParams") as told:
        params = SamplingParams(guided_decoding=old)
    assert told[0].filename == __file__
    assert params.structured_outputs is old and params.guided_decoding is None and wire(old) == sent
    assert params.clone() == params


def test_exactly_one_kind() -> None:
    with pytest.raises(ValueError, match=r"You can only use one kind .* multiple are specified: json, regex"):
        StructuredOutputsParams(json=SCHEMA, regex="a")
    with pytest.raises(ValueError, match=r"You must use one kind .* none are specified"):
        StructuredOutputsParams()
    assert GuidedDecodingParams.from_optional(json=None, backend="auto") is None
    both: Any = {
        "structured_outputs": StructuredOutputsParams(regex="a"),
        "guided_decoding": GuidedDecodingParams(regex="a"),
    }
    with pytest.raises(ValueError, match="guided_decoding is given, and beside it structured_outputs"):
        SamplingParams(**both)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("json", "", "a JSON schema"), ("json", 5, "a JSON schema"), ("json", int, "a JSON schema"),
        ("json", "{", "must be JSON"), ("json", "[1]", "must be a JSON object"),
        ("structural_tag", "{", "must be JSON"),
        ("regex", "", "a regular expression"), ("regex", 5, "a regular expression"), ("grammar", " ", "a grammar"),
        ("choice", [], "a list of texts"), ("choice", [""], "a list of texts"), ("choice", "yes", "a list of texts"),
        ("json_object", False, "True or None"),
        ("whitespace_pattern", 5, "a regular expression"), ("disable_any_whitespace", "no", "True or False"),
    ],
)  # fmt: skip
def test_what_cannot_be_names_the_field(name: str, value: Any, allowed: str) -> None:
    kinds = ("json", "structural_tag", "regex", "grammar", "choice", "json_object")
    others: dict[str, Any] = {} if name in kinds else {"json": SCHEMA}
    with pytest.raises(ValueError, match=f"^{name} .*{allowed}.*, got "):
        StructuredOutputsParams(**others, **{name: value})


def test_only_one_library_compiles() -> None:
    for backend in ("xgrammar", "outlines", "guidance:no-fallback"):
        with pytest.raises(Unsupported, match=rf"GuidedDecodingParams\(backend='{backend}'\).*llguidance"):
            GuidedDecodingParams(regex="a", backend=backend)
    with pytest.raises(TypeError, match="did you mean 'regex'"):
        StructuredOutputsParams(regexp="a")  # type: ignore[call-arg]
    for wrong in ({"regex": "a"}, "a", GuidedDecodingParams):
        with pytest.raises(ValueError, match="structured_outputs must be a StructuredOutputsParams, or None"):
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]


def allows(constraint: StructuredOutputsParams, text: str) -> bool:
    """Whether the compiler takes a text under a JSON schema."""
    tokenizer = LLTokenizer((pair_path().target / "tokenizer.json").read_text(encoding="utf-8"))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(wire(constraint).json_schema or ""))
    assert not matcher.get_error()
    ids = tokenizer.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def test_how_json_is_written_acts() -> None:
    narrow, wide = '{"a":1}', '{ "a" :  1}'
    free = StructuredOutputsParams(json=SCHEMA)
    tight = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    assert allows(free, narrow) and allows(free, wide)
    assert allows(tight, narrow) and not allows(tight, wide)
    of_any = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    assert allows(of_any, narrow) and not allows(of_any, wide)
    assert not allows(StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"), wide)
    more = '{"a": 1, "b": {"c": 2}}'
    nested = {**SCHEMA, "properties": {"a": {"type": "integer"}, "b": {"properties": {"properties": {}}}}}
    for name, schema in (("flat", SCHEMA), ("nested", nested)):
        closed = StructuredOutputsParams(json=schema, disable_additional_properties=True)
        assert allows(StructuredOutputsParams(json=schema), more) and not allows(closed, more), name
    assert allows(StructuredOutputsParams(json=nested, disable_additional_properties=True), '{"a": 1, "b": {}}')
    assert "additionalProperties" not in nested


def test_options_of_older_generate() -> None:
    params = SamplingParams(max_tokens=5)
    for given in ({"guided_regex": "a+"}, SimpleNamespace(guided_regex="a+", guided_json=None)):
        one = with_guided(params, given)
        assert one.structured_outputs == StructuredOutputsParams(regex="a+") and one.max_tokens == 5
        assert with_guided([params, params], given) == [one, one] and params.structured_outputs is None
    with pytest.raises(Unsupported, match=r"guided_options_request\(guided_decoding_backend='outlines'\)"):
        with_guided(params, {"guided_regex": "a", "guided_decoding_backend": "outlines"})
    with pytest.raises(TypeError, match="did you mean 'guided_json'"):
        with_guided(params, {"guided_jsn": {}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))


def test_the_engines_of_this_process_keep_to_it() -> None:
    pair = pair_path()
    drafts = {"model": str(pair.draft), "num_speculative_tokens": 4}
    with LLM(pair.target, speculative_config=drafts, max_num_seqs=8, max_model_len=256) as llm:
        free = SamplingParams(temperature=0.0, max_tokens=16)
        kinds = [
            StructuredOutputsParams(json=Colour),
            StructuredOutputsParams(regex="[a-z]{2,5}!"),
            StructuredOutputsParams(choice=["yes", "no"]),
            StructuredOutputsParams(grammar='start: "a" /[0-9]{2}/'),
            StructuredOutputsParams(structural_tag=CALL),
        ]
        params = [SamplingParams(temperature=0.0, max_tokens=96, structured_outputs=kind) for kind in kinds]
        told = llm.generate(["x = "] * 6, [free, *params], use_tqdm=False)
        texts = [output.outputs[0].text for output in told]
        assert [output.outputs[0].finish_reason for output in told[1:]] == ["stop"] * 5
        Colour.model_validate_json(texts[1])
        for pattern, text in zip(("[a-z]{2,5}!", "yes|no", "a[0-9]{2}", r"<f>\{.*\}</f>"), texts[2:], strict=True):
            assert re.fullmatch(pattern, text, re.DOTALL), text
        wrong = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(["))
        with pytest.raises(ValueError, match=r"^structured_outputs: at 1"):
            llm.generate(["x = "], wrong, use_tqdm=False)
        (again,) = llm.generate(["x = "], free, use_tqdm=False)
        assert again.outputs[0].text == texts[0]


def test_a_budget_ends_reasoning(tmp_path: Path, llm: LLM) -> None:
    """After so many tokens only its end may follow; the text is the whole output's."""
    folder, talk = save_thinking(tmp_path / "thinking", 0, opens=True), [{"role": "user", "content": "the quick"}]
    budgets = (-1, 2, 6)
    params = [SamplingParams(temperature=0, max_tokens=12, thinking_token_budget=budget) for budget in budgets]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(folder, speculative_config=drafts, threads=1) as thinking:
        end = thinking.get_tokenizer().convert_tokens_to_ids("</think>")
        outputs = [output.outputs[0] for output in thinking.chat([talk] * 3, params, use_tqdm=False)]
        assert end not in outputs[0].token_ids
        assert [output.token_ids.index(end) for output in outputs[1:]] == [2, 6]
        assert all("</think>" in output.text for output in outputs[1:])
    with pytest.raises(ValueError, match=r"^thinking_token_budget: is given, and no reasoning of this model is known"):
        llm.generate([[4, 5]], params[1], use_tqdm=False)
