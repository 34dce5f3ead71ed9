"""Drafts for targets of another vocabulary: in the target's ids and at its positions, over the draft's own cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.engines import GREEDY, SAMPLED, DraftHarness, commit, credit, naive, new_open
from support.environment import SEED

from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.messages import DraftTokens, Failure, Open
from outrider.rpc.words.lexicon import Lexicon, Token
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

OWN, SHARED, SPELLED, UNKNOWN = 97, 70, 40, 10  # tokens of the draft; of the target, by what the draft makes of them
LAST = SHARED + SPELLED + UNKNOWN - 1
K, BRANCHES = 4, 5


def letters(ids: Sequence[int]) -> bytes:
    return "".join(chr(0x100 + own) for own in ids).encode()


def text(ids: Sequence[int]) -> Token:
    return Token("text", letters(ids))


OWN_LEXICON = Lexicon("draft", tuple(text([own]) for own in range(OWN)), {})


def target_tokens(name: str) -> list[Token]:
    """SHARED are the draft's, SPELLED two or three of the draft's, and UNKNOWN nothing that it can say."""
    rng = random.Random(f"{SEED} {name}")
    tokens = [text([own]) for own in rng.sample(range(OWN), SHARED)]
    tokens += [text([rng.randrange(OWN) for _ in range(rng.choice((2, 3)))]) for _ in range(SPELLED)]
    return tokens + [Token("text", b"?" + bytes([index])) for index in range(UNKNOWN)]


def mapping(name: str, *more: Token) -> VocabularyMap:
    return VocabularyMap.between(Lexicon(name, (*target_tokens(name), *more), {}), OWN_LEXICON)


MAP = mapping("target")
PROMPT = [(7 * index) % (LAST + 1) for index in range(30)]  # of every kind
ALL = SamplingParams(
    temperature=0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=400, min_tokens=20,
    stop_token_ids=(3,), logit_bias={5: 2.0},
)  # fmt: skip
REQUESTS = {
    "greedy": (GREEDY, AcceptanceRule.REJECTION),
    "weights": (SAMPLED, AcceptanceRule.REJECTION),
    "coupled": (SAMPLED, AcceptanceRule.COUPLED),
    "all, coupled": (ALL, AcceptanceRule.COUPLED),
    "all, weights": (ALL, AcceptanceRule.REJECTION),
}


def opened(name: str = "greedy", number: int = 1, prompt: Sequence[int] = PROMPT, target: str = "target") -> Open:
    sampling, acceptance = REQUESTS[name]
    one_hot = sampling.greedy
    return new_open(
        number, prompt, sampling, acceptance=acceptance, seed=7, tokenizer_fingerprint=target, one_hot=one_hot
    )


def pieces(events: Sequence[object], number: int = 1) -> list[DraftTokens]:
    return [event for event in events if isinstance(event, DraftTokens) and event.sequence_id == number]


@pytest.mark.parametrize("name", REQUESTS)
def test_rounds_are_those_of_a_draft_that_computes_all_afresh(name: str) -> None:
    """Whatever the target commits: drafted tokens, others that the draft has, spells, or cannot say."""
    harness, rng, tokens = DraftHarness(mappings=[MAP]), random.Random(SEED), list(PROMPT)
    assert len(MAP.to_draft) == SHARED and {len(MAP.spell(token)) for token in range(LAST + 1)} == {1, 2, 3}
    request = opened(name)
    harness.send(request)
    for outcome in (0, 40, 80, LAST, 0, 110, LAST + 5, 69):  # 0: nothing is refused; the last ids are padding
        said = pieces(harness.run(credit(1, len(tokens) + K, K)))
        drafted = [token for piece in said for token in piece.ids]
        weights = [entry for piece in said for entry in (piece.weights or [None] * len(piece.ids))]
        assert said[0].position == len(tokens) and len(drafted) == K and set(drafted) <= MAP.to_draft.keys()
        for index, (token, entry) in enumerate(zip(drafted, weights, strict=True)):
            assert (token, entry) == naive(request, [*tokens, *drafted[:index]], harness.loaded, MAP)
            assert (entry is not None) == ("weights" in name)
        kept = rng.randrange(K) if outcome else K
        new = [*drafted[:kept], outcome or rng.choice((80, 90))]
        harness.send(commit(1, len(tokens), *new, chain=said[0].chain, num_drafted=K, num_accepted=kept))
        tokens += new
        harness.check()


def test_branches_go_on_from_their_guesses() -> None:
    harness, request = DraftHarness(num_blocks=128, mappings=[MAP]), opened("coupled")
    ahead = credit(1, len(PROMPT) + 2 * (K + 1), K, BRANCHES)
    said = pieces(harness.run(request, ahead))
    chain = [token for piece in said if piece.chain == 0 for token in piece.ids]
    branches = [piece for piece in said if piece.chain > 0]
    assert len(branches) == BRANCHES
    for piece in branches:
        tokens = [*PROMPT, *chain[: piece.position - len(PROMPT)], piece.ids[0]]
        for token in piece.ids[1:]:
            assert token == naive(request, tokens, harness.loaded, MAP)[0]
            tokens.append(token)
    chosen = branches[0]
    kept = chosen.position - len(PROMPT)
    told = commit(1, len(PROMPT), *chain[:kept], chosen.ids[0], chain=0, num_drafted=K, num_accepted=kept)
    later = pieces(harness.run(told, credit(1, chosen.position + 2 * (K + 1), K, BRANCHES)))
    harness.check()
    assert any(piece.chain == chosen.chain for piece in later)


def test_another_token_of_the_same_letters_ends_the_chain() -> None:
    """What the draft would compute is what it has drafted; the target's token is another one."""
    (first,) = pieces(DraftHarness(mappings=[MAP]).run(opened(), credit(1, len(PROMPT) + K, K)))
    own = tuple(MAP.to_draft[token] for token in first.ids[:2])
    found = mapping("target", text(own))
    harness = DraftHarness(mappings=[found])
    (same,) = pieces(harness.run(opened(), credit(1, len(PROMPT) + K, K)))
    assert same.ids == first.ids and found.spell(LAST + 1) == own
    told = commit(1, len(PROMPT), LAST + 1, chain=same.chain, num_drafted=K, num_accepted=0)
    (later,) = pieces(harness.run(told, credit(1, len(PROMPT) + 1 + K, K)))
    assert later.chain > same.chain and later.position == len(PROMPT) + 1
    assert later.ids[0] == naive(opened(), [*PROMPT, LAST + 1], harness.loaded, found)[0]


def test_one_draft_serves_several_targets() -> None:
    """In the same steps; an Open without a known vocabulary is in the draft's own ids."""
    prompt, maps = [5, 6, 7, 8], {"target": MAP, "other": mapping("other"), "": None}
    harness = DraftHarness(num_blocks=128, mappings=[found for found in maps.values() if found is not None])
    requests = [
        (opened(name, number, prompt, target), maps[target])
        for number, (name, target) in enumerate((name, target) for name in REQUESTS for target in maps)
    ]
    said = harness.run(*(request for request, _ in requests), *(credit(n, 6, K) for n in range(len(requests))))
    for request, found in requests:
        (piece,) = pieces(said, request.sequence_id)
        for index, token in enumerate(piece.ids):
            entry = piece.weights[index] if piece.weights else None
            assert (token, entry) == naive(request, [*prompt, *piece.ids[:index]], harness.loaded, found)


def test_prefix_hits_and_forks_change_nothing() -> None:
    harness, drafted, computed = DraftHarness(num_blocks=128, mappings=[MAP]), [], [0]
    child = Open(3, (), SAMPLED, fork_of=1, acceptance=AcceptanceRule.COUPLED, seed=7, tokenizer_fingerprint="target")
    for number, request in enumerate((opened("coupled", 1), opened("coupled", 2), child), start=1):
        drafted.append([piece.ids for piece in pieces(harness.run(request, credit(number, 40, K)), number)])
        computed.append(len(harness.computed))
    assert drafted[0] == drafted[1] == drafted[2]
    assert computed[1] - 16 > computed[2] - computed[1] == computed[3] - computed[2]


def test_the_context_counts_own_tokens() -> None:
    harness, prompt = DraftHarness(max_model_len=20, mappings=[MAP]), [75, 76, 77, 78]
    own = len(MAP.spell_all(prompt))
    assert len(prompt) < own < 20 < 3 * own
    said = pieces(harness.run(opened("greedy", 1, prompt), credit(1, 400, 100)))
    assert [(piece.position, len(piece.ids)) for piece in said] == [(4, 20 - own)]
    (failure,) = harness.run(opened("greedy", 2, 3 * prompt))
    assert isinstance(failure, Failure) and failure.reason == "CONTEXT_TOO_SHORT"
