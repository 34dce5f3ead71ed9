"""Constraints under speculation: whatever was drafted, accepted, cut, preempted or moved, the tokens are those that
plain decoding under the constraint gives, and its text is what was asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from lossless.scenarios import prompt_of, target_model
from support.engines import (
    COUPLED,
    GRAMMAR_EOS,
    VOCAB,
    DraftFn,
    TargetHarness,
    grammars_at_once,
    opened,
    oracle,
    speculate,
)
from support.models import ascii_backend

from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import FinishReason, StructuredOutput

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ada", "grace"]}, "born": {"type": "integer", "minimum": 0, "maximum": 9999}},
        "required": ["name", "born"],
        "additionalProperties": False,
    }
)
JSON = StructuredOutput(json_schema=SCHEMA)
TAGGED = json.dumps(
    {"structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<f"]}
)
CONSTRAINTS: dict[str, StructuredOutput] = {
    "json_schema": JSON,
    "regex": StructuredOutput(regex="([ab]{2,3} )+end"),
    "grammar": StructuredOutput(grammar='start: "(" start ")" | "x"'),
    "choice": StructuredOutput(choice=("yes", "yesterday", "no")),
    "json_object": StructuredOutput(json_object=True),
    "structural_tag": StructuredOutput(structural_tag=TAGGED),
}
BACKEND = ascii_backend(VOCAB, GRAMMAR_EOS)
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "acceptance": COUPLED},
}


def harness(**options: Any) -> TargetHarness:
    return TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,), grammars=grammars_at_once(), **options)


def text_of(ids: Sequence[int]) -> str:
    return str(BACKEND.decode([token for token in ids if token != GRAMMAR_EOS]))


def asked(number: int, constraint: StructuredOutput = JSON, seed: int = 0, **options: Any) -> Open:
    options.setdefault("max_tokens", 60)
    return opened(number, prompt_of(seed), structured_output=constraint, seed=seed, **options)


def plain(request: Open) -> list[int]:
    return harness().decode_plain(request.sequence_id, request)


def drafts(reference: Sequence[int], seed: int, hit: float = 0.7) -> DraftFn:
    return oracle(reference, 20, random.Random(seed), hit)


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", range(1, 9))
def test_the_tokens_are_those_of_plain_decoding(kind: str, rule: str, k: int) -> None:
    request = asked(1, CONSTRAINTS[kind], k, **RULES[rule])
    reference = plain(request)
    target = harness()
    assert speculate(target, request, k, drafts(reference, k)) == reference
    commits = target.commits(1)
    assert sum(commit.num_accepted for commit in commits) or len(reference) < 4
    if commits[-1].finish_reason is FinishReason.STOP:
        check_text(kind, text_of(reference))


def check_text(kind: str, text: str) -> None:
    if kind == "json_schema":
        told = json.loads(text)
        assert told["name"] in ("ada", "grace") and 0 <= told["born"] <= 9999 and len(told) == 2
    elif kind == "regex":
        assert re.fullmatch("([ab]{2,3} )+end", text)
    elif kind == "grammar":
        assert re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")
    elif kind == "choice":
        assert text in ("yes", "yesterday", "no")
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
