"""Drafts of requests with a grammar: what it forbids is not drafted; and where it cannot be known, nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import (
    COUPLED,
    GREEDY,
    REJECTION,
    SAMPLED,
    VOCAB,
    DraftHarness,
    commit,
    credit,
    new_open,
    slow_masks,
    tiny_draft,
)
from support.models import ascii_backend

from outrider.draft_service.grammar import spec_of
from outrider.engine.grammar import queue as grammar_queue
from outrider.engine.grammar.compiler import GrammarCompiler
from outrider.engine.grammar.source import GrammarSpec
from outrider.engine.token_tree import TokenTree, path_to
from outrider.rpc.messages import DraftTokens, Open
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.rpc.words.structured import Reasoning, StructuredOutput

EOS = tiny_draft().eos_token_ids[0]
PROMPT = tuple(range(3, 20))
SCHEMA = '{"type": "object", "properties": {"name": {"enum": ["ada", "grace"]}, "born": {"type": "integer"}}}'
JSON = StructuredOutput(json_schema=SCHEMA)
DIGITS = StructuredOutput(regex="[0-9]{40}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    ascii_backend(VOCAB, EOS).save(str(path))
    return path


@pytest.fixture(scope="module")
def compiler(tokenizer: Path) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer.read_bytes(), VOCAB, [EOS])
    yield made
    made.close()


@pytest.fixture
def new(tokenizer: Path) -> Any:
    """Harnesses whose threads end with the test."""
    made: list[DraftHarness] = []

    def build(**options: Any) -> DraftHarness:
        made.append(DraftHarness(**{"tokenizer": tokenizer, **options}))
        return made[-1]

    yield build
    for harness in made:
        harness.engine.close()


def constrained(
    number: int = 1, output: StructuredOutput = JSON, sampling: SamplingParams = GREEDY, **options: Any
) -> Open:
    return new_open(number, PROMPT, replace(sampling, structured_output=output), **options)


def opened(harness: DraftHarness, request: Open) -> DraftHarness:
    """Its grammar is there before anything is drafted."""
    harness.run(request)
    grammar = harness.engine.sequences[1, request.sequence_id].grammar
    assert grammar is not None and grammar._compiling is not None
    grammar._compiling.exception(60)
    return harness


def fits(compiler: GrammarCompiler, ids: Sequence[int], spec: GrammarSpec | None = None) -> bool:
    """Whether a grammar allows all of them, up to the end."""
    ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
    spec = spec or spec_of(constrained())
    assert spec is not None
    return compiler.compile(spec).matcher().fits(ids) == len(ids)


def drafted(harness: DraftHarness, *messages: Any) -> list[int]:
    return [token for ids in harness.ids(*messages) for token in ids]


RULES = [(GREEDY, {}), (SAMPLED, {"acceptance": COUPLED}), (SAMPLED, {"acceptance": REJECTION})]


@pytest.mark.parametrize(("sampling", "options"), RULES, ids=["greedy", "coupled", "rejection"])
def test_what_is_drafted_is_allowed_also_after_commits(
    new: Callable[..., DraftHarness], compiler: GrammarCompiler, sampling: SamplingParams, options: Any
) -> None:
    harness = opened(new(), constrained(sampling=sampling, seed=5, **options))
    first = drafted(harness, credit(1, len(PROMPT) + 8))
    assert len(first) == 8 and fits(compiler, first)
    assert not fits(compiler, drafted(new(), replace(constrained(sampling=sampling), sampling=sampling), credit(1, 25)))

    other = next(token for token in range(3, VOCAB) if token != first[2] and fits(compiler, [*first[:2], token]))
    committed = [*first[:2], other]
    again = drafted(harness, commit(1, len(PROMPT), *committed), credit(1, len(PROMPT) + 3 + 8))
    assert len(again) == 8 and fits(compiler, [*committed, *again])
    harness.check()


def test_weights_are_of_what_the_grammar_allows(new: Callable[..., DraftHarness], compiler: GrammarCompiler) -> None:
    """The mask is a part of the law that a token is drawn from."""
    harness = opened(new(), constrained(1, DIGITS, SAMPLED, acceptance=REJECTION))
    events = harness.run(credit(1, len(PROMPT) + 4))
    digits = {token for token in range(VOCAB) if fits(compiler, [token], GrammarSpec("regex", "[0-9]"))}
    pieces = [event for event in events if isinstance(event, DraftTokens)]
    assert pieces
    for piece in pieces:
        for token, weights in zip(piece.ids, piece.weights, strict=True):
            assert weights is not None
            of = torch.frombuffer(bytearray(weights.ids), dtype=torch.int32).tolist()
            assert token in of and set(of) <= digits


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_branches_and_trees_are_allowed(
    new: Callable[..., DraftHarness], compiler: GrammarCompiler, sampling: SamplingParams
) -> None:
    harness = opened(new(), constrained(sampling=sampling, acceptance=COUPLED))
    events = harness.run(credit(1, len(PROMPT) + 12, max_branches=4))
    pieces = [event for event in events if isinstance(event, DraftTokens) and event.ids]
    (chain,) = {piece.chain for piece in pieces if piece.parent is None}
    main = [token for piece in pieces if piece.chain == chain for token in piece.ids]
    assert any(piece.parent is not None for piece in pieces)
    for piece in pieces:
        if piece.parent == chain:
            assert fits(compiler, [*main[: piece.position - len(PROMPT)], *piece.ids])

    shape = TokenTree.parse("[(0,), (1,), (0, 0), (0, 1), (1, 0)]")
    harness = opened(new(tree=shape), constrained(sampling=sampling, acceptance=COUPLED))
    trees = [event for event in harness.run(credit(1, 100, 5)) if isinstance(event, DraftTokens) and event.parents]
    assert trees
    for tree in trees:
        for node in range(len(tree.ids)):
            assert fits(compiler, [tree.ids[at] for at in path_to(tree.parents, node)])


def test_a_continuation_drafts_from_where_its_output_ended(
    new: Callable[..., DraftHarness], compiler: GrammarCompiler
) -> None:
    before = drafted(opened(new(), constrained()), credit(1, len(PROMPT) + 6))
    rest = drafted(opened(new(), constrained(output_ids=tuple(before))), credit(1, len(PROMPT) + 6 + 6))
    assert len(rest) == 6 and fits(compiler, [*before, *rest])


def test_lookups_are_cut_where_the_grammar_forbids(new: Callable[..., DraftHarness], compiler: GrammarCompiler) -> None:
    digits = [token for token in range(VOCAB) if fits(compiler, [token], GrammarSpec("regex", "[0-9]"))]
    letter = 60
    prompt = (*digits[:5], letter, 61, *digits[:2])
    request = new_open(1, prompt, replace(GREEDY, structured_output=DIGITS), method="ngram")
    assert drafted(opened(new(), request), credit(1, 100)) == digits[2:5]
    assert letter in drafted(new(), replace(request, sampling=GREEDY), credit(1, 100))


@pytest.mark.parametrize("why", ["no tokenizer", "broken grammar", "another text", "another vocabulary"])
def test_where_the_grammar_is_not_known_drafts_go_on_without(new: Callable[..., DraftHarness], why: str) -> None:
    output = StructuredOutput(regex="(a") if why == "broken grammar" else JSON
    request = constrained(output=output, output_ids=(1, 1) if why == "another text" else ())
    harness = new(tokenizer=None) if why == "no tokenizer" else new()
    if why == "another vocabulary":
        request = replace(request, tokenizer_fingerprint="theirs", method="ngram")
        harness.method.vocabularies["theirs"] = None  # type: ignore[assignment]
    plain = new_open(1, PROMPT, GREEDY, output_ids=request.output_ids, method=request.method)
    if why in ("no tokenizer", "another vocabulary"):
        harness.run(request)
        assert harness.engine.sequences[1, 1].grammar is None
    else:
        opened(harness, request)
    until = len(PROMPT) + len(request.output_ids) + 8
    assert drafted(harness, credit(1, until)) == drafted(new(), plain, credit(1, until))


def test_reasoning_comes_before() -> None:
    spec = spec_of(replace(constrained(), reasoning=Reasoning((5, 6), (4,), 7, True)))
    assert spec is not None and spec.kind == "json_schema" and spec.text == SCHEMA
    assert spec.reasoning is not None
    assert (spec.reasoning.end_ids, spec.reasoning.start_ids) == ((5, 6), (4,))
    assert (spec.reasoning.max_tokens, spec.reasoning.open) == (7, True)
    assert spec_of(new_open(1, PROMPT)) is None
    assert spec_of(replace(new_open(1, PROMPT), reasoning=Reasoning((5,)))) is None
    bound = spec_of(replace(new_open(1, PROMPT), reasoning=Reasoning((5,), max_tokens=3)))
    assert bound is not None and bound.kind is None
    assert spec_of(constrained(output=StructuredOutput(choice=("a", "b")))) == GrammarSpec("choice", choices=("a", "b"))
    assert spec_of(constrained(output=StructuredOutput(json_object=True))) == GrammarSpec("json_object")


def test_drafts_begin_before_the_grammar_is_compiled(
    new: Callable[..., DraftHarness], compiler: GrammarCompiler
) -> None:
    """And keep to it once it is: what was drafted before is the target's to refuse."""
    harness = new()
    assert drafted(harness, constrained(), credit(1, len(PROMPT) + 4))
    grammar = harness.engine.sequences[1, 1].grammar
    assert grammar is not None
    started = time.monotonic()
    while grammar._compiling is not None and time.monotonic() < started + 60:
        grammar._compiling.exception(60)
        grammar.masks((), 0)
    token = next(token for token in range(3, VOCAB) if fits(compiler, [token]))
    assert fits(compiler, [token, *drafted(harness, commit(1, len(PROMPT), token), credit(1, len(PROMPT) + 9))])


def on_device() -> bool:
    """Harnesses step on the test's own thread; grammars are compiled on another."""
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(("sampling", "options"), RULES, ids=["greedy", "coupled", "rejection"])
def test_a_slow_mask_is_waited_for_once(
    new: Callable[..., DraftHarness],
    compiler: GrammarCompiler,
    sampling: SamplingParams,
    options: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From its place on drafts are drawn without; before it within the grammar as ever, also after a refusal."""
    digits = {token for token in range(VOCAB) if fits(compiler, [token], GrammarSpec("regex", "[0-9]"))}
    harness = opened(new(), constrained(1, DIGITS, sampling, seed=5, **options))
    made = slow_masks(monkeypatch, behind=3, counts=on_device)
    first = drafted(harness, credit(1, len(PROMPT) + 8))
    assert made == [0, 1, 2, 3] and len(first) == 8
    assert set(first[:4]) <= digits and not set(first[4:]) <= digits

    own = next(iter(digits - {first[1]}))
    made.clear()
    events = harness.run(commit(1, len(PROMPT), first[0], own), credit(1, len(PROMPT) + 2 + 6))
    pieces = [event for event in events if isinstance(event, DraftTokens)]
    again = [token for piece in pieces for token in piece.ids]
    assert made == [2] and again[0] in digits and len(again) == 6 and not set(again) <= digits
    if sampling is SAMPLED and options["acceptance"] == REJECTION:
        weights = [one for piece in pieces for one in piece.weights if one is not None]
        of = [set(torch.frombuffer(bytearray(one.ids), dtype=torch.int32).tolist()) for one in weights]
        assert of[0] <= digits and all(not ids <= digits for ids in of[1:]) and len(of) == 6
        assert all(token in ids for token, ids in zip(again, of, strict=True)), "what is sent is what was drawn from"
    harness.check()


def test_a_mask_that_is_slow_from_the_start_is_not_waited_for(
    new: Callable[..., DraftHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = slow_masks(monkeypatch, behind=0, counts=on_device)
    found = drafted(opened(new(), constrained(1, DIGITS)), credit(1, len(PROMPT) + 8))
    assert not made and found == drafted(new(), new_open(1, PROMPT), credit(1, len(PROMPT) + 8))


def test_a_draft_goes_on_without_a_grammar_where_too_many_wait(
    new: Callable[..., DraftHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 0)
    found = drafted(harness := new(), constrained(), credit(1, len(PROMPT) + 8))
    assert harness.engine.sequences[1, 1].grammar is None
    assert found == drafted(new(), new_open(1, PROMPT), credit(1, len(PROMPT) + 8))
