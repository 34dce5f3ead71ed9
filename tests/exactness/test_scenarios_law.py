"""Bugs of other speculative decoders, each a scenario: those that bend the law of the tokens. Verified windows are
enumerated through the target's own judging; their distance from plain decoding is exactly 0, and with the bug it is
not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness.scenario_law import VOCAB, Ids, Toy, honest
from torch import Tensor

from outrider.kernels.sampling.reference import draft_sample, draw_integer, logits_to_probs
from outrider.kernels.types import DraftWeights, RowSampling, Windows
from outrider.kernels.verify.reference import coupled_accept
from outrider.rpc.codec import decode_piece, encode_piece
from outrider.rpc.messages import Piece, TokenWeights
from outrider.target_service import verifier

ACCEPT = verifier.accept
BUG = pytest.mark.parametrize("bug", [False, True], ids=["as it is", "the bug is seen"])


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small tensors gain nothing from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def put(monkeypatch: pytest.MonkeyPatch, bug: bool, **functions: Any) -> None:
    """Replaces functions that the verifier calls."""
    for name, function in functions.items() if bug else ():
        monkeypatch.setattr(verifier, name, function)


RAW = [(9, 3, 2, 2), (2, 6, 2, 6), (2, 2, 3, 9), (6, 2, 6, 2)]
KEPT = [(3, 1, 0, 0), (0, 1, 0, 1), (0, 0, 1, 3), (1, 0, 1, 0)]  # what top_p, or top_k, leaves of them


@BUG
@pytest.mark.parametrize("sampling", [{"top_p": 0.7}, {"top_k": 2}], ids=["top_p", "top_k"])
def test_scenario_01_target_probs_are_processed(
    sampling: dict[str, Any], bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1: the target's probabilities are taken unprocessed, while the draft's are processed: tokens that were cut off
    come back."""
    toy = Toy(RAW, KEPT, **sampling)
    put(monkeypatch, bug, process=lambda logits, plans: logits_to_probs(logits, RowSampling()))
    law, plain = toy.verified_law(monkeypatch), toy.plain_law()
    leaked = [ids for ids, share in law.items() if share > 0 and plain[ids] == 0]
    assert (toy.distance(monkeypatch) > 0) == bool(leaked) == bug


def rounded_after_the_draw(weights: Ids, _: int) -> TokenWeights:
    """The draft drew from more bits than it sends."""
    return honest(tuple(max(weight, 2) for weight in weights), 0)


@BUG
def test_scenario_06_tokens_are_drawn_from_what_crosses_the_wire(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """6: tokens are drawn in one precision and judged by probabilities in another."""
    assert (Toy().distance(monkeypatch, rounded_after_the_draw if bug else honest) > 0) == bug
    # And in production: over every point that a draw can start from, ids come up as often as their weights say.
    probs = torch.tensor([[0.4, 0.3, 0.1234, 0.1, 0.0766]]).bfloat16().float()
    samples = draft_sample(probs, torch.zeros(1, 4, dtype=torch.int64))
    ids, weights, total = samples.entry_ids, samples.entry_weights, int(samples.entry_weights.sum())
    piece = Piece(1, 0, 1, (int(samples.token_ids),), (TokenWeights.of(ids.tolist(), weights.tolist()),))
    assert decode_piece(encode_piece(piece)) == piece
    points = [-(-(index << 64) // total) for index in range(total)]
    words = torch.tensor([[point >> 32, point & 0xFFFFFFFF] for point in points])
    if bug:
        drawn = ids[torch.searchsorted(probs.double().cumsum(1)[0], words[:, 0].double() * 2.0**-32).clamp(max=4)]
    else:
        starts = torch.arange(total + 1) * len(ids)
        drawn = draw_integer(ids.repeat(total), weights.repeat(total), starts, words)
    assert (torch.bincount(drawn, minlength=len(ids)).tolist() == weights.tolist()) == (not bug)


def at_most_instead_of_below(probs: Tensor, windows: Windows, ids: Tensor, weights: DraftWeights, coins: Tensor) -> Any:
    return ACCEPT(probs, windows, ids, weights, coins - 2.0**-30)


@BUG
@pytest.mark.parametrize("send", [honest, lambda *_: None], ids=["weights", "one-hot"])
def test_scenario_07_the_least_coin_accepts_no_impossible_token(
    send: Any, bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7: a token of probability zero is accepted when the coin is 0, because the comparison is not strict."""
    toy, weights = Toy([(4, 4, 8, 0), (0, 6, 4, 6)]), (1, 1, 1, 1)
    put(monkeypatch, bug, accept=at_most_instead_of_below)
    coin_zero = (-0.5, -0.5)  # of a cell
    cases = [((3, other), (send(weights, 3), send(weights, other)), coin_zero) for other in range(VOCAB)]
    counts = [num_accepted for num_accepted, _ in toy.judge(monkeypatch, cases)]
    assert (max(counts) > 0) == bug and len(counts) == 4


def one_hot_residual(probs: Tensor, windows: Windows, ids: Tensor, weights: DraftWeights, coins: Tensor) -> Any:
    num_accepted, _ = ACCEPT(probs, windows, ids, weights, coins)
    left = probs[windows.next_rows(num_accepted)].double()
    refused = (num_accepted < windows.num_drafted).nonzero().squeeze(1)
    left[refused, ids[(windows.draft_starts + num_accepted)[refused]]] = 0
    return num_accepted, left


@BUG
def test_scenario_08_the_residual_fits_the_acceptance(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8: tokens are accepted by min(1, target / draft), and the recovered one is drawn as if the draft were one-hot."""
    put(monkeypatch, bug, accept=one_hot_residual)
    assert (Toy().distance(monkeypatch) > 0) == bug
    assert Toy().distance(monkeypatch, lambda *_: None) == 0  # for a one-hot draft that residual is right


def accept_by_equality(probs: Tensor, windows: Windows, ids: Tensor, weights: DraftWeights, coins: Tensor) -> Any:
    """The target's own token decides, drawn by the coin; where it differs, the residual is drawn instead of it."""
    own = torch.searchsorted(probs[windows.row_of_draft].double().cumsum(1), coins[:, None]).squeeze(1)
    return ACCEPT(probs, windows, ids, weights, torch.where(own == ids, 0.0, 1e9).double())


@BUG
def test_scenario_09_acceptance_by_equality_has_no_residual(bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """9: tokens are accepted if the target drew the same, and else a residual is drawn instead of the target's own."""
    put(monkeypatch, bug, accept=accept_by_equality)
    assert (Toy().distance(monkeypatch) > 0) == bug
    # Coupling, which does accept by equality, has no residual: its recovered token is the very one that differed.
    choices, drafted = torch.tensor([1, 2, 3]), torch.tensor([1, 0])
    assert [part.tolist() for part in coupled_accept(choices, Windows.of([2]), drafted)] == [[1], [2]]


def residual_of_the_row_after(
    probs: Tensor, windows: Windows, ids: Tensor, weights: DraftWeights, coins: Tensor
) -> Any:
    num_accepted, right = ACCEPT(probs, windows, ids, weights, coins)
    all_refused = torch.full_like(coins, 1e9)
    _, wrong = ACCEPT(probs.roll(-1, 0), windows, ids, weights, all_refused)
    return num_accepted, torch.where((num_accepted == 0)[:, None], wrong, right)


@BUG
@pytest.mark.parametrize("send", [honest, lambda *_: None], ids=["weights", "one-hot"])
def test_scenario_10_the_residual_is_of_the_refused_row(send: Any, bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """10: the recovered token is drawn from the row after the refused one: a token is silently left out."""
    put(monkeypatch, bug, accept=residual_of_the_row_after)
    assert (Toy().distance(monkeypatch, send) > 0) == bug
