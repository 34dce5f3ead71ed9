"""Bugs that other speculative decoders had, each a scenario by its number: processors, masks and log probabilities
inside a window; the draft's probabilities on their way to the acceptance; rows that are no numbers, and weights that
are no law."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lossless.scenarios import CounterLog, Pair, forced, plain_outputs, prompt_of, run_rounds, target_model
from scipy.stats import chisquare
from support.engines import COUPLED, GRAMMAR_EOS, DraftHarness, TargetHarness, grammars_at_once, opened
from torch import Tensor

from outrider.draft_service import chains
from outrider.engine.batch import BatchEntry
from outrider.engine.model_runner import ModelRunner
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept, accept_uniforms, draw
from outrider.rpc.codec import PIECE
from outrider.rpc.messages import Close, Credit, DraftTokens, Open, TokenWeights
from outrider.rpc.words.answer import PositionLogprobs
from outrider.rpc.words.sampling_params import FinishReason, LogprobsMode
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service import verifier
from outrider.target_service.verifier import HostVerifier

COUPLING: dict[str, Any] = {"temperature": 0.8, "acceptance": COUPLED}
RULES = pytest.mark.parametrize("rule", [{}, COUPLING], ids=["greedy", "coupled"])
REPEATS = (7, 8, 9, 10) * 5


def outputs_by_k(request: Open, reference: Sequence[int], ks: Sequence[int] = (1, 2, 4, 8)) -> list[list[int]]:
    """With whole windows, and with windows that end at every offset."""
    outputs = []
    for k in ks:
        for kept in (lambda _, k=k: k, lambda n, k=k: n % (k + 1)):
            draft = forced(reference, len(request.prompt_ids), kept)
            outputs.append(run_rounds(TargetHarness.of(target_model()), [request], {1: draft}, k)[1])
    return outputs


PENALTIES = [
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"repetition_penalty": 2.0},
    {"repetition_penalty": 0.5},
]


@RULES
@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_scenario_18_penalties_count_the_drafted_tokens(penalty: dict[str, float], rule: dict[str, Any]) -> None:
    """18: penalties are computed once per round and ignore the tokens inside the window."""
    request = opened(1, REPEATS, max_tokens=18, seed=1, **rule, **penalty)
    reference = plain_outputs(target_model(), [request])[1]
    assert reference != plain_outputs(target_model(), [opened(1, REPEATS, max_tokens=18, seed=1, **rule)])[1]
    outputs = outputs_by_k(request, reference, (1, 3, 8))
    assert all(output == reference for output in outputs)


def expected_logprobs(tokens: Sequence[int], start: int, mode: LogprobsMode) -> list[Tensor]:
    """Of every id, for each output token, computed one by one from fresh passes in float64."""
    values = []
    for position in range(start, len(tokens)):
        runner = ModelRunner(target_model().model, 8)
        logits = runner.forward([BatchEntry(tokens[:position], 0, list(range(8)), 1)])[0].double()
        if mode.value.startswith("processed"):
            logits = logits / 0.8
            logits = logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)
        values.append(logits.log_softmax(0) if mode.value.endswith("logprobs") else logits)
    return values


@pytest.mark.parametrize("mode", LogprobsMode, ids=lambda mode: mode.value)
def test_scenario_19_log_probabilities_are_plain_decodings(mode: LogprobsMode) -> None:
    """19: log probabilities are zero, or another row's, under speculation. Each equals plain decoding's, to the bit,
    and what a fresh pass gives."""
    request = opened(1, prompt_of(1), max_tokens=16, seed=3, top_k=20, logprobs=4, logprobs_mode=mode, **COUPLING)
    plain = TargetHarness.of(target_model())
    reference = plain.decode_plain(1, request)
    expected = logprobs_of(plain)
    for row, token, fresh in zip(
        expected, reference, expected_logprobs([*request.prompt_ids, *reference], 20, mode), strict=True
    ):
        best = fresh.topk(4).indices.tolist()
        assert [candidate.id for candidate in row] == [token, *(i for i in best if i != token)][: len(row)]
        assert all(abs(candidate.logprob - float(fresh[candidate.id])) < 1e-4 for candidate in row)
    for k in (1, 3, 8):
        harness = TargetHarness.of(target_model())
        assert run_rounds(harness, [request], {1: forced(reference, 20, lambda n, k=k: n % (k + 1))}, k)[1] == reference
        assert logprobs_of(harness) == expected


def logprobs_of(harness: TargetHarness) -> list[PositionLogprobs]:
    return [row for commit in harness.commits(1) for row in commit.logprobs]


EOS, STOP = 2, 3


@RULES
def test_scenario_25_min_tokens_and_bad_words_hold_inside_a_window(rule: dict[str, Any]) -> None:
    """25: what constrains the next token is not moved on, or not rolled back, with the draft; min_tokens is ignored. A
    model that wants to end at once ends exactly when it may, for every k."""
    request = opened(
        1, prompt_of(5), seed=5, max_tokens=30, min_tokens=11, stop_token_ids=(STOP,),
        logit_bias={EOS: 7.0, STOP: 7.0, 20: 6.0, 21: 6.0}, bad_words_ids=((20, 20), (21, 21), (20, 21, 20)), **rule,
    )  # fmt: skip
    plain = TargetHarness.of(target_model(), eos_ids=(EOS,))
    reference = plain.decode_plain(1, request)
    assert 12 <= len(reference) < 20 and plain.commits(1)[-1].finish_reason == FinishReason.STOP
    assert not {EOS, STOP} & set(reference[:11]) and {20, 21} <= set(reference)
    alike = []
    for k in (1, 2, 4, 8):
        for wrong in (EOS, STOP, 21):
            harness = TargetHarness.of(target_model(), eos_ids=(EOS,))
            draft = tempted(reference, len(request.prompt_ids), wrong)
            alike.append(run_rounds(harness, [request], {1: draft}, k)[1] == reference)
    assert all(alike)


def tempted(reference: Sequence[int], prompt_len: int, wrong: int) -> Any:
    """Drafts the reference, and at every fourth position what must not be taken there."""

    def draft(tokens: list[int], k: int) -> tuple[list[int], list[Any]]:
        done = len(tokens) - prompt_len
        ahead = [*reference[done : done + k], *([wrong] * k)][:k]
        return [wrong if (done + index) % 4 == 3 else token for index, token in enumerate(ahead)], []

    return draft


def test_scenario_25_a_grammar_is_refused_rather_than_ignored() -> None:
    """25, where a target has no tokenizer: a request for one fails by name."""
    harness = TargetHarness.of(target_model(batch_invariant=False))
    harness.send(opened(1, (3, 4), max_tokens=4, structured_output=StructuredOutput(regex="[ab]+")), Credit(1, 9, 0))
    harness.run()
    assert "structured_output" in harness.failures(1)[0].message and not harness.output(1)


def test_scenario_25_a_grammars_state_moves_and_rolls_back_with_the_draft() -> None:
    """25: constrained greedy output is the same for every k, and a state rolled back is the state that was."""
    request = opened(1, prompt_of(1), max_tokens=24, structured_output=StructuredOutput(regex="([ab]{2,3} ){4}"))

    def constrained() -> TargetHarness:
        return TargetHarness.of(target_model(), eos_ids=(GRAMMAR_EOS,), grammars=grammars_at_once())

    reference = constrained().decode_plain(1, request)
    alike = []
    for k in (1, 2, 4, 8):
        for kept in (lambda _, k=k: k, lambda n, k=k: n % (k + 1)):
            draft = forced(reference, len(request.prompt_ids), kept)
            alike.append(run_rounds(constrained(), [request], {1: draft}, k)[1] == reference)
    assert alike == [True] * 8


SAMPLED = {"temperature": 0.8, "max_tokens": 20}


def proposals(requests: list[Open], k: int, batch_invariant: bool = True) -> dict[int, DraftTokens]:
    """What a draft proposes first for each request, through the wire."""
    draft = DraftHarness(num_blocks=256, batch_invariant=batch_invariant)
    credits = [Credit(r.sequence_id, len(r.prompt_ids) + k, k) for r in requests]
    pieces = [event for event in draft.run(*requests, *credits) if isinstance(event, DraftTokens)]
    return {piece.sequence_id: through_the_wire(piece) for piece in pieces}


def through_the_wire(piece: DraftTokens) -> DraftTokens:
    decoded: DraftTokens = PIECE.decode(type(PIECE.encode(piece)).FromString(PIECE.encode(piece).SerializeToString()))
    return decoded


def probs_after(tokens: tuple[int, ...], noise: float) -> torch.Tensor:  # [vocab] float64
    runner = ModelRunner(target_model(noise=noise).model, 4)
    return (runner.forward([BatchEntry(tokens, 0, [0, 1, 2, 3], 1)])[0].double() / SAMPLED["temperature"]).softmax(0)


def test_scenario_02_draft_probs_reach_the_acceptance(prove: bool) -> None:
    """2: the draft's probabilities never arrive, and a fallback takes their place. The output stays right; the share of
    accepted tokens is then not the sum of min(target_probs, draft_probs)."""
    prompt, noise, num_accepted, total = prompt_of(1, 9), 0.03, 0, 4000 if prove else 400
    for first in range(0, total, 200):
        requests = [opened(number, prompt, seed=number, **SAMPLED) for number in range(first, first + 200)]
        pieces = proposals(requests, 1, batch_invariant=False)
        harness = TargetHarness.of(target_model(batch_invariant=False, noise=noise), num_blocks=256)
        for number, piece in pieces.items():
            assert piece.weights == pieces[first].weights  # of one prompt
            harness.send(requests[number - first], piece)
            harness.send(Credit(number, len(prompt) + 1, 1, 60_000))
        harness.run()
        num_accepted += sum(harness.commits(number)[0].num_accepted for number in pieces)
    expected = sum_of_minima(probs_after(prompt, noise), pieces[first])
    sigma = (total * expected * (1 - expected)) ** 0.5
    assert 0.2 < expected < 0.9 and abs(num_accepted - total * expected) <= 5 * sigma


def sum_of_minima(target_probs: torch.Tensor, piece: DraftTokens) -> float:
    (weights,) = piece.weights
    assert weights is not None
    ids, values = (
        torch.frombuffer(bytearray(part), dtype=torch.int32).long() for part in (weights.ids, weights.weights)
    )
    return float(torch.minimum(target_probs[ids], values.double() / values.sum()).sum())


def test_scenario_03_draft_probs_stay_with_their_sequence() -> None:
    """3: the batch is reordered or preempted between proposal and verification, and probabilities meet other tokens."""
    rng = random.Random(3)
    requests = [opened(number, prompt_of(number, 3 * number), seed=number, **SAMPLED) for number in range(1, 13)]
    pieces = proposals(requests, 4)

    def verified(some: list[Open], num_blocks: int) -> tuple[dict[int, tuple[Any, ...]], int]:
        harness, preempted = TargetHarness.of(target_model(noise=0.01), num_blocks=num_blocks), []
        preempt = harness.engine.scheduler.release
        harness.engine.scheduler.release = lambda target: (preempted.append(target), preempt(target))  # type: ignore
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
    num_preempted = 0
    for _ in range(3):
        together, preempted = verified(rng.sample(requests, len(requests)), 9)
        num_preempted += preempted
        assert len(together) == 11
        assert together == {number: alone[number] for number in together}
    assert num_preempted > 0


def test_scenario_04_draft_probs_are_not_changed_before_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """4: the draft's probabilities are changed in place, by its next step, before the target reads them."""
    sent: dict[int, bytes] = {}  # digests by object
    used: list[tuple[bytes, bytes]] = []  # at sending, and now
    weights_of, of = chains._weights_of, DraftWeights.of

    def note_sent(drafted: Any) -> TokenWeights | None:
        weights = weights_of(drafted)
        assert weights is not None
        sent[id(weights.ids)] = digest(weights.ids, weights.weights)
        return weights

    def note_used(vectors: Any) -> DraftWeights:
        used.extend((sent[id(vector[0])], digest(*vector)) for vector in vectors)
        return of(vectors)

    monkeypatch.setattr(chains, "_weights_of", note_sent)
    monkeypatch.setattr(verifier, "DraftWeights", SimpleNamespace(of=note_used))
    launch = HostVerifier.launch

    def unchanged(self: HostVerifier, logits: torch.Tensor, windows: Any, *masks: Any) -> Any:
        before = logits.clone()
        launched = launch(self, logits, windows, *masks)
        assert torch.equal(logits, before), "judging changed the logits"
        return launched

    monkeypatch.setattr(HostVerifier, "launch", unchanged)
    Pair(4, noise=0.01).generate([opened(number, prompt_of(number), seed=number, **SAMPLED) for number in range(5)])
    assert len(used) > 50 and all(before == now for before, now in used)


def digest(*parts: Any) -> bytes:
    return hashlib.sha256(b"|".join(bytes(part) for part in parts)).digest()


def test_scenario_05_draft_and_residual_share_no_noise(monkeypatch: pytest.MonkeyPatch, prove: bool) -> None:
    """5: the recovered token is drawn with the numbers that drew the draft. Seen by the counters that a run uses, and
    by chi-square on a narrow vocabulary with an adversarial draft."""
    log = CounterLog(monkeypatch)
    Pair(4, noise=0.03).generate([opened(number, prompt_of(number), seed=number, **SAMPLED) for number in range(3)])
    assert log.kinds() >= {"draft", "recovered"}
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
    uniforms = accept_uniforms(words(seeds, zeros, Purpose.ACCEPT, zeros))
    accepted, left = accept(
        target_probs, Windows.of([1] * num_draws, [1] * num_draws), samples.token_ids, weights, uniforms
    )
    drawn = draw(left, words(seeds, zeros, verifier.PURPOSES[verifier.RECOVERED], zeros))
    committed = torch.where(accepted == 1, samples.token_ids, drawn)
    observed = torch.bincount(committed, minlength=16).tolist()
    expected = (logits.double().softmax(0) * num_draws).tolist()
    assert chisquare(observed, expected).pvalue >= 1e-6


BROKEN = {"NaN": float("nan"), "infinity": float("inf")}
ONLY, OTHER, K = 7, 8, 3  # with ONLY allowed, it is always accepted and OTHER always refused


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("rule", [{}, COUPLING, {"temperature": 0.8}], ids=["greedy", "coupled", "rejection"])
def test_scenario_20_a_row_that_is_no_number_is_an_error_and_never_a_token(rule: dict[str, Any], value: str) -> None:
    """20: a NaN in a target's row becomes a token that looks valid. Here it stands in every row of a window, before and
    after the refused token: where the row decides, the sequence ends with an error, and its neighbour goes on."""
    outcomes = {
        (kept, bad): verify_with(rule, kept, bad, BROKEN[value]) for kept in range(K + 1) for bad in range(K + 1)
    }
    for (kept, bad), (failures, ids, neighbour) in outcomes.items():
        fails = bad <= kept
        assert failures == (["INVALID_LOGITS"] if fails else []), (kept, bad)
        assert ids == ([] if fails else [ONLY] * (kept + 1)) and len(neighbour) == 4


def verify_with(rule: dict[str, Any], kept: int, bad: int, value: float) -> tuple[list[str], list[int], list[int]]:
    """One window of which `kept` tokens hold, and whose row `bad` is broken; beside another sequence."""
    harness = TargetHarness.of(target_model(batch_invariant=False))
    forward = harness.engine._runner.forward

    def broken(entries: Sequence[BatchEntry]) -> Tensor:
        logits, end = forward(entries).clone(), 0
        for entry in entries:
            end += entry.num_logits
            if entry.token_ids[0] == 40:
                logits[end - entry.num_logits + bad, 50] = value
        return logits

    harness.engine._runner.forward = broken  # type: ignore[method-assign]
    options = {"max_tokens": 4, "allowed_token_ids": (ONLY,), **rule}
    drafted = tuple(ONLY if index < kept else OTHER for index in range(K))
    for number, first in ((1, 40), (2, 41)):
        harness.send(opened(number, (first, 3), **options), DraftTokens(number, 0, 2, drafted))
        harness.send(Credit(number, 2 + K + 1, K, 60_000))
    harness.run()
    failures = [failure.reason for failure in harness.failures(1)]
    harness.send(Credit(2, 100, 0))
    harness.run()
    return failures, harness.output(1), harness.output(2)


DRAFTED = 11
BAD_WEIGHTS = {
    "missing": None,
    "empty": TokenWeights(b"", b""),
    "a duplicate id": TokenWeights.of((11, 12, 12), (3, 1, 90)),
    "a zero weight": TokenWeights.of((11, 12), (0, 9)),
    "a negative weight": TokenWeights.of((11, 12), (9, 2**32 - 4)),
    "too great a total": TokenWeights.of((11, 12), (1 << 23, 1 << 23)),
    "an unknown id": TokenWeights.of((11, 300), (1, 9)),
    "without the drafted id": TokenWeights.of((12, 13), (1, 9)),
    "of unequal number": TokenWeights.of((11, 12), (9,)),
    "half a number": TokenWeights(b"\x0b\x00\x00\x00\x0c", b"\x01\x00\x00\x00\x09"),
}


def outcomes_with(weights: TokenWeights | None) -> list[tuple[tuple[int, ...], int]]:
    """Of sixty sequences that differ in the seed: what a window of one token commits, and how many are accepted."""
    harness = TargetHarness.of(target_model(batch_invariant=False), num_blocks=64)
    for seed in range(60):
        request = opened(seed, (3, 4, 5), temperature=1.0, logit_bias={DRAFTED: 5.5}, max_tokens=2, seed=seed)
        piece = through_the_wire(DraftTokens(seed, 0, 3, (DRAFTED,), (weights,)))
        harness.send(request, piece, Credit(seed, 5, 1, 60_000))
    harness.run()
    return [(commit.ids, commit.num_accepted) for seed in range(60) for commit in harness.commits(seed)[:1]]


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_scenario_21_unusable_draft_probs_make_the_token_one_hot(kind: str) -> None:
    """21: a draft's row of NaN, negative or unnormalised numbers makes the sampler emit the refused token again. Such
    weights count as none: the token is one-hot, and where it is refused another one follows."""
    outcomes = outcomes_with(BAD_WEIGHTS[kind])
    assert outcomes == outcomes_with(None) and len(outcomes) == 60
    assert 5 < sum(num_accepted for _, num_accepted in outcomes) < 55
    assert all(num_accepted == 1 or ids[0] != DRAFTED for ids, num_accepted in outcomes)


def test_scenario_21_a_draft_row_of_nan_ends_the_chain() -> None:
    """21, at its source: a draft proposes no token from a row that is no number, and goes on after the next commit."""
    requests = [opened(n, prompt_of(n), seed=n, max_tokens=16, **(COUPLING if n else {})) for n in range(3)]
    pair = Pair(4, noise=0.01)
    forward, calls = pair.draft.method.proposer.runner.forward, iter(range(10_000))

    def broken(entries: Sequence[BatchEntry]) -> Tensor:
        logits = forward(entries)
        return logits * float("nan") if next(calls) % 3 == 2 else logits

    pair.draft.method.proposer.runner.forward = broken  # type: ignore[method-assign]
    assert pair.generate(requests) == plain_outputs(target_model(noise=0.01), requests)
    assert {len(piece.ids) for piece in pair.pieces} <= {0, 1, 2} and pair.acceptance > 0
