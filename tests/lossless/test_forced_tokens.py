"""Tokens that a grammar forces: guessed at by the target itself, verified like any other. The law by enumeration, and
outputs that do not change, with and without a draft."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from lossless.law import (
    FULL_WEIGHTS,
    VOCAB_SIZE,
    Proposal,
    Tokens,
    context_index,
    distance,
    endings_of,
    law_of,
    proposals_of,
)
from lossless.scenarios import prompt_of, target_model
from support.engines import (
    COUPLED,
    GRAMMAR_EOS,
    REJECTION,
    TargetHarness,
    grammar_compiler,
    grammars_at_once,
    opened,
    oracle,
    speculate,
)

from outrider.engine.grammar.source import GrammarSpec
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.rpc.words.sampling_params import TokenOrigin
from outrider.rpc.words.structured import StructuredOutput

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"first_name": {"enum": ["ada", "grace"]}, "is_a_member": {"type": "boolean"}},
        "required": ["first_name", "is_a_member"],
        "additionalProperties": False,
    }
)
JSON = StructuredOutput(json_schema=SCHEMA)
RULES: dict[str, dict[str, Any]] = {"greedy": {}, "coupled": {"temperature": 1.0, "acceptance": COUPLED}}
MOST = 8


def harness(most: int = MOST) -> TargetHarness:
    made = TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,), grammars=grammars_at_once())
    made.engine.scheduler.max_forced = most
    return made


def asked(seed: int = 0, **options: Any) -> Open:
    options = {"max_tokens": 80, "structured_output": JSON, **options}
    return opened(1, prompt_of(seed), seed=seed, **options)


def decode(most: int, request: Open, until: int = 1 << 20) -> TargetHarness:
    made = harness(most)
    made.send(request, Credit(1, until, 0))
    made.run()
    return made


# The law.


def forced_after(context: Tokens) -> Tokens:
    """What some grammar forces: a token that follows from those before, drafted ones too, or none."""
    token = context_index(context, VOCAB_SIZE + 1)
    return (token,) if token < VOCAB_SIZE else ()


def with_forced(num_drafted: int) -> list[Proposal]:
    """Every chain that a draft draws from weights, and behind it what is forced there."""
    return [
        replace(one, ids=one.ids + forced, vectors=(*one.vectors, *(None,) * len(forced)))
        for one in proposals_of(FULL_WEIGHTS, num_drafted=num_drafted)
        for forced in [forced_after(one.ids)]
    ]


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
def test_the_joint_law_is_the_targets_with_forced_tokens_behind_drafted_ones(num_drafted: int) -> None:
    proposals = with_forced(num_drafted)
    assert any(len(one.ids) > num_drafted for one in proposals)
    assert distance(law_of(endings_of(proposals))) == 0


# The engine.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_without_a_draft_the_output_is_plain_decodings_in_fewer_steps(rule: str, seed: int) -> None:
    request = asked(seed, **RULES[rule])
    plain, forced = decode(0, request), decode(MOST, request)
    assert forced.output(1) == plain.output(1)
    assert plain.num_steps == len(plain.output(1)) and not any(one.num_forced for one in plain.commits(1))
    assert forced.num_steps < plain.num_steps
    matcher = grammar_compiler().compile(GrammarSpec("json_schema", SCHEMA)).matcher()
    told = 0
    for commit in forced.commits(1):
        rest = request.sampling.max_tokens - (commit.position - len(request.prompt_ids))
        assert commit.num_forced == len(matcher.forced(min(MOST, rest)))
        assert (commit.chain, commit.num_drafted) == (None, 0)
        told += commit.origins.count(TokenOrigin.ACCEPTED)
        matcher.advance(commit.ids)
    assert told


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("hit", [0.0, 0.7, 1.0])
def test_behind_drafted_tokens_the_output_is_plain_decodings(rule: str, k: int, hit: float) -> None:
    request = asked(k, **RULES[rule])
    reference = decode(0, request).output(1)
    made = harness()
    assert speculate(made, request, k, oracle(reference, 20, random.Random(k), hit)) == reference
    commits = made.commits(1)
    assert all(commit.num_drafted <= k for commit in commits)
    assert any(commit.num_forced for commit in commits)
    for commit in commits:
        held = commit.origins.count(TokenOrigin.ACCEPTED)
        assert commit.num_accepted <= commit.num_drafted
        assert held <= commit.num_accepted + commit.num_forced * (commit.num_accepted == commit.num_drafted)


def window_of(made: TargetHarness) -> Any:
    """What the next step would verify of the sequence."""
    (target,) = made.engine.scheduler.sequences.values()
    return made.engine.scheduler._shape(target, 512, 128).window


def begun(request: Open, *messages: Any, most: int = MOST) -> TargetHarness:
    """Past its first token, which is not forced where white space may follow, too."""
    made = harness(most)
    made.send(request, Credit(1, len(request.prompt_ids) + 1, 4))
    made.run()
    made.send(Credit(1, 1 << 20, 4), *messages)
    return made


def spelled(text: str) -> tuple[int, ...]:
    """One token a character."""
    from support.models import ascii_backend

    return tuple(ascii_backend(97, GRAMMAR_EOS).encode(text).ids)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("rejects", [False, True])
def test_nothing_is_forced_where_the_drafts_next_token_takes_part(rejects: bool, more: bool) -> None:
    """Under rejection a chain that goes on has drawn its next token already."""
    request = asked(temperature=1.0, acceptance=REJECTION if rejects else COUPLED)
    at = len(request.prompt_ids) + 1
    made = begun(request, DraftTokens(1, 0, at, spelled('"f'), more=more))
    assert made.output(1) == list(spelled("{"))
    window = window_of(made)
    forced = () if rejects and more else spelled("irst_nam")
    assert window.ids == (*spelled('"f'), *forced) and window.num_forced == len(forced)
    assert window.weights[2:] == (None,) * len(forced)

    made = begun(request, DraftTokens(1, 0, at, spelled('"first')))
    assert window_of(made).ids == spelled('"fir')  # k is 4: the chain itself goes on


def test_a_draft_that_leaves_the_grammar_is_followed_by_nothing() -> None:
    request = asked()
    made = begun(request, DraftTokens(1, 0, len(request.prompt_ids) + 1, spelled("xx")))
    assert window_of(made).ids == spelled("xx")


def test_forced_tokens_have_bounds() -> None:
    """Their own, the credit, max_tokens, and the rows of a step."""
    request = asked()
    at = len(request.prompt_ids) + 1
    forced = spelled("irst_name")
    piece = DraftTokens(1, 0, at, spelled('"f'))
    for most in (0, 1, 3):
        assert window_of(begun(request, piece, most=most)).ids[2:] == forced[:most]
    made = harness()
    made.send(request, Credit(1, at, 4))
    made.run()
    made.send(Credit(1, at + 5, 4), piece)
    assert len(window_of(made).ids) == 5
    assert len(window_of(begun(replace_max(request, 6), piece)).ids) == 5
    (target,) = made.engine.scheduler.sequences.values()
    assert len(made.engine.scheduler._shape(target, 4, 128).window.ids) == 3
    assert made.engine.scheduler._shape(target, 4, 128).num_rows == 4


def replace_max(request: Open, max_tokens: int) -> Open:
    return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def test_who_asks_for_plain_decoding_gets_that() -> None:
    made = decode(MOST, replace(asked(), plain=True))
    assert made.num_steps == len(made.output(1))
    assert made.output(1) == decode(MOST, asked()).output(1)


def test_what_other_parameters_forbid_is_refused_like_any_guess() -> None:
    """Forced bytes, of which one may not be written: the request ends by name."""
    letters = [token for token in range(97) if token not in spelled("n")]
    made = decode(MOST, asked(allowed_token_ids=letters))
    plain = decode(0, asked(allowed_token_ids=letters))
    assert plain.output(1)[: len(made.output(1))] == made.output(1)
    assert [one.code for one in made.failures(1)] == [one.code for one in plain.failures(1)] == [3]  # its own fault


def test_rejection_commits_what_the_law_allows() -> None:
    for seed in range(6):
        made = decode(MOST, asked(seed, temperature=1.0, acceptance=REJECTION))
        text = "".join(chr_of(token) for token in made.output(1) if token != GRAMMAR_EOS)
        told = json.loads(text)
        assert told["first_name"] in ("ada", "grace") and isinstance(told["is_a_member"], bool)
        assert any(TokenOrigin.ACCEPTED in commit.origins for commit in made.commits(1))


def chr_of(token: int) -> str:
    from support.models import ascii_backend

    return str(ascii_backend(97, GRAMMAR_EOS).decode([token]))
