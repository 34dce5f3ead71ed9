"""Constraints under speculation: whatever was drafted, accepted, cut, preempted or moved, the tokens are those that
plain decoding under the constraint gives, and its text is what was asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from lossless.scenarios import prompt_of, run_rounds, target_model
from support.engines import (
    COUPLED,
    GRAMMAR_EOS,
    REJECTION,
    VOCAB,
    AtOnce,
    DraftFn,
    TargetHarness,
    grammar_compiler,
    grammars_at_once,
    opened,
    oracle,
    speculate,
)
from support.models import ascii_backend

from outrider.engine.grammar.trial import TrialFailed
from outrider.rpc.messages import Close, Credit, DraftTokens, Open
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason
from outrider.rpc.words.structured import Reasoning, StructuredOutput
from outrider.target_service.grammars import Grammars

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


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("rule", RULES)
def test_they_are_those_under_masks_from_the_start(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asked(1, CONSTRAINTS[kind], 11, **RULES[rule])
    reference = plain(request)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.target_service.verifier.takes_masks_lazily", lambda target: False)
        assert plain(request) == reference
    monkeypatch.setattr("outrider.target_service.lazy_masks._settled", lambda again, masks: ())
    assert kind == "structural_tag" or plain(request) != reference, "without masks it is the same"


@pytest.mark.parametrize("acceptance", [REJECTION, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("k", [2, 5])
def test_drawn_and_judged_texts_are_what_was_asked_for(acceptance: AcceptanceRule, k: int) -> None:
    """Their law is enumerated elsewhere."""
    for kind, constraint in CONSTRAINTS.items():
        request = asked(1, constraint, k, temperature=1.0, acceptance=acceptance)
        target = harness()
        output = speculate(target, request, k, drafts(plain(request), k))
        if target.commits(1)[-1].finish_reason is FinishReason.STOP:
            check_text(kind, text_of(output))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_blocks", [64, 14])  # the few are given up to others
def test_streams_with_and_without_share_steps(rule: str, num_blocks: int) -> None:
    requests = [asked(number, JSON, number, **RULES[rule]) for number in (1, 3, 5)]
    requests += [opened(number, prompt_of(number), max_tokens=40, seed=1, **RULES[rule]) for number in (2, 4)]
    expected = {request.sequence_id: plain(request) for request in requests}
    without = TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,))
    assert expected[2] == without.decode_plain(2, requests[3])
    target = harness(num_blocks=num_blocks)
    wishes = {number: drafts(reference, number) for number, reference in expected.items()}
    assert run_rounds(target, requests, wishes, 4) == expected
    assert bool(target.engine.scheduler.num_preempted) == (num_blocks == 14)


@pytest.mark.parametrize("rule", RULES)
def test_a_text_goes_on_elsewhere_in_its_middle(rule: str) -> None:
    request = asked(1, JSON, 3, **RULES[rule])
    reference = plain(request)
    for place in range(1, len(reference)):
        rest = replace(request, output_ids=tuple(reference[:place]))
        assert speculate(harness(), rest, 3, drafts(reference, place)) == reference


def test_output_that_does_not_fit_is_refused_by_name() -> None:
    target = harness()
    target.send(replace(asked(1), output_ids=(5, 6)), Credit(1, 99, 0))
    target.run()
    assert "open.output_ids" in target.failures(1)[0].message


def test_trees_are_masked_along_their_paths() -> None:
    request = asked(1, JSON, 2)
    reference, target = plain(request), harness()
    tokens, chain = [*request.prompt_ids], 0
    target.send(request, Credit(1, len(tokens) + 1, 0))
    while not (commits := target.commits(1)) or commits[-1].finish_reason is None:
        target.run()
        tokens = [*request.prompt_ids, *target.output(1)]
        ahead = [*reference[len(tokens) - 20 :], GRAMMAR_EOS, GRAMMAR_EOS][:2]
        # A wrong first guess with the right one beside it, and below that the second token.
        ids, parents = (7, ahead[0], ahead[1]), (0, 0, 2)
        chain += 1
        target.send(DraftTokens(1, chain, len(tokens), ids, parents=parents), Credit(1, len(tokens) + 3, 3, 60_000))
        target.run()
        assert not target.failures(1)
    assert target.output(1) == reference
    assert any(commit.num_accepted == 2 for commit in target.commits(1))


CLOSE = BACKEND.encode("/").ids


@pytest.mark.parametrize("bound", [0, 6])
def test_the_end_of_reasoning_may_lie_inside_a_window(bound: int) -> None:
    request = replace(asked(1, JSON, 4), reasoning=Reasoning(tuple(CLOSE), max_tokens=bound, open=True))
    reference = plain(request)
    for k in (1, 3, 8):
        assert speculate(harness(), request, k, drafts(reference, k)) == reference
    if bound:
        end = reference.index(CLOSE[0])
        assert end <= bound
        check_text("json_schema", text_of(reference[end + 1 :]))


@pytest.mark.parametrize("options", [{"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}])
@pytest.mark.parametrize("kind", ["choice", "regex"])
def test_where_only_the_end_may_follow_other_wishes_yield(kind: str, options: dict[str, Any]) -> None:
    request = asked(1, CONSTRAINTS[kind], 5, **options)
    target = harness()
    output = target.decode_plain(1, request)
    last = target.commits(1)[-1]
    if last.finish_reason is FinishReason.STOP:
        assert output[-1] == GRAMMAR_EOS and GRAMMAR_EOS not in output[:-1]
        check_text(kind, text_of(output))
    assert speculate(harness(), request, 4, drafts(output, 1)) == output
    if kind == "choice":  # "yes" may go on, so it does
        assert last.finish_reason is FinishReason.STOP and text_of(output) in ("no", "yesterday")


@pytest.mark.parametrize("k", [0, 3])
def test_parameters_that_leave_no_token_end_their_own_request_by_name(k: int) -> None:
    letters = tuple(BACKEND.encode("yes").ids)
    target = harness()
    other = asked(2, JSON)
    expected = plain(other)
    stuck = asked(1, CONSTRAINTS["choice"], allowed_token_ids=letters)  # the end is none of them
    target.send(stuck, other, Credit(1, 99, 0), Credit(2, 99, 0))
    if k:
        target.send(DraftTokens(1, 1, 20, letters), Credit(1, 99, k))
    target.run()
    [failure] = target.failures(1)
    assert "structured_output" in failure.message and "allowed_token_ids" in failure.message
    assert target.output(2) == expected


def test_a_bad_constraint_harms_no_other_stream() -> None:
    """Not one that is no schema, and not one that takes for ever."""
    bad = [
        StructuredOutput(json_schema="{"),
        StructuredOutput(json_schema='{"type": "integer", "multipleOf": 999983}'),
        StructuredOutput(regex="(a{1000}){1000}"),
        StructuredOutput(grammar="start: nowhere"),
    ]
    good = [asked(number, JSON if number % 2 else CONSTRAINTS["regex"], number) for number in range(10, 26)]
    expected = {request.sequence_id: plain(request) for request in good}
    target = harness(num_blocks=256)
    for number, constraint in enumerate(bad):
        target.send(*good[4 * number : 4 * number + 4], asked(number, constraint), Credit(number, 99, 0))
    target.send(*(Credit(request.sequence_id, 99, 0) for request in good))
    target.run()
    assert {number: target.output(number) for number in expected} == expected
    for number in range(len(bad)):
        [failure] = target.failures(number)
        assert failure.code == 3 and "sampling.structured_output" in failure.message


class Late(AtOnce):
    """Masks that come only when they are let go."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Any, Any]] | None = None

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        if self.held is None:
            return super().submit(function, *arguments, **options)
        future: Future[Any] = Future()
        self.held.append((future, function, arguments))
        return future

    def let_go(self) -> None:
        for future, function, arguments in self.held or ():
            future.set_result(function(*arguments))
        self.held = None


def test_a_constraint_that_could_not_be_tried_may_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for it: no fault of the request's, which another target may serve."""
    grammars, regex = grammars_at_once(), StructuredOutput(regex="never tried")
    target = TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,), grammars=grammars)

    def fail(source: str) -> None:
        raise TrialFailed("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(grammars.compiler._trials, "check", fail)
        target.decode_plain(1, asked(1, regex))
    (failure,) = target.failures(1)
    assert failure.code == 14 and failure.reason == "CONSTRAINT_NOT_TRIED" and failure.retry_after_ms == 1000
    assert target.decode_plain(2, asked(2, regex))
    assert not target.failures(2)


def test_masks_that_are_late_cost_their_own_sequence_time_and_nothing_else() -> None:
    late = Late()
    requests = [asked(1, JSON, 1), opened(2, prompt_of(2), max_tokens=12)]
    expected = {request.sequence_id: plain(request) for request in requests}
    grammars = Grammars(grammar_compiler(), AtOnce(), late, patience_s=0.0)
    target = TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,), grammars=grammars)
    target.send(*requests, Credit(1, 25, 0), Credit(2, 24, 0))
    target.run()
    assert (len(target.output(1)), len(target.output(2))) == (5, 4)
    late.held = []
    target.send(DraftTokens(1, 1, 25, tuple(expected[1][5:8])), Credit(1, 999, 3), Credit(2, 999, 0))
    target.run()
    assert (len(target.output(1)), target.output(2)) == (5, expected[2])
    late.let_go()
    target.run()
    assert target.output(1) == expected[1] and grammars.num_late == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "acceptance": REJECTION}], ids=["wanted", "ahead"])
def test_masks_that_never_come_end_their_request(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late()
    late.held = []
    grammars = Grammars(grammar_compiler(), AtOnce(), late, patience_s=0.0)
    target = TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,), grammars=grammars)
    target.send(asked(1, CONSTRAINTS["choice"], **options), Credit(1, 99, 0))
    target.run()
    assert not target.failures(1) and not target.output(1)
    monkeypatch.setattr("outrider.target_service.grammars.GIVE_UP_S", -1.0)
    target.run()
    assert "takes longer" in target.failures(1)[0].message
    target.send(Close(1))
