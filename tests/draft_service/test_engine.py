"""The engine over a tiny model: drafts equal a naive draft's after any history, and no row is computed twice."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import GREEDY, SAMPLED, STREAM, DraftHarness, commit, credit, naive, new_open
from support.methods import Broken, LastToken

from outrider.draft_service import chains
from outrider.draft_service.sequence import MAX_AHEAD
from outrider.engine.batch import BatchEntry
from outrider.engine.model_runner import ModelRunner
from outrider.proposers.base import SequenceContext
from outrider.proposers.draft_rows import DraftedToken
from outrider.proposers.suffix.proposer import SuffixProposer
from outrider.rpc.messages import Close, Closed, DraftTokens, Failure, Open, TokenWeights
from outrider.rpc.servicer import Detach
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

PENALISED = SamplingParams(
    temperature=0.9, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=6,
    max_tokens=200, stop_token_ids=(5,), logit_bias={7: 1.5}, bad_words_ids=((9,), (3, 4)),
)  # fmt: skip
REQUESTS = [
    new_open(1, range(3, 20)),
    new_open(2, range(30, 36), SAMPLED, seed=2**63 + 5),
    new_open(3, [8] * 33, SAMPLED, seed=7, acceptance=AcceptanceRule.COUPLED, completion=2),
    new_open(4, range(40, 56), PENALISED, seed=11, output_ids=(3, 5, 5)),
    new_open(5, range(60, 70), PENALISED, seed=12, acceptance=AcceptanceRule.COUPLED),
    new_open(6, range(20, 25), SAMPLED, seed=3, one_hot=True),
    new_open(7, range(70, 80), SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=200)),
]


class Follower:
    """The gateway's view of one sequence: checks every piece against the naive draft."""

    def __init__(self, request: Open) -> None:
        self.request = request
        self.committed = [*request.prompt_ids, *request.output_ids]
        self.chains: dict[int, list[int]] = {}
        self.latest = -1

    def take(self, piece: DraftTokens, harness: DraftHarness) -> None:
        assert piece.chain >= self.latest
        if piece.chain not in self.chains:
            assert piece.position == len(self.committed)
            self.chains[piece.chain] = list(self.committed)
        self.latest = piece.chain
        tokens = self.chains[piece.chain]
        assert piece.position == len(tokens)
        for index, token in enumerate(piece.ids):
            expected, weights = naive(self.request, tokens, harness.loaded)
            assert token == expected
            assert (piece.weights[index] if piece.weights else None) == weights
            tokens.append(token)

    def verify(self, rng: random.Random) -> Any:
        """Commits some of the live chain, and mostly one token that the draft did not propose."""
        start = len(self.committed)
        ahead = self.chains.get(self.latest, [])[start:]
        kept = ahead[: rng.randint(0, len(ahead))]
        if rng.random() < 0.8 or not kept:
            kept = [*kept, rng.randrange(97)]
        self.committed += kept
        return commit(self.request.sequence_id, start, *kept)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_equal_a_naive_draft_and_nothing_is_computed_twice(seed: int) -> None:
    rng, harness = random.Random(seed), DraftHarness(num_blocks=128)
    followers = {request.sequence_id: Follower(request) for request in REQUESTS}
    messages: list[Any] = []
    for request in REQUESTS:
        messages += [request, credit(request.sequence_id, len(followers[request.sequence_id].committed) + 5, 3)]
    for _ in range(5):
        for event in harness.run(*messages):
            assert isinstance(event, DraftTokens), event
            followers[event.sequence_id].take(event, harness)
        harness.check()
        messages = []
        for sequence_id, follower in followers.items():
            news = follower.verify(rng)
            messages += [news, credit(sequence_id, len(follower.committed) + rng.randint(1, 6), rng.randint(1, 4))]
        rng.shuffle(messages)
    assert len(harness.computed) == len(set(harness.computed))
    assert max(len(batch) for batch in harness.batches) == len(REQUESTS)


def test_the_cache_after_rollback_equals_a_fresh_one() -> None:
    harness, prompt = DraftHarness(), list(range(3, 40))
    harness.run(new_open(1, prompt), credit(1, 45))
    chain = harness.events[0].ids  # type: ignore[union-attr]
    harness.run(commit(1, 37, *chain[:2], (chain[2] + 1) % 97))
    sequence = harness.engine.sequences[STREAM, 1].sequence
    assert len(sequence) == 45 and sequence.num_computed_tokens == 44
    fresh = ModelRunner(harness.loaded.model, 4)
    fresh.forward([BatchEntry(sequence.tokens[:44], 0, [0, 1, 2], 1)])
    table = torch.tensor(sequence.block_table)
    cache = harness.method.proposer.runner.cache
    for ours, theirs in zip((*cache.keys, *cache.values), (*fresh.cache.keys, *fresh.cache.values), strict=True):
        assert torch.equal(ours[table].flatten(0, 1)[:44], theirs.flatten(0, 1)[:44])


def test_pieces_go_by_count_and_credit_end() -> None:
    harness = DraftHarness()
    pieces = harness.run(new_open(1, [1, 2, 3]), credit(1, 13, 4))
    assert [(p.position, len(p.ids), p.more) for p in pieces if isinstance(p, DraftTokens)] == [
        (3, 4, True), (7, 4, True), (11, 2, False),
    ]  # fmt: skip
    assert all(p.draft_us > 0 for p in pieces if isinstance(p, DraftTokens))
    assert harness.run(credit(1, 9)) == []  # credit never falls
    later = harness.run(credit(1, 15))
    assert [(p.chain, p.position, p.more) for p in later if isinstance(p, DraftTokens)] == [(0, 13, False)]


def test_a_drafted_eos_does_not_end_a_piece() -> None:
    biased = SamplingParams(temperature=0, logit_bias={2: 100.0}, max_tokens=50)
    assert DraftHarness().ids(new_open(1, [1, 2, 3], biased), credit(1, 11)) == [(2,) * 4, (2,) * 4]


def probs_after(request: Open, tokens: Sequence[int], harness: DraftHarness) -> torch.Tensor:  # [vocab]
    logits = ModelRunner(harness.loaded.model, 32).forward([BatchEntry(list(tokens), 0, list(range(32)), 1)])
    return (logits[0] / (request.sampling.temperature or 1.0)).softmax(-1)


def drafted_with(request: Open, confidence: float, pieces: int = 3, length: int = 4) -> tuple[list[DraftTokens], Any]:
    """What comes of a credit for so many pieces."""
    harness, start = DraftHarness(), len(request.prompt_ids)
    events = harness.run(replace(request, draft_confidence=confidence), credit(1, start + pieces * length, length))
    return [event for event in events if isinstance(event, DraftTokens)], harness


@pytest.mark.parametrize("acceptance", [AcceptanceRule.REJECTION, AcceptanceRule.COUPLED], ids=["greedy", "coupled"])
def test_a_draft_ends_behind_a_token_that_is_unlikely(acceptance: AcceptanceRule) -> None:
    """... and goes on from the target's own token after it. An arg max and a race tell nothing of a law."""
    sampling = GREEDY if acceptance == AcceptanceRule.REJECTION else SAMPLED
    request = new_open(1, [1, 2, 3], sampling, seed=4, acceptance=acceptance)
    whole, harness = drafted_with(request, 0.0)
    tokens = [1, 2, 3, *(token for piece in whole for token in piece.ids)]
    likely = [float(probs_after(request, tokens[:at], harness)[tokens[at]]) for at in range(3, 15)]
    bound = sorted(likely[:9])[1] * 1.0001  # of the first nine two are less likely
    end = 3 + next(at for at, value in enumerate(likely) if value < bound) + 1
    pieces, harness = drafted_with(request, bound)
    assert [token for piece in pieces for token in piece.ids] == tokens[3:end] and not pieces[-1].more
    assert all(len(piece.ids) == 4 and piece.more for piece in pieces[:-1])
    more = harness.ids(commit(1, 3, *tokens[3:end], 50), credit(1, end + 3, 4))
    assert sum(map(len, more)) >= 1


def leaves_by_its_laws(request: Open, bound: float) -> bool:
    """Whether every piece has as many tokens as its credit says, or one, where the draft is less sure before it draws
    that; and what is said of more is as fixed."""
    pieces, harness = drafted_with(request, bound)
    for piece in pieces:
        tokens = [*request.prompt_ids, *(token for other in pieces for token in other.ids)][: piece.position]
        unsure = float(probs_after(request, tokens, harness).max()) < bound
        if len(piece.ids) != (1 if unsure else 4) or piece.more != (not unsure and piece.position < 11):
            return False
    return True


UNSURE = 0.08  # of the tiny model, in about a third of its laws


def weighing(seed: int) -> Open:
    rule = (AcceptanceRule.REJECTION, AcceptanceRule.BLOCK)[seed % 2]
    return new_open(1, [1, 2, 3 + seed], SAMPLED, seed=seed, acceptance=rule)


def test_a_draft_with_weights_ends_by_nothing_that_was_drawn() -> None:
    lengths = set()
    for seed in range(12):
        assert leaves_by_its_laws(weighing(seed), UNSURE), seed
        lengths |= {len(piece.ids) for piece in drafted_with(weighing(seed), UNSURE)[0]}
    assert lengths == {1, 4}


def test_what_one_step_says_to_a_stream_is_one_flush() -> None:
    harness = DraftHarness()
    harness.run(*(new_open(i, [i, i + 1]) for i in range(4)), *(credit(i, 6) for i in range(4)))
    assert [len(flush) for flush in harness.flushes] == [4]


def test_prompts_are_computed_in_chunks_and_shared() -> None:
    harness = DraftHarness(max_rows=16, batch_invariant=False)
    first = harness.ids(new_open(1, range(40)), credit(1, 44))
    assert [len(batch[0].token_ids) for batch in harness.batches][:3] == [16, 16, 8]
    before = len(harness.computed)
    assert harness.ids(new_open(2, range(40)), credit(2, 44)) == first
    assert len(harness.computed) - before == 8 + 3  # two blocks were found


def test_a_fork_takes_the_prompt_and_waits_for_its_blocks() -> None:
    harness = DraftHarness()
    child = Open(2, (), GREEDY, fork_of=1, completion=1)
    pieces = harness.run(new_open(1, range(33)), child, credit(1, 37), credit(2, 37))
    ids = {piece.sequence_id: piece.ids for piece in pieces if isinstance(piece, DraftTokens)}
    assert ids[1] == ids[2]
    assert len(harness.computed) == 33 + 3 + 1 + 3
    failed = harness.run(Close(1), Close(2), Open(3, (), GREEDY, fork_of=1))
    assert isinstance(failed[-1], Failure) and failed[-1].reason == "PARENT_GONE"


def test_a_full_context_is_told_and_a_long_prompt_refused() -> None:
    harness = DraftHarness(max_model_len=20)
    assert harness.ids(new_open(1, range(16)), credit(1, 40, 8)) == [(*_chain(harness, 16),)]
    chain = harness.events[-1].ids  # type: ignore[union-attr]
    assert harness.run(commit(1, 16, *chain)) == [DraftTokens(1, 0, 20, ())]
    assert harness.run(commit(1, 20, 5)) == [DraftTokens(1, 1, 21, ())]
    (failure,) = harness.run(new_open(2, range(20)))
    assert isinstance(failure, Failure) and (failure.code, failure.reason) == (11, "CONTEXT_TOO_SHORT")
    small = DraftHarness(num_blocks=1)
    assert [len(ids) for ids in small.ids(new_open(1, range(12)), credit(1, 40, 8))] == [4]


def _chain(harness: DraftHarness, length: int) -> list[int]:
    draft = harness.engine.sequences[STREAM, 1]
    return draft.sequence.tokens[length:]


def test_when_blocks_run_out_those_without_credit_give_theirs() -> None:
    harness, alone = DraftHarness(num_blocks=4), DraftHarness()
    prompts = {1: range(3, 33), 2: range(40, 70)}
    expected = {i: alone.ids(new_open(i, prompt), credit(i, 38)) for i, prompt in prompts.items()}
    assert harness.ids(new_open(1, prompts[1]), credit(1, 34)) == expected[1][:1]
    assert harness.ids(new_open(2, prompts[2]), credit(2, 38)) == expected[2]  # needs three of four blocks
    assert harness.engine.sequences[STREAM, 1].sequence.block_table == []
    assert harness.ids(credit(1, 38)) == expected[1][1:]
    harness.check()


def test_of_those_with_credit_the_oldest_advances() -> None:
    harness, alone = DraftHarness(num_blocks=4), DraftHarness()
    requests = [new_open(i, range(i, i + 24)) for i in (1, 2, 3)]
    expected = {r.sequence_id: alone.ids(r, credit(r.sequence_id, 40)) for r in requests}
    pieces = harness.run(*requests, *(credit(r.sequence_id, 40) for r in requests))
    got = {i: [p.ids for p in pieces if isinstance(p, DraftTokens) and p.sequence_id == i] for i in expected}
    assert got == expected
    assert [p.sequence_id for p in pieces if not getattr(p, "more", True)] == [1, 2, 3]
    harness.check()


def test_a_row_that_is_not_finite_ends_the_chain_only() -> None:
    harness = DraftHarness()
    forward = harness.method.proposer.runner.forward

    def broken(entries: Any) -> torch.Tensor:
        logits = forward(entries)
        if any(entry.start + len(entry.token_ids) == 6 for entry in entries):
            logits[0] = float("nan")
        return logits

    harness.method.proposer.runner.forward = broken  # type: ignore[method-assign]
    for sequence_id, sampling in enumerate((GREEDY, SAMPLED)):
        pieces = harness.run(new_open(sequence_id, [1, 2, 3], sampling), credit(sequence_id, 20))
        assert [len(piece.ids) for piece in pieces if isinstance(piece, DraftTokens)] == [3]
        ids = pieces[0].ids  # type: ignore[union-attr]
        assert harness.run(commit(sequence_id, 3, *ids)) == [DraftTokens(sequence_id, 0, 6, ())]
        assert [len(i) for i in harness.ids(commit(sequence_id, 6, 9), credit(sequence_id, 12))] == [4, 4, 4, 1]


def test_ngrams_need_no_forward() -> None:
    harness = DraftHarness()
    pieces = harness.run(new_open(1, [1, 2, 3, 4, 1, 2], method="ngram"), credit(1, 12))
    assert [(p.position, p.ids, p.weights, p.more) for p in pieces if isinstance(p, DraftTokens)] == [
        (6, (3, 4, 1, 2), (), True), (10, (3, 4), (), False),
    ]  # fmt: skip
    assert harness.run(commit(1, 6, 3, 9), credit(1, 14)) == [DraftTokens(1, 1, 8, ())]
    assert harness.run(credit(1, 15)) == []  # told once per commit
    assert harness.run(commit(1, 8, 8)) == [DraftTokens(1, 2, 9, ())]
    assert harness.ids(commit(1, 9, 1, 2), credit(1, 15)) == [(3, 9, 8, 1)]
    assert not harness.batches
    far = harness.run(credit(1, 2**32 - 1, 128))
    assert sum(len(piece.ids) for piece in far if isinstance(piece, DraftTokens)) == MAX_AHEAD - 4
    assert [piece.more for piece in far if isinstance(piece, DraftTokens)][-1] is False


def test_a_method_learns_from_what_any_method_drafted() -> None:
    learner = LastToken()
    harness = DraftHarness(more=[learner])
    harness.run(new_open(1, [1, 2, 3], salt="mine"), credit(1, 8), new_open(2, [4, 5], method="last_token"))
    assert harness.ids(credit(2, 5)) == [(5, 5, 5)]
    harness.run(commit(1, 3, 9, 8), commit(2, 2, 5, 6), new_open(3, [7]))
    assert not learner.learned
    harness.run(Close(1), Close(3))
    harness.engine.handle(Detach(STREAM))
    assert learner.learned == [
        ([1, 2, 3, 9, 8], SequenceContext(3, "mine")),
        ([4, 5, 5, 6], SequenceContext(2)),
    ]  # of the third nothing was committed
    assert not learner.closed
    harness.engine.close()
    assert learner.closed


@pytest.mark.parametrize("ids", [(), (1,) * 99, (-1,), (2**32,)])
def test_a_method_that_fails_ends_its_own_sequence_alone(ids: tuple[int, ...]) -> None:
    harness = DraftHarness(more=[Broken(*ids)])
    harness.send(new_open(1, [1, 2, 3, 1, 2], method="ngram"), credit(1, 8), new_open(2, [4], method="broken"))
    harness.send(credit(2, 5))
    with pytest.raises((RuntimeError, ValueError)) as raised:
        harness.run()
    harness.engine.on_error(raised.value)
    harness.run()
    assert [event.sequence_id for event in harness.events if isinstance(event, Failure)] == [2]
    assert [event.sequence_id for event in harness.events if isinstance(event, DraftTokens) and event.ids] == [1]
    assert not [event for event in harness.run(Close(1)) if isinstance(event, Failure)]


def failure_of(harness: DraftHarness, *messages: Any) -> Failure:
    failures = [event for event in harness.run(*messages) if isinstance(event, Failure)]
    return failures[0]


def test_what_cannot_be_served_fails_alone() -> None:
    harness = DraftHarness(max_sequences=2)
    unknown = failure_of(harness, new_open(1, [1, 2], method="eagle"))
    assert unknown.code == 5 and "draft_model, ngram" in unknown.message
    assert failure_of(harness, new_open(2, [1, 97])).reason == "UNKNOWN_TOKEN"
    assert failure_of(harness, new_open(3, [1], SamplingParams(allowed_token_ids=(200,)))).code == 3
    assert failure_of(harness, new_open(4, [1, 2]), commit(4, 3, 5)).reason == "COMMIT_GAP"
    assert failure_of(harness, new_open(5, [1, 2]), commit(5, 2, 97)).reason == "UNKNOWN_TOKEN"
    busy = failure_of(harness, new_open(6, [1]), new_open(7, [1]), new_open(8, [1]))
    assert busy.sequence_id == 8 and busy.code == 8 and busy.retry_after_ms > 0
    assert len(harness.ids(credit(6, 5), credit(4, 9))) == 1  # what failed is gone, the rest goes on
    harness.check()


def test_no_more_is_drafted_for_than_there_is_room_for() -> None:
    harness = DraftHarness(max_open_tokens=100)
    first, second = SamplingParams(max_tokens=60), SamplingParams(max_tokens=40)
    full = failure_of(harness, new_open(1, [1, 2], first), new_open(2, [1], second))
    assert (full.sequence_id, full.code, full.reason) == (2, 8, "BUSY") and full.retry_after_ms > 0
    harness.run(Close(1))
    assert not [event for event in harness.run(new_open(3, [1], second)) if isinstance(event, Failure)]
    harness.check()


def test_time_runs_out() -> None:
    harness = DraftHarness()
    harness.run(new_open(1, [1, 2], timeout_ms=60_000))
    wait = harness.engine.step(time.monotonic())
    assert wait is not None and 0 < wait <= 60
    harness.engine.step(time.monotonic() + 61)
    (failure,) = [event for event in harness.events if isinstance(event, Failure)]
    assert failure.code == 4 and not harness.engine.sequences


def test_close_and_the_end_of_a_stream_release() -> None:
    harness = DraftHarness()
    free = harness.method.cache.pool.num_free
    harness.run(new_open(1, range(20)), new_open(2, range(9)), credit(1, 24), credit(2, 24))
    assert harness.run(Close(1), commit(1, 20, 3), credit(1, 99)) == [Closed(1)]
    harness.engine.handle(Detach(STREAM))
    harness.send(credit(2, 99))
    assert harness.run() == [] and not harness.engine.sequences
    assert harness.method.cache.pool.num_free == free
    harness.check()


def test_a_failed_step_fails_its_sequences_only() -> None:
    harness = DraftHarness()
    harness.run(new_open(1, [1, 2]), new_open(2, [3, 4]))
    forward = harness.method.proposer.runner.forward
    harness.method.proposer.runner.forward = None  # type: ignore[assignment, method-assign]
    harness.send(credit(1, 5))
    with pytest.raises(TypeError) as caught:
        harness.engine.step(time.monotonic())
    harness.engine.on_error(caught.value)
    failure = harness.events[-1]
    assert isinstance(failure, Failure) and (failure.sequence_id, failure.code) == (1, 13)
    harness.method.proposer.runner.forward = forward  # type: ignore[method-assign]
    assert [len(ids) for ids in harness.ids(credit(2, 6))] == [4]
    harness.check()


def test_of_a_failed_step_only_the_sequence_that_fails_alone_ends() -> None:
    def pieces(bad: int) -> dict[int, list[tuple[int, ...]]]:
        """Of the sequences whose prompt does not begin with `bad`, as a device thread would run the engine."""
        harness = DraftHarness()
        forward = harness.method.proposer.runner.forward

        def fragile(entries: Sequence[BatchEntry]) -> torch.Tensor:
            if any(entry.start == 0 and entry.token_ids[0] == bad for entry in entries):
                raise RuntimeError("injected")
            return forward(entries)

        harness.method.proposer.runner.forward = fragile  # type: ignore[method-assign]
        harness.send(*(new_open(number, [10 + number, 3, 4]) for number in range(1, 6)))
        harness.send(*(credit(number, 9) for number in range(1, 6)))
        wait: float | None = 0.0
        while wait == 0.0:
            try:
                wait = harness.engine.step(time.monotonic())
            except RuntimeError as error:
                harness.engine.on_error(error)
        harness.check()
        failed = [event.sequence_id for event in harness.events if isinstance(event, Failure)]
        assert failed == ([bad - 10] if bad else [])
        drafted: dict[int, list[tuple[int, ...]]] = {number: [] for number in range(1, 6)}
        for event in harness.events:
            if isinstance(event, DraftTokens):
                drafted[event.sequence_id].append(event.ids)
        return drafted

    clean = pieces(bad=0)
    assert all(clean.values())
    assert pieces(bad=13) == clean | {3: []}


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_a_step_that_fails_before_all_weights_are_noted_is_rolled_back(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token leaves with the weights that it was drawn from."""
    calls, weights_of = 0, chains._weights_of

    def fragile(drafted: DraftedToken) -> TokenWeights | None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("injected")
        return weights_of(drafted)

    def pieces(harness: DraftHarness) -> list[DraftTokens]:
        harness.send(*(new_open(number, [10 + number, 3, 4], SAMPLED, seed=number) for number in (1, 2, 3)))
        harness.send(*(credit(number, 11) for number in (1, 2, 3)))
        wait: float | None = 0.0
        while wait == 0.0:
            try:
                wait = harness.engine.step(time.monotonic())
            except RuntimeError as error:
                harness.engine.on_error(error)
        harness.check()
        found = [replace(event, draft_us=0) for event in harness.events if isinstance(event, DraftTokens)]
        return sorted(found, key=lambda piece: (piece.sequence_id, piece.position))

    clean = pieces(DraftHarness())
    monkeypatch.setattr(chains, "_weights_of", fragile)
    assert [len(piece.weights) for piece in clean] == [4] * 6 and pieces(DraftHarness()) == clean


def test_a_bug_before_a_step_is_planned_fails_what_is_open_and_leaves_the_engine_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, prompt, window = DraftHarness(), list(range(3, 24)), 4
    harness.send(new_open(1, prompt), credit(1, len(prompt) + window, window))
    with monkeypatch.context() as patch:
        patch.setattr(harness.engine.scheduler, "plan", lambda drafts: [][0])
        with pytest.raises(IndexError) as raised:
            harness.engine.step(0.0)
    harness.engine.on_error(raised.value)
    assert [event.sequence_id for event in harness.events if isinstance(event, Failure)] == [1]
    assert not harness.engine.sequences and harness.engine.step(0.0) is None
    assert harness.ids(new_open(2, prompt), credit(2, len(prompt) + window, window))


def test_what_is_kept_of_texts_is_of_one_vocabulary() -> None:
    """A draft of two targets: the same ids are other words to them."""
    draft = DraftHarness(more=[SuffixProposer(suffix_decoding_min_token_prob=0.0)])
    prompt, drafted = (11, 12, 13, 14), []
    for number, fingerprint in enumerate(("one", "other", "one"), start=1):
        opened = new_open(number, prompt, method="suffix", tokenizer_fingerprint=fingerprint)
        drafted.append(draft.ids(opened, credit(number, len(prompt) + 4, 4)))
        draft.run(commit(number, len(prompt), 21, 22, 23), Close(number))
    assert [any(ids) for ids in drafted] == [False, False, True]
