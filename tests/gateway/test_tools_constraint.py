"""Grammars of calls: what can be written under one is read as calls, whose arguments satisfy their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
from support.fakes import EOS
from support.tools import as_written, tool_tokenizer

from outrider.engine.grammar.compiler import CompiledGrammar, GrammarCompiler, Matcher
from outrider.engine.grammar.source import GrammarSpec
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gateway.text.tools.calls import Tool, join_calls
from outrider.gateway.text.tools.constraint import calls_grammar
from outrider.gateway.text.tools.formats import FORMATS
from outrider.rpc.words.structured import StructuredOutput

VOCAB = 400
ADD = Tool(
    "add",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "of": {"enum": ["x", "<tool_call>"]}, "b": {"$ref": "#/$defs/small"}},
        "required": ["a", "of"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    },
    strict=True,
)
PING = Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False}, strict=False)
LISTED = Tool("listed", {"properties": {"a": {"type": "integer"}}}, strict=True)


@contextmanager
def compiled(
    name: str, tools: list[Tool], *, required: bool, parallel: bool, answer: StructuredOutput | None = None
) -> Iterator[CompiledGrammar]:
    tokenizer = tool_tokenizer(name)
    one = FORMATS[name]
    ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
    markers = {text: ids[text] for text in (*one.parser.markers, *one.parser.inner) if text in ids}
    constraint = calls_grammar(one, tools, markers, required=required, parallel=parallel, answer=answer)
    compiler = GrammarCompiler(tokenizer.backend.to_str().encode(), VOCAB, (EOS,))
    with closing(compiler):
        yield compiler.compile(GrammarSpec("grammar", constraint.grammar or ""))


def allowed(state: Matcher) -> list[int]:
    """The ids that may follow."""
    row = state.masks([], 0)[0]
    return [token for token in range(VOCAB) if int(row[token // 32]) >> (token % 32) & 1]


def walk(name: str, state: Matcher, seed: int) -> str | None:
    """An output that a model with equal probabilities writes; None: it goes on."""
    chance, ids = random.Random(seed), list[int]()
    for _ in range(400):
        token = chance.choice(allowed(state))
        if token == EOS:
            return tool_tokenizer(name).decode(ids)
        ids.append(token)
        state.advance([token])
    return None


def read(name: str, output: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    parser = FORMATS[name].parser(str, {tool.name: tool.parameters for tool in (ADD, PING)})
    parts = [parser.push(output), parser.finish()]
    calls = join_calls(call for part in parts for call in part.calls)
    return "".join(part.text for part in parts), [(call.name, json.loads(call.arguments)) for call in calls]


def fits(call: tuple[str, dict[str, Any]]) -> bool:
    name, arguments = call
    if name == "ping":
        return arguments == {}
    return (
        set(arguments) - {"b"} == {"a", "of"}
        and isinstance(arguments["a"], int)
        and arguments["of"] in ("x", "<tool_call>")
        and len(arguments.get("b", [])) <= 2
        and all(isinstance(value, bool) for value in arguments.get("b", []))
    )


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_required_is_calls_and_nothing_else(name: str, parallel: bool) -> None:
    with compiled(name, [ADD, PING], required=True, parallel=parallel) as grammar:
        outputs = [walk(name, grammar.matcher(), seed) for seed in range(8)]
    ended = [output for output in outputs if output is not None]
    assert len(ended) >= 4
    for output in ended:
        text, calls = read(name, output)
        assert text == "" and calls and all(map(fits, calls)), output
        assert parallel or len(calls) == 1


def takes(grammar: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a whole text may be written, and then end."""
    state = grammar.matcher()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(state):
            return False
        state.advance([token])
    return EOS in allowed(state)


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tool_among_text(name: str) -> None:
    """Any text goes; what begins as a call of the strict tool is one, and of another one is any object."""
    one = FORMATS[name]
    layout = one.several or one.layout
    tokenizer = tool_tokenizer(name)

    def call(function: str, arguments: str) -> str:
        return (
            layout.opening
            + layout.before.replace("NAME", function)
            + as_written(name, arguments)
            + layout.after
            + layout.closing
        )

    good = call("add", '{"a": 1, "of": "x"}')
    with compiled(name, [ADD, PING, LISTED], required=False, parallel=True) as grammar:
        assert takes(grammar, tokenizer, call("listed", '{"a": 1}')) and not takes(
            grammar, tokenizer, call("listed", '{"a": 1, "b": 1}')
        )
        for text in ("a {text} [of] any kind", "", good, call("ping", '{"any": [1]}')):
            assert takes(grammar, tokenizer, text), text
        for text in (call("add", '{"a": "1"}'), call("other", "{}")):
            assert not takes(grammar, tokenizer, text), text
        if one.parser.markers and not one.parser.bare:
            assert takes(grammar, tokenizer, f"text {good} text") and not takes(
                grammar, tokenizer, f"text {call('add', '{}')}"
            )


SIZE = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
FORMS = [
    (StructuredOutput(json_schema=SIZE), ['{"n": 1}', '{\n  "n": 1}'], ["{}", "1", "", " "]),
    (StructuredOutput(json_object=True), ["{}", '{"a": [1]}'], ["[]", "text"]),
    (StructuredOutput(choice=("yes", 'n"o')), ["yes", 'n"o'], ["", "yes!", "no"]),
]


@pytest.mark.parametrize(("answer", "good", "bad"), FORMS)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_or_else_an_answer_of_a_form(
    name: str, answer: StructuredOutput, good: list[str], bad: list[str]
) -> None:
    """And nothing but one of the two."""
    layout, tokenizer = FORMATS[name].layout, tool_tokenizer(name)
    call = (
        layout.opening + layout.before.replace("NAME", "add") + as_written(name, '{"a": 1, "of": "x"}') + layout.after
    )
    with compiled(name, [ADD, PING], required=False, parallel=False, answer=answer) as grammar:
        fits = partial(takes, grammar, tokenizer)
        assert all(map(fits, [*good, call + layout.closing]))
        assert not any(map(fits, [*bad, f"text {call}{layout.closing}", good[0] + call]))


@pytest.mark.parametrize("name", ["json", "llama3_json", "hermes"])
def test_several_calls_or_else_an_answer(name: str) -> None:
    """Also where an answer, too, may begin with a bracket."""
    layout = FORMATS[name].several or FORMATS[name].layout
    calls = layout.between.join([layout.before.replace("NAME", "ping") + "{}" + layout.after] * 2)
    answer = StructuredOutput(json_schema='{"type": ["object", "array"]}')
    with compiled(name, [ADD, PING], required=False, parallel=True, answer=answer) as grammar:
        for text in (layout.opening + calls + layout.closing, "[1]", "{}"):
            assert takes(grammar, tool_tokenizer(name), text), text
