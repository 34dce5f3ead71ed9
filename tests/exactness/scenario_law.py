"""The exact law of a window's outcome, through the target's own judging: every draft and every coin, in fractions.

A toy of four tokens and two drafted ones. The target's processed probabilities are quarters or eighths and the draft's
weights powers of two with total 4, so that every threshold of the acceptance test lies on an eighth: eight coins a
position, each in the middle of its cell, stand for all. The verifier gets logits, windows and weights as in a step;
only its coins and its last draw are replaced, the one by the enumeration, the other by the weights that it draws from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from target_harness import opened
from torch import Tensor

from outrider.rpc.messages import TokenWeights
from outrider.target_service import verifier as verifier_module
from outrider.target_service.draft_buffer import Window
from outrider.target_service.scheduler import StepEntry
from outrider.target_service.sequence import TargetLimits, admit
from outrider.target_service.verifier import Judged, Verifier

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
            cases += [(ids, weights, coins, mass) for coins in product(range(CELLS), repeat=K) if mass]
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
        judged = [_judged(index, ids, weights, self.sampling) for index, (ids, weights, _) in enumerate(cases)]
        logits = torch.tensor([self.logits(ids[:row]) for ids, _, _ in cases for row in range(K + 1)])
        coins = [(cell + 0.5) / CELLS for _, _, cells in cases for cell in cells]
        drawn_from: list[Tensor] = []

        def draw(weights: Tensor, words: Tensor) -> Tensor:
            drawn_from.append(weights)
            return weights.argmax(-1)

        with monkeypatch.context() as patch:
            patch.setattr(verifier_module, "accept_uniforms", lambda words: torch.tensor(coins).double())
            patch.setattr(verifier_module, "draw", draw)
            verdicts = Verifier(VOCAB).verify(logits.float(), judged)
        rows = [[Fraction(round(64 * weight), 64) for weight in row] for row in drawn_from[0].tolist()]
        return [
            (verdict.num_accepted, tuple(weight / sum(row) for weight in row))
            for verdict, row in zip(verdicts, rows, strict=True)
        ]


def _index(context: Ids, count: int) -> int:
    return sum((token + 1) * 7**place for place, token in enumerate(context)) % count


def _judged(index: int, ids: Ids, weights: tuple[TokenWeights | None, ...], sampling: dict[str, Any]) -> Judged:
    """A window as it stands in a step of many sequences."""
    limits = TargetLimits(VOCAB, 64, (), 64)
    target = admit(opened(index, PROMPT, **sampling), None, (1, index), lambda _: None, limits, index, 0.0)
    window = Window(0, ids, weights, False)
    entry = StepEntry(target, len(PROMPT), len(PROMPT) - 1, K + 1, window, True, K + 1)
    return Judged(entry, range(index * (K + 1), (index + 1) * (K + 1)))
