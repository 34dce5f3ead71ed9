"""Block verification of a window in fractions: the paper's formulas (arXiv 2403.10444, algorithm 2) a second time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from lossless.law import Proposal, Target, Tokens, Vector, target_law


def draft_law(vector: Vector, token: int, vocab_size: int) -> list[Fraction] | None:
    """What a token was drawn from, if it can be used."""
    ids, weights = vector or ((), ())
    is_vector = len(ids) == len(weights) == len(set(ids)) and sum(weights) < 1 << 24
    if not is_vector or token not in ids or min(weights) <= 0 or max(ids) >= vocab_size:
        return None
    of_id = dict(zip(ids, weights, strict=True))
    return [Fraction(of_id.get(other, 0), sum(weights)) for other in range(vocab_size)]


@dataclass(frozen=True, slots=True)
class Judging:
    """The paper's numbers for one window."""

    thresholds: list[Fraction]  # below which each drafted token's coin says that the tokens up to it hold
    reached: list[Fraction]  # with which probability the tokens of its block before each hold
    laws: list[list[Fraction] | None]  # that each was drawn from; None: one-hot

    def next_law(self, proposal: Proposal, num_accepted: int, target: Target = target_law) -> list[Fraction]:
        """Of the token after the accepted ones."""
        own = list(target(proposal.context + proposal.ids[:num_accepted]))
        if num_accepted == len(proposal.ids):
            return own
        law, refused = self.laws[num_accepted], proposal.ids[num_accepted]
        left = [
            max(self.reached[num_accepted] * p - q, Fraction(0)) if law else p * (token != refused)
            for token, (p, q) in enumerate(zip(own, law or own, strict=True))
        ]
        total = sum(left)
        return [share / total for share in left] if total else own


def judge(
    proposal: Proposal,
    target: Target = target_law,
    is_one_block: bool = True,
    apart: Callable[[Tokens, int], bool] = lambda ids, place: False,
) -> Judging:
    """Without `is_one_block` a window with a one-hot token is judged token by token; the drafted token at a place that
    is `apart` is a block of its own."""
    vocab_size = len(target(proposal.context))
    laws = [draft_law(vector, token, vocab_size) for vector, token in zip(proposal.vectors, proposal.ids, strict=True)]
    in_blocks = is_one_block or None not in laws
    found = Judging([], [], laws)
    held = Fraction(1)
    for place, (law, token) in enumerate(zip(laws, proposal.ids, strict=True)):
        found.reached.append(held)
        prob = target(proposal.context + proposal.ids[:place])[token]
        held = min(held * prob / law[token], Fraction(1)) if law else prob
        after = laws[place + 1] if in_blocks and law and place + 1 < len(laws) else None
        if apart(proposal.ids, place) or apart(proposal.ids, place + 1):
            after = None
        if after is None:
            found.thresholds.append(held)
            held = Fraction(1)
        else:
            own = target(proposal.context + proposal.ids[: place + 1])
            surplus = sum((max(held * p - q, Fraction(0)) for p, q in zip(own, after, strict=True)), Fraction(0))
            found.thresholds.append(Fraction(1) if held == 1 else surplus / (surplus + 1 - held))
    return found
