"""The exact law of a window's outcome, through the target's own judging: every draft and every coin, in fractions.

A toy of four tokens and two drafted ones. The target's processed probabilities are quarters or eighths and the draft's
weights powers of two with total 4, so that every threshold of the acceptance test lies on an eighth: eight coins a
position, each in the middle of its cell, stand for all. The verifier gets logits, windows and weights as in a step;
only its coins and its last draw are replaced, the one by the enumeration, the other by the weights that it draws from.

Bugs that other speculative decoders had, each a scenario by its number: those that bend the law of the tokens. Its
distance from plain decoding is exactly 0. (tests/mutation/mutants.py puts such bugs into it.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from support.engines import opened
from torch import Tensor

from outrider.kernels.sampling.reference import draft_sample, draw_integer
from outrider.kernels.types import Windows
from outrider.kernels.verify.reference import coupled_accept
from outrider.rpc.codec import PIECE
from outrider.rpc.messages import DraftTokens, TokenWeights
from outrider.target_service import verifier as verifier_module
from outrider.target_service.draft_buffer import Window
from outrider.target_service.scheduler import ScheduledSequence
from outrider.target_service.sequence import TargetLimits, admit
from outrider.target_service.verifier import HostVerifier

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, K, LENGTH, CELLS = 4, 2, 3, 8
PROMPT = (0,)
Ids = tuple[int, ...]
Law = dict[Ids, Fraction]
Send = Callable[[Ids, int], TokenWeights | None]  # what is sent of the weights and the token drawn from them

TARGET_SIXTEENTHS = [(8, 4, 2, 2), (4, 4, 8, 0), (2, 2, 6, 6), (0, 6, 4, 6), (2, 2, 2, 10), (10, 0, 6, 0)]
WEIGHTS = [(1, 1, 2, 0), (2, 0, 1, 1), (0, 2, 0, 2), (1, 2, 1, 0), (0, 0, 0, 4)]


def honest(weights: Ids, _: int) -> TokenWeights:
    """The weights that the token was drawn from."""
    present = [(token, weight) for token, weight in enumerate(weights) if weight]
    return TokenWeights.of(*zip(*present, strict=True))


class Toy:
    """A target's law by context, raw (what the logits say) and processed (what is to be sampled)."""

    def __init__(
        self,
        raw: Sequence[Ids] = TARGET_SIXTEENTHS,
        processed: Sequence[Ids] | None = None,
        weights: Sequence[Ids] = WEIGHTS,
        **sampling: Any,
    ) -> None:
        self.raw, self.processed, self.weights = raw, processed or raw, weights
        self.sampling = {"temperature": 1.0, "max_tokens": 8, **sampling}

    def target(self, context: Ids) -> list[Fraction]:
        """What plain decoding samples from."""
        row = self.processed[_index(context, len(self.processed))]
        return [Fraction(part, sum(row)) for part in row]

    def logits(self, context: Ids) -> list[float]:
        """What the model says."""
        return torch.tensor(self.raw[_index(context, len(self.raw))]).double().log().tolist()

    def draft(self, context: Ids) -> Ids:
        """The weights that the draft draws from, of total 4."""
        return self.weights[_index(context, len(self.weights))]

    def plain_law(self) -> Law:
        """Of the first tokens, decoded one by one."""
        law: Law = {}
        for ids in product(range(VOCAB), repeat=LENGTH):
            law[ids] = Fraction(1)
            for place in range(LENGTH):
                law[ids] *= self.target(ids[:place])[ids[place]]
        return law

    def distance(self, monkeypatch: pytest.MonkeyPatch, send: Send = honest) -> Fraction:
        """Total variation between the law of verified windows and plain decoding's."""
        law, plain = self.verified_law(monkeypatch, send), self.plain_law()
        return sum((abs(law.get(ids, Fraction(0)) - share) for ids, share in plain.items()), Fraction(0)) / 2

    def verified_law(self, monkeypatch: pytest.MonkeyPatch, send: Send = honest) -> Law:
        """Of the first tokens, when windows of two are drafted, judged and then decoded on plainly."""
        cases = []
        for ids in product(range(VOCAB), repeat=K):
            drawn_from = [self.draft(ids[:place]) for place in range(K)]
            mass = Fraction(drawn_from[0][ids[0]] * drawn_from[1][ids[1]], 16 * CELLS**K)
            weights = tuple(send(drawn_from[place], ids[place]) for place in range(K)) if mass else ()
            cases += [(ids, weights, uniforms, mass) for uniforms in product(range(CELLS), repeat=K) if mass]
        outcomes: dict[tuple[Ids, tuple[Fraction, ...]], Fraction] = defaultdict(Fraction)
        for case, (num_accepted, row) in zip(cases, self.judge(monkeypatch, [case[:3] for case in cases]), strict=True):
            outcomes[case[0][:num_accepted], row] += case[3]
        law: Law = defaultdict(Fraction)
        for (accepted, row), mass in outcomes.items():
            for tail in product(range(VOCAB), repeat=LENGTH - len(accepted)):
                tokens, share = accepted + tail, mass * row[tail[0]]
                for place in range(len(accepted) + 1, LENGTH):
                    share *= self.target(tokens[:place])[tokens[place]]
                law[tokens] += share
        return law

    def judge(self, monkeypatch: pytest.MonkeyPatch, cases: Sequence[Any]) -> list[tuple[int, tuple[Fraction, ...]]]:
        """One call of the verifier: accepted tokens and the law of the next one, of every case."""
        windows = [_scheduled(index, ids, weights, self.sampling) for index, (ids, weights, _) in enumerate(cases)]
        logits = torch.tensor([self.logits(ids[:row]) for ids, _, _ in cases for row in range(K + 1)])
        uniforms = [(cell + 0.5) / CELLS for _, _, cells in cases for cell in cells]
        drawn_from: list[Tensor] = []

        def draw(weights: Tensor, words: Tensor) -> Tensor:
            drawn_from.append(weights)
            return weights.argmax(-1)

        with monkeypatch.context() as patch:
            patch.setattr(verifier_module, "accept_uniforms", lambda words: torch.tensor(uniforms).double())
            patch.setattr(verifier_module, "draw", draw)
            verified = HostVerifier(VOCAB).launch(logits.float(), windows).read()
        rows = [[Fraction(round(64 * weight), 64) for weight in row] for row in drawn_from[0].tolist()]
        return [
            (window.num_accepted, tuple(weight / sum(row) for weight in row))
            for window, row in zip(verified, rows, strict=True)
        ]


def _index(context: Ids, count: int) -> int:
    return int(sum((token + 1) * 7**place for place, token in enumerate(context)) % count)


def _scheduled(
    index: int, ids: Ids, weights: tuple[TokenWeights | None, ...], sampling: dict[str, Any]
) -> ScheduledSequence:
    """A window as it stands in a step of many sequences."""
    limits = TargetLimits(VOCAB, 64, (), 64)
    target = admit(opened(index, PROMPT, **sampling), None, (1, index), lambda _: None, limits, index, 0.0)
    window = Window(0, ids, weights, False)
    return ScheduledSequence(target, len(PROMPT), len(PROMPT) - 1, K + 1, window, True, K + 1, index * (K + 1))


RAW = [(9, 3, 2, 2), (2, 6, 2, 6), (2, 2, 3, 9), (6, 2, 6, 2)]
KEPT = [(3, 1, 0, 0), (0, 1, 0, 1), (0, 0, 1, 3), (1, 0, 1, 0)]  # what top_p, or top_k, leaves of them


@pytest.mark.parametrize("sampling", [{"top_p": 0.7}, {"top_k": 2}], ids=["top_p", "top_k"])
def test_scenario_01_target_probs_are_processed(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """1: the target's probabilities are taken unprocessed, while the draft's are processed: tokens that were cut off
    come back."""
    toy = Toy(RAW, KEPT, **sampling)
    law, plain = toy.verified_law(monkeypatch), toy.plain_law()
    leaked = [ids for ids, share in law.items() if share > 0 and plain[ids] == 0]
    assert toy.distance(monkeypatch) == 0 and not leaked


def test_scenario_06_tokens_are_drawn_from_what_crosses_the_wire() -> None:
    """6: tokens are drawn in one precision and judged by probabilities in another. Over every point that a draw can
    start from, ids come up as often as their weights say."""
    probs = torch.tensor([[0.4, 0.3, 0.1234, 0.1, 0.0766]]).bfloat16().float()
    samples = draft_sample(probs, torch.zeros(1, 4, dtype=torch.int64))
    ids, weights, total = samples.entry_ids, samples.entry_weights, int(samples.entry_weights.sum())
    piece = DraftTokens(1, 0, 1, (int(samples.token_ids),), (TokenWeights.of(ids.tolist(), weights.tolist()),))
    assert PIECE.decode(PIECE.encode(piece)) == piece
    points = [-(-(index << 64) // total) for index in range(total)]
    words = torch.tensor([[point >> 32, point & 0xFFFFFFFF] for point in points])
    starts = torch.arange(total + 1) * len(ids)
    drawn = draw_integer(ids.repeat(total), weights.repeat(total), starts, words)
    assert torch.bincount(drawn, minlength=len(ids)).tolist() == weights.tolist()


@pytest.mark.parametrize("send", [honest, lambda *_: None], ids=["weights", "one-hot"])
def test_scenario_07_the_least_coin_accepts_no_impossible_token(send: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """7: a token of probability zero is accepted when the coin is 0, because the comparison is not strict."""
    toy, weights = Toy([(4, 4, 8, 0), (0, 6, 4, 6)]), (1, 1, 1, 1)
    coin_zero = (-0.5, -0.5)  # of a cell
    cases = [((3, other), (send(weights, 3), send(weights, other)), coin_zero) for other in range(VOCAB)]
    counts = [num_accepted for num_accepted, _ in toy.judge(monkeypatch, cases)]
    assert counts == [0] * 4


@pytest.mark.parametrize("send", [honest, lambda *_: None], ids=["weights", "one-hot"])
def test_scenarios_08_and_10_the_residual_is_of_the_refused_row_and_fits_the_acceptance(
    send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8: tokens are accepted by min(1, target / draft), and the recovered one is drawn as if the draft were one-hot;
    10: or from the row after the refused one, so that a token is silently left out."""
    assert Toy().distance(monkeypatch, send) == 0


def test_scenario_09_acceptance_by_equality_has_no_residual() -> None:
    """9: tokens are accepted if the target drew the same, and else a residual is drawn instead of the target's own.
    Coupling, which does accept by equality, has none: its recovered token is the very one that differed."""
    choices, drafted = torch.tensor([1, 2, 3]), torch.tensor([1, 0])
    assert [part.tolist() for part in coupled_accept(choices, Windows.of([2]), drafted)] == [[1], [2]]
