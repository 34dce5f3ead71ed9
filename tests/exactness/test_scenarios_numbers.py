"""Bugs of other speculative decoders, each a scenario: rows that are no numbers, and weights that are no law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exactness.scenario_pair import Pair
from exactness.scenario_rounds import plain_outputs, prompt_of, target_model
from target_harness import COUPLED, Harness, opened
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.kernels.verify import reference as verify
from outrider.rpc.codec import decode_piece, encode_piece
from outrider.rpc.messages import Credit, Piece, TokenWeights
from outrider.target_service import verifier

BUG = pytest.mark.parametrize("bug", [False, True], ids=["as it is", "the bug is seen"])
COUPLING: dict[str, Any] = {"temperature": 0.8, "acceptance": COUPLED}
BROKEN = {"NaN": float("nan"), "infinity": float("inf")}
ONLY, OTHER, K = 7, 8, 3  # with ONLY allowed, it is always accepted and OTHER always refused


@BUG
@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("rule", [{}, COUPLING, {"temperature": 0.8}], ids=["greedy", "coupled", "rejection"])
def test_scenario_20_a_row_that_is_no_number_is_an_error_and_never_a_token(
    rule: dict[str, Any], value: str, bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20: a NaN in a target's row becomes a token that looks valid. Here it stands in every row of a window, before and
    after the refused token: where the row decides, the sequence ends with an error, and its neighbour goes on."""
    if bug:
        for name in ("process", "process_greedy"):
            function = getattr(verifier, name)
            monkeypatch.setattr(verifier, name, lambda rows, plans, f=function: f(rows.nan_to_num(0.0, 9.0), plans))
    outcomes = {
        (kept, bad): verify_with(rule, kept, bad, BROKEN[value]) for kept in range(K + 1) for bad in range(K + 1)
    }
    for (kept, bad), (failures, ids, neighbour) in outcomes.items():
        fails = bad <= kept and not bug
        assert failures == (["INVALID_LOGITS"] if fails else []), (kept, bad)
        assert ids == ([] if fails else [ONLY] * (kept + 1)) and len(neighbour) == 4


def verify_with(rule: dict[str, Any], kept: int, bad: int, value: float) -> tuple[list[str], list[int], list[int]]:
    """One window of which `kept` tokens hold, and whose row `bad` is broken; beside another sequence."""
    harness = Harness.of(target_model(batch_invariant=False))
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
        harness.send(opened(number, (first, 3), **options), Piece(number, 0, 2, drafted))
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
    harness = Harness.of(target_model(batch_invariant=False), num_blocks=64)
    for seed in range(60):
        request = opened(seed, (3, 4, 5), temperature=1.0, logit_bias={DRAFTED: 5.5}, max_tokens=2, seed=seed)
        piece = through_the_wire(Piece(seed, 0, 3, (DRAFTED,), (weights,)))
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


@pytest.mark.parametrize("kind", ["a duplicate id", "an unknown id"])
def test_scenario_21_a_target_that_believes_every_weight_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """21, with the bug."""
    right = outcomes_with(BAD_WEIGHTS[kind])
    monkeypatch.setattr(verify, "_bad_entries", lambda entries, _: torch.zeros(len(entries.ids), dtype=torch.bool))
    assert outcomes_with(BAD_WEIGHTS[kind]) != right


def through_the_wire(piece: Piece) -> Piece:
    return decode_piece(type(encode_piece(piece)).FromString(encode_piece(piece).SerializeToString()))


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
