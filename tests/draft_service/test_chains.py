"""Chains and branches: what a draft prepares while its window is verified, for other outcomes than full acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from support.engines import GREEDY, SAMPLED, STREAM, DraftHarness, commit, credit, naive, new_open
from support.environment import SEED

from outrider.draft_service.chains import (
    LEAST_CHANCE,
    Branch,
    Branches,
    Chain,
    Outcome,
    OutcomeRates,
    outcome_probs,
    rank_of,
)
from outrider.draft_service.engine import MAX_BRANCH_STEPS
from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.draft_text import DraftText
from outrider.rpc.messages import DraftTokens, Failure, Open
from outrider.rpc.words.sampling_params import AcceptanceRule

PROMPT = list(range(3, 24))  # the window's end crosses a block's
K, BRANCHES = 4, 5
MANY = 40  # enough for branches of branches
REQUESTS = {
    "greedy": new_open(1, PROMPT),
    "coupled": new_open(1, PROMPT, SAMPLED, acceptance=AcceptanceRule.COUPLED, seed=7),
}


def branching(request: Open, **options: Any) -> tuple[DraftHarness, list[DraftTokens]]:
    harness = DraftHarness(**options)
    ahead = credit(1, len(PROMPT) + 2 * (K + 1), K, BRANCHES)
    pieces = [event for event in harness.run(request, ahead) if isinstance(event, DraftTokens)]
    harness.check()
    return harness, pieces


def continuation(harness: DraftHarness, request: Open, tokens: Sequence[int], count: int) -> list[int]:
    """What a draft would draw after `tokens`, everything computed afresh."""
    found = list(tokens)
    for _ in range(count):
        found.append(naive(request, found, harness.loaded)[0])
    return found[len(tokens) :]


@pytest.mark.parametrize("name", REQUESTS)
def test_every_branch_goes_on_from_its_guess(name: str) -> None:
    request = REQUESTS[name]
    harness, pieces = branching(request)
    chain = [token for piece in pieces if piece.chain == 0 for token in piece.ids]
    assert chain == continuation(harness, request, PROMPT, 2 * (K + 1))
    branches = [piece for piece in pieces if piece.chain > 0]
    assert len(branches) == BRANCHES and {piece.parent for piece in branches} == {0}
    for piece in branches:
        offset = piece.position - len(PROMPT)
        assert 0 <= offset <= K and piece.ids[0] != chain[offset]
        prefix = [*PROMPT, *chain[:offset], piece.ids[0]]
        assert list(piece.ids[1:]) == continuation(harness, request, prefix, len(piece.ids) - 1)
        assert len(piece.ids) == 1 + K
    assert len({(piece.position, piece.ids[0]) for piece in branches}) == BRANCHES


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("index", range(BRANCHES))
def test_the_outcome_that_comes_takes_the_chains_place(name: str, index: int) -> None:
    request = REQUESTS[name]
    harness, pieces = branching(request)
    chain = [token for piece in pieces if piece.chain == 0 for token in piece.ids]
    chosen = [piece for piece in pieces if piece.chain > 0][index]
    held = chosen.position - len(PROMPT)
    new = [*chain[:held], chosen.ids[0]]
    length = len(PROMPT) + len(new)
    told = commit(1, len(PROMPT), *new, chain=0, num_drafted=K, num_accepted=held)
    later = harness.run(told, credit(1, length + 2 * (K + 1), K, BRANCHES))
    harness.check()
    ahead = [event for event in later if isinstance(event, DraftTokens) and event.chain == chosen.chain]
    assert ahead and ahead[0].position == chosen.position + len(chosen.ids)  # it goes on where it rested
    drafted = [*chosen.ids[1:], *(token for piece in ahead for token in piece.ids)]
    assert drafted == continuation(harness, request, [*PROMPT, *new], len(drafted))
    assert all(event.chain >= chosen.chain for event in later if isinstance(event, DraftTokens))


def test_an_outcome_without_a_branch_starts_a_chain_of_a_new_number() -> None:
    harness, pieces = branching(REQUESTS["greedy"])
    taken = {piece.ids[0] for piece in pieces if piece.position == len(PROMPT)}
    other = next(token for token in range(3, 90) if token not in taken)
    later = harness.run(commit(1, len(PROMPT), other), credit(1, len(PROMPT) + 11, K, BRANCHES))
    harness.check()
    first = next(event for event in later if isinstance(event, DraftTokens))
    assert first.chain > max(piece.chain for piece in pieces) and first.position == len(PROMPT) + 1


def test_weights_leave_no_guesses() -> None:
    request = new_open(1, PROMPT, SAMPLED, acceptance=AcceptanceRule.REJECTION, seed=7)
    _, pieces = branching(request)
    assert {piece.chain for piece in pieces} == {0}


def test_sequences_share_the_rows_of_a_pass() -> None:
    harness, numbers = DraftHarness(num_blocks=512), range(1, 5)
    prompts = {number: [number + token for token in PROMPT] for number in numbers}
    opened = [new_open(number, prompt) for number, prompt in prompts.items()]
    harness.run(*opened, *(credit(number, len(PROMPT) + 2 * (K + 1), K, MANY) for number in numbers))
    harness.check()
    held = [len(harness.engine.sequences[STREAM, number].branches) for number in numbers]
    assert min(held) > MAX_BRANCH_STEPS // 8 and max(held) <= MAX_BRANCH_STEPS // 4 < MANY
    assert max(len(batch) for batch in harness.batches) <= MAX_BRANCH_STEPS + len(numbers)


def test_branches_yield_their_blocks() -> None:
    """Another sequence needs the room: guesses go first."""
    harness, _ = branching(REQUESTS["greedy"], num_blocks=9)
    assert harness.engine.sequences[STREAM, 1].branches
    harness.run(new_open(2, list(range(4, 70))), credit(2, 66 + K, K))
    harness.check()
    assert not harness.engine.sequences[STREAM, 1].branches
    assert [event.ids for event in harness.events if isinstance(event, DraftTokens) and event.sequence_id == 2]


def test_what_has_survived_but_not_left_leaves_at_once() -> None:
    """The target holds less than a window and waits: two tokens now are worth more than four later."""
    harness = DraftHarness()
    harness.run(new_open(1, PROMPT, GREEDY), credit(1, len(PROMPT) + K, K, BRANCHES))
    draft = harness.engine.sequences[STREAM, 1]
    draft.limits.grant(credit(1, len(PROMPT) + 2 * (K + 1), K, BRANCHES))
    harness.engine.step(0.0)
    harness.engine.step(0.0)  # two more tokens, not a piece yet
    chain = draft.sequence.tokens[len(PROMPT) :]
    assert len(chain) == K + 2
    before = len(harness.flushes)
    harness.send(commit(1, len(PROMPT), *chain[: K + 1], chain=0, num_drafted=K, num_accepted=K))
    harness.engine.step(0.0)
    first = harness.flushes[before][0]
    assert isinstance(first, DraftTokens) and first.position == len(PROMPT) + K and len(first.ids) >= 2


def test_rates_and_ranks() -> None:
    rates = OutcomeRates()
    for _ in range(200):
        rates.observe(4, 1, 2)  # always the second is refused, and the third alternative is right
    assert rates.acceptance.at(0) > 0.9 and rates.acceptance.at(1) < 0.1
    assert rates.chance(2) > 0.8 > rates.chance(0)
    top_tokens: dict[int, tuple[int, ...]] = {10: (1, 2, 3), 11: (4, 5, 6), 12: (7, 8, 9)}
    chances = outcome_probs(rates.table(2), 0, 10, top_tokens, [])
    assert max(chances, key=chances.__getitem__) == Outcome(0, 11, 6)
    assert [rank_of(top_tokens, 11, token) for token in (5, 99)] == [1, -1] and rank_of(top_tokens, 20, 5) is None


def test_an_outcome_of_a_branch_is_as_likely_as_both_together() -> None:
    table = OutcomeRates().table(2)
    chances = [column[:2] for column in table.chances]  # after 2 tokens and the one that follows, another window
    branch = Branch.of(4, Outcome(0, 11, 3), DraftText(CachedSequence([*range(11), 3, 6, 7])))
    branch.top_tokens = {12: (8, 9), 13: (10,)}
    orphan = Branch.of(5, Outcome(3, 11, 3), DraftText(CachedSequence([*range(11), 3, 6, 7])))  # its parent has gone
    orphan.top_tokens = {12: (11,)}
    found = outcome_probs(table, 0, 10, {10: (1, 2), 11: (3, 4), 12: (5,), 13: (6,)}, [branch, orphan])
    expected = {
        Outcome(0, 10, 1): chances[0][0],
        Outcome(0, 10, 2): chances[0][1],
        Outcome(0, 11, 3): chances[1][0],
        Outcome(0, 11, 4): chances[1][1],
        Outcome(0, 12, 5): chances[2][0],
        Outcome(0, 13, 6): chances[3][0],
        Outcome(4, 12, 8): chances[1][0] * chances[0][0],
        Outcome(4, 13, 10): chances[1][0] * chances[1][0],
    }
    assert found == pytest.approx(expected) and chances[1][0] * chances[0][1] < LEAST_CHANCE  # 9 is too unlikely
    assert chances[3][0] == pytest.approx(table.whole * chances[0][0])
    assert (branch.chance, branch.goes_on, orphan.chance) == (chances[1][0], True, 0.0)


def test_branches_of_a_branch_are_there_when_its_outcome_comes() -> None:
    """The verification after this one is prepared for, too: once an outcome is known, what was drafted for those of
    the next one leaves at once, and not before."""
    request = REQUESTS["greedy"]
    harness = DraftHarness(num_blocks=256)
    ahead = credit(1, len(PROMPT) + 3 * (K + 1), K, MANY)
    pieces = [event for event in harness.run(request, ahead) if isinstance(event, DraftTokens)]
    harness.check()
    draft = harness.engine.sequences[STREAM, 1]
    assert {piece.parent for piece in pieces if piece.chain > 0 and piece.parent is not None} == {0}
    second = next(branch for branch in draft.branches if branch.parent > 0)
    first = next(branch for branch in draft.branches if branch.number == second.parent)
    new = first.sequence.tokens[len(PROMPT) : first.position + 1]
    length, passes, flushes = len(PROMPT) + len(new), len(harness.batches), len(harness.flushes)
    harness.send(commit(1, len(PROMPT), *new, chain=0, num_drafted=K, num_accepted=len(new) - 1))
    harness.engine.step(0.0)
    assert draft.chain.number == first.number and len(harness.batches) <= passes + 1
    sent = {event.chain: event for event in harness.flushes[flushes] if isinstance(event, DraftTokens)}
    assert sent[second.number].position == second.position and sent[second.number].parent == first.number
    assert all(branch.sequence.tokens[:length] == [*PROMPT, *new] for branch in draft.branches)
    again = second.sequence.tokens[length : second.position + 1]
    harness.run(commit(1, length, *again, chain=first.number, num_drafted=K, num_accepted=len(again) - 1))
    harness.check()
    drafted = list(sent[second.number].ids[1:])
    assert draft.chain.number == second.number and len(drafted) == K
    assert drafted == continuation(harness, request, [*PROMPT, *new, *again], K)


def test_what_the_target_does_not_hold_is_not_gone_on_with() -> None:
    harness, pieces = branching(REQUESTS["greedy"])
    chain = [token for piece in pieces if piece.chain == 0 for token in piece.ids]
    refused = max((piece for piece in pieces if piece.chain > 0), key=lambda piece: piece.position)
    assert refused.position > len(PROMPT)
    harness.run(commit(1, len(PROMPT), chain[0], chain=0, dropped=(refused.chain,)))
    draft = harness.engine.sequences[STREAM, 1]
    assert draft.chain.number == 0 and refused.chain not in {branch.number for branch in draft.branches}


def test_the_lowest_number_wins() -> None:
    branches = Branches(
        [Branch.of(number, Outcome(0, 2, 9), DraftText(CachedSequence([1, 2, 9, 8]))) for number in (5, 3)]
    )
    chosen = branches.matching(2, [9])
    assert chosen is not None and chosen.number == 3 and branches.matching(2, [7]) is None
    # Of a branch that had to go: its own guess is still one.
    orphan = Branches([Branch.of(4, Outcome(3, 3, 8), DraftText(CachedSequence([1, 2, 9, 8])))])
    assert orphan.matching(2, [9]) is None and orphan.matching(2, [9, 8]) is orphan.held[0]


@pytest.mark.parametrize("name", REQUESTS)
def test_rounds_of_every_kind(name: str) -> None:
    """Whatever is committed, each chain says what a draft would draw after its own tokens."""
    request, rng = REQUESTS[name], random.Random(SEED + 1)
    harness, chains, committed = DraftHarness(num_blocks=256), dict[int, list[int]](), list(PROMPT)
    events = harness.run(request, credit(1, len(committed) + 3 * (K + 1), K, MANY))
    for _ in range(25):
        for piece in (event for event in events if isinstance(event, DraftTokens) and event.ids):
            start = chains.setdefault(piece.chain, list(committed) if piece.parent is None else chains[piece.parent])
            prefix = start[: piece.position]
            guess = piece.parent is not None
            drafted = list(piece.ids[1:]) if guess else list(piece.ids)
            prefix = [*prefix, piece.ids[0]] if guess else prefix
            assert drafted == continuation(harness, request, prefix, len(drafted))
            chains[piece.chain] = [*prefix, *drafted]
        length = len(committed)
        live = min(number for number, ids in chains.items() if ids[:length] == committed and len(ids) > length)
        window = chains[live][length : length + K]
        held = rng.randrange(len(window) + 1)
        before = [*committed, *window[:held]]
        others = [ids[len(before)] for ids in chains.values() if ids[: len(before)] == before and ids[len(before) :]]
        token = rng.choice([*others, rng.randrange(3, 90)])
        new = [*window[:held], token]
        told = commit(1, length, *new, chain=live, num_drafted=len(window), num_accepted=held)
        committed += new
        events = harness.run(told, credit(1, len(committed) + 3 * (K + 1), K, MANY))
        harness.check()


def test_credit_for_branches_without_a_window_harms_no_neighbour() -> None:
    harness = DraftHarness()
    harness.run(new_open(1, PROMPT), credit(1, len(PROMPT) + K, K, 3))
    own = [7, 8, 9]
    events = harness.run(credit(1, len(PROMPT) + 4 * K, 0, 3), new_open(2, own), credit(2, len(own) + K, K))
    harness.check()
    drafted = [
        token for event in events if isinstance(event, DraftTokens) and event.sequence_id == 2 for token in event.ids
    ]
    assert drafted == continuation(harness, new_open(2, own), own, K)
    assert not any(isinstance(event, Failure) for event in events)


def test_tokens_that_were_not_noted_are_taken_off() -> None:
    cache, sequence = KVCacheManager(BlockPool(8), 4), CachedSequence(list(PROMPT))
    chain = Chain(0, DraftText(sequence), sent=len(PROMPT), ended=True)
    cache.extend(sequence)
    sequence.tokens += [70, 71]
    chain.note([DraftedToken(70), DraftedToken(71, top_tokens=(5,))])
    sequence.tokens.append(72)
    chain.roll_back(cache)
    assert sequence.tokens == [*PROMPT, 70, 71] and not chain.ended
    assert chain.take(1, 2) == DraftTokens(1, 0, len(PROMPT), (70, 71)) and chain.num_unsent == 0


def test_a_branch_that_is_wanted_no_more_has_no_pieces() -> None:
    """Its first window has left, and more of it has not, when the credit for windows ends."""
    branch = Branch.of(4, Outcome(0, 3, 9), DraftText(CachedSequence([1, 2, 5, 9, 6, 7])))
    branch.note([DraftedToken(6), DraftedToken(7)])
    assert [piece.ids for piece in branch.pieces(1, 2, 20)] == [(9, 6, 7)]
    branch.text.append([8])
    branch.note([DraftedToken(8)])
    assert list(islice(branch.pieces(1, 0, 0), 3)) == []
