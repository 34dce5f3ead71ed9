"""Bugs of other speculative decoders, each a scenario: the draft's probabilities on their way to the acceptance."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft.harness import Harness as DraftHarness
from exactness.scenario_counters import CounterLog
from exactness.scenario_kv import seen
from exactness.scenario_pair import Pair
from exactness.scenario_rounds import prompt_of, target_model
from scipy.stats import chisquare
from target_harness import Harness, opened

from outrider.draft_service import engine as draft_engine
from outrider.engine.batch import BatchEntry
from outrider.engine.model_runner import ModelRunner
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept, accept_uniforms, draw
from outrider.proposers import draft_model
from outrider.rpc.codec import decode_piece, encode_piece
from outrider.rpc.messages import Close, Credit, Open, Piece, TokenWeights
from outrider.target_service import verifier
from outrider.target_service import verifier as target_service_verifier
from outrider.target_service.verifier import Verifier

BUG = pytest.mark.parametrize("bug", [False, True], ids=["as it is", "the bug is seen"])
SAMPLED = {"temperature": 0.8, "max_tokens": 20}


def proposals(requests: list[Open], k: int, batch_invariant: bool = True) -> dict[int, Piece]:
    """What a draft proposes first for each request, through the wire."""
    draft = DraftHarness(num_blocks=256, batch_invariant=batch_invariant)
    credits = [Credit(r.sequence_id, len(r.prompt_ids) + k, k) for r in requests]
    pieces = [event for event in draft.run(*requests, *credits) if isinstance(event, Piece)]
    return {piece.sequence_id: through_the_wire(piece) for piece in pieces}


def through_the_wire(piece: Piece) -> Piece:
    return decode_piece(type(encode_piece(piece)).FromString(encode_piece(piece).SerializeToString()))


def probs_after(tokens: tuple[int, ...], noise: float) -> torch.Tensor:  # [vocab] float64
    runner = ModelRunner(target_model(noise=noise).model, 4)
    return (runner.forward([BatchEntry(tokens, 0, [0, 1, 2, 3], 1)])[0].double() / SAMPLED["temperature"]).softmax(0)


@BUG
def test_scenario_02_draft_probs_reach_the_acceptance(bug: bool, prove: bool) -> None:
    """2: the draft's probabilities never arrive, and a fallback takes their place. The output stays right; the share of
    accepted tokens is then not the sum of min(target_probs, draft_probs)."""
    prompt, noise, num_accepted, total = prompt_of(1, 9), 0.03, 0, 4000 if prove else 400
    for first in range(0, total, 200):
        requests = [opened(number, prompt, seed=number, **SAMPLED) for number in range(first, first + 200)]
        pieces = proposals(requests, 1, batch_invariant=False)
        harness = Harness.of(target_model(batch_invariant=False, noise=noise), num_blocks=256)
        for number, piece in pieces.items():
            assert piece.weights == pieces[first].weights  # of one prompt
            harness.send(requests[number - first], replace(piece, weights=()) if bug else piece)
            harness.send(Credit(number, len(prompt) + 1, 1, 60_000))
        harness.run()
        num_accepted += sum(harness.commits(number)[0].num_accepted for number in pieces)
    expected = sum_of_minima(probs_after(prompt, noise), pieces[first])
    sigma = (total * expected * (1 - expected)) ** 0.5
    assert 0.2 < expected < 0.9 and (abs(num_accepted - total * expected) > 5 * sigma) == bug


def sum_of_minima(target_probs: torch.Tensor, piece: Piece) -> float:
    (weights,) = piece.weights
    assert weights is not None
    ids, values = (
        torch.frombuffer(bytearray(part), dtype=torch.int32).long() for part in (weights.ids, weights.weights)
    )
    return float(torch.minimum(target_probs[ids], values.double() / values.sum()).sum())


@BUG
def test_scenario_03_draft_probs_stay_with_their_sequence(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """3: the batch is reordered or preempted between proposal and verification, and probabilities meet other tokens."""
    rng = random.Random(3)
    requests = [opened(number, prompt_of(number, 3 * number), seed=number, **SAMPLED) for number in range(1, 13)]
    pieces = proposals(requests, 4)

    def verified(some: list[Open], num_blocks: int) -> tuple[dict[int, tuple[Any, ...]], int]:
        harness, preempted = Harness.of(target_model(noise=0.01), num_blocks=num_blocks), []
        preempt = harness.engine.scheduler._preempt
        harness.engine.scheduler._preempt = lambda target: (preempted.append(target), preempt(target))  # type: ignore
        for request in some:
            harness.send(request, pieces[request.sequence_id])
        for request in rng.sample(some, len(some)):
            harness.send(Credit(request.sequence_id, len(request.prompt_ids) + 5, 4, 0))
        if len(some) > 1:
            harness.send(Close(some[0].sequence_id))  # one leaves the batch
        harness.run()
        firsts = {r.sequence_id: harness.commits(r.sequence_id)[:1] for r in some}
        return {number: (c.ids, c.num_accepted) for number, commits in firsts.items() for c in commits}, len(preempted)

    alone = {number: outcome for r in requests for number, outcome in verified([r], 16)[0].items()}
    assert {accepted for _, accepted in alone.values()} >= {0, 2, 4}
    if bug:
        rolled = SimpleNamespace(of=lambda vectors: DraftWeights.of(vectors[4:] + vectors[:4]))
        monkeypatch.setattr(verifier, "DraftWeights", rolled)
    num_preempted = 0
    for _ in range(3):
        together, preempted = verified(rng.sample(requests, len(requests)), 9)
        num_preempted += preempted
        assert len(together) == 11
        assert (together == {number: alone[number] for number in together}) == (not bug)
    assert num_preempted > 0


@BUG
def test_scenario_04_draft_probs_are_not_changed_before_their_use(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """4: the draft's probabilities are changed in place, by its next step, before the target reads them."""
    sent: dict[int, bytes] = {}  # digests by object
    used: list[tuple[bytes, bytes]] = []  # at sending, and now
    if bug:
        buffers, packed, calls = (bytearray(1 << 16), bytearray(1 << 16)), draft_model._packed, count()

        def into_one_buffer(values: torch.Tensor) -> memoryview:
            data, buffer = packed(values), buffers[next(calls) % 2]
            buffer[: len(data)] = data
            return memoryview(buffer)[: len(data)]

        monkeypatch.setattr(draft_model, "_packed", into_one_buffer)
    wire_weights, of = draft_engine._wire_weights, DraftWeights.of

    def note_sent(drafted: Any) -> TokenWeights | None:
        weights = wire_weights(drafted)
        assert weights is not None
        sent[id(weights.ids)] = digest(weights.ids, weights.weights)
        return weights

    def note_used(vectors: Any) -> DraftWeights:
        used.extend((sent[id(vector[0])], digest(*vector)) for vector in vectors)
        return of(vectors)

    monkeypatch.setattr(draft_engine, "_wire_weights", note_sent)
    monkeypatch.setattr(verifier, "DraftWeights", SimpleNamespace(of=note_used))
    verify = Verifier.verify

    def unchanged(self: Verifier, logits: torch.Tensor, judged: Any) -> Any:
        before = logits.clone()
        verdicts = verify(self, logits, judged)
        assert torch.equal(logits, before), "judging changed the logits"
        return verdicts

    monkeypatch.setattr(Verifier, "verify", unchanged)
    Pair(4, noise=0.01).generate([opened(number, prompt_of(number), seed=number, **SAMPLED) for number in range(5)])
    assert len(used) > 50 and any(before != now for before, now in used) == bug


def digest(*parts: Any) -> bytes:
    return hashlib.sha256(b"|".join(bytes(part) for part in parts)).digest()


@BUG
def test_scenario_05_draft_and_residual_share_no_noise(bug: bool, monkeypatch: pytest.MonkeyPatch, prove: bool) -> None:
    """5: the recovered token is drawn with the numbers that drew the draft. Seen by the counters that a run uses, and
    by chi-square on a narrow vocabulary with an adversarial draft."""
    log, recovered = CounterLog(monkeypatch), Purpose.DRAFT if bug else Purpose.RECOVERED
    monkeypatch.setattr(target_service_verifier, "PURPOSES", (Purpose.ACCEPT, recovered, Purpose.BONUS))
    Pair(4, noise=0.03).generate([opened(number, prompt_of(number), seed=number, **SAMPLED) for number in range(3)])
    assert log.kinds() >= {"draft", "recovered"}
    with seen(bug):
        log.check()
    monkeypatch.undo()
    num_draws = 1_000_000 if prove else 50_000
    logits = 1.2 * torch.randn(16, generator=torch.Generator().manual_seed(7))
    seeds, zeros = torch.arange(num_draws), torch.zeros(num_draws, dtype=torch.int64)
    target_probs = logits.softmax(0).expand(num_draws, -1)
    samples = draft_sample(
        (-logits).softmax(0).expand(num_draws, -1).contiguous(), words(seeds, zeros, Purpose.DRAFT, zeros)
    )
    starts = torch.diff(samples.entry_starts)
    weights = DraftWeights(samples.entry_ids, samples.entry_weights, torch.arange(num_draws).repeat_interleave(starts))
    coins = accept_uniforms(words(seeds, zeros, Purpose.ACCEPT, zeros))
    accepted, left = accept(
        target_probs, Windows.of([1] * num_draws, [1] * num_draws), samples.token_ids, weights, coins
    )
    drawn = draw(left, words(seeds, zeros, recovered, zeros))
    committed = torch.where(accepted == 1, samples.token_ids, drawn)
    observed = torch.bincount(committed, minlength=16).tolist()
    expected = (logits.double().softmax(0) * num_draws).tolist()
    assert (chisquare(observed, expected).pvalue < 1e-6) == bug
