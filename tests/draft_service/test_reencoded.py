"""Drafts that are written again in the target's tokens: whatever it commits, over the draft's own cache."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from support.engines import GREEDY, SAMPLED, DraftHarness, commit, credit, new_open
from support.environment import SEED
from support.models import letters_backend

from outrider.draft_service.vocabularies import LoadedTokenizer, describe, join
from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import CachedSequence
from outrider.engine.model_runner import ModelRunner
from outrider.proposers.reencoded_text import ReencodedText
from outrider.proposers.reencoding import Reencoding
from outrider.rpc.lexicon import lexicon_of
from outrider.rpc.messages import DraftTokens, Failure, Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

OWN = [chr(0x100 + own) for own in range(97)]  # the draft's tokens are letters
PAIRS = [OWN[number] + OWN[(7 * number + 3) % 60] for number in range(50)]
TARGET = [*OWN[:60], *PAIRS]  # the target has fewer of them, and pairs
K = 4


def tokenizer(names: Sequence[str]) -> LoadedTokenizer:
    backend = letters_backend(names)
    return LoadedTokenizer(backend, lexicon_of(backend, {}))


JOINED = join(tokenizer(TARGET), tokenizer(OWN), "string")
assert isinstance(JOINED.greedy, Reencoding)
PAIR = JOINED.greedy
NAME = PAIR.target.lexicon.fingerprint
PROMPT = [(11 * index) % len(TARGET) for index in range(30)]


def opened(number: int = 1, sampling: SamplingParams = GREEDY, prompt: Sequence[int] = PROMPT) -> Open:
    return new_open(number, prompt, sampling, acceptance=AcceptanceRule.COUPLED, seed=7, tokenizer_fingerprint=NAME)


def pieces(events: Sequence[object], number: int = 1) -> list[DraftTokens]:
    return [event for event in events if isinstance(event, DraftTokens) and event.sequence_id == number]


def afresh(harness: DraftHarness, tokens: Sequence[int], count: int) -> list[int]:
    """What follows, every token of the draft computed over the whole text."""
    text = ReencodedText(CachedSequence([]), PAIR, tokens)
    while len(text) < len(tokens) + count:
        own = list(text.sequence.tokens)
        logits = ModelRunner(harness.loaded.model, 32).forward([BatchEntry(own, 0, list(range(32)), 1)])[0]
        known = torch.full_like(logits, -torch.inf)
        known[:60] = logits[:60]  # the letters that the target has
        assert text.draw(int(known.argmax()), len(tokens) + count) is not None
    return text.tokens[len(tokens) :]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_rounds_are_those_of_a_draft_that_computes_all_afresh(sampling: SamplingParams) -> None:
    harness, rng, tokens = DraftHarness(mappings=[PAIR]), random.Random(SEED), list(PROMPT)
    harness.send(opened(sampling=sampling))
    for outcome in (0, 40, 80, len(TARGET) - 1, 0, 110, len(TARGET) + 5, 59, 0):  # 0: all hold; some are no tokens
        said = pieces(harness.run(credit(1, len(tokens) + K, K)))
        drafted = [token for piece in said for token in piece.ids]
        assert said[0].position == len(tokens) and drafted == afresh(harness, tokens, K)
        assert not any(piece.weights for piece in said)
        kept = rng.randrange(K) if outcome else K
        new = [*drafted[:kept], outcome or rng.choice((80, 90))]
        harness.send(commit(1, len(tokens), *new, chain=said[0].chain, num_drafted=K, num_accepted=kept))
        tokens += new
        harness.check()


def test_the_same_text_in_other_tokens_is_not_computed_again() -> None:
    """The target writes as two letters what was drafted as a pair: the draft goes on from what it has drafted."""
    (letters,) = pieces(DraftHarness(mappings=[PAIR]).run(opened(), credit(1, len(PROMPT) + 2, 2)))
    one, other = letters.ids
    target = tokenizer([*TARGET, TARGET[one] + TARGET[other]])
    found = join(target, tokenizer(OWN), "string").greedy
    harness, name = DraftHarness(mappings=[found]), target.lexicon.fingerprint
    request = new_open(1, PROMPT, tokenizer_fingerprint=name)
    (first,) = pieces(harness.run(request, credit(1, len(PROMPT) + 2, 2)))
    assert first.ids[0] == len(TARGET)
    computed = len(harness.computed)
    harness.send(commit(1, len(PROMPT), one, chain=first.chain, num_drafted=2, num_accepted=0))
    (later,) = pieces(harness.run(credit(1, len(PROMPT) + 2, 1)))
    assert later.chain > first.chain and later.position == len(PROMPT) + 1 and later.ids == (other,)
    assert len(harness.computed) <= computed + 1
    harness.check()


def test_there_are_no_branches_and_credit_bounds_what_leaves() -> None:
    harness = DraftHarness(num_blocks=128, mappings=[PAIR])
    said = pieces(harness.run(opened(), credit(1, len(PROMPT) + 2 * (K + 1), K, 5)))
    assert {piece.chain for piece in said} == {0}
    assert max(piece.position + len(piece.ids) for piece in said) == len(PROMPT) + 2 * (K + 1)


def test_the_context_counts_own_tokens() -> None:
    harness, prompt = DraftHarness(max_model_len=20, mappings=[PAIR]), [75, 76, 77, 78]
    said = pieces(harness.run(opened(prompt=prompt), credit(1, 400, 100)))
    written = "".join(TARGET[token] for piece in said for token in piece.ids)
    assert 0 < len(written) <= 20 - 8
    (failure,) = harness.run(opened(2, prompt=3 * prompt))
    assert isinstance(failure, Failure) and failure.reason == "CONTEXT_TOO_SHORT"


def test_prefix_hits_change_nothing() -> None:
    harness, drafted, computed = DraftHarness(num_blocks=128, mappings=[PAIR]), [], [0]
    for number in (1, 2):
        drafted.append([piece.ids for piece in pieces(harness.run(opened(number), credit(number, 40, K)), number)])
        computed.append(len(harness.computed))
    assert drafted[0] == drafted[1] and computed[2] - computed[1] < computed[1] - 16


def test_the_way_follows_from_what_both_have_in_common() -> None:
    draft, pairs = tokenizer(OWN), [one + other for one in OWN[:4] for other in OWN[:4]]
    both = "string-level for greedy requests, token-level for sampled ones"
    assert describe(join(tokenizer([*OWN, *PAIRS]), draft)).endswith(both)
    assert describe(join(tokenizer([*OWN, PAIRS[0]]), draft)).endswith("drafted token-level")
    few = tokenizer([*OWN[:4], *pairs, *map(chr, range(0x4E00, 0x4E80))])
    assert describe(join(few, draft)).endswith("drafted string-level")
    with pytest.raises(ValueError, match="no token in common"):
        join(tokenizer(OWN[:5]), tokenizer(OWN[5:]))
