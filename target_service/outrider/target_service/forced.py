"""Tokens that a grammar forces, as guesses of the target's own: one-hot behind drafted ones, and verified like them."""

from __future__ import annotations

from dataclasses import replace

from outrider.engine.grammar.constraint import Constraint
from outrider.target_service.draft_buffer import Window
from outrider.target_service.sequence import TargetSequence


def with_forced(target: TargetSequence, constraint: Constraint, window: Window, most: int, limit: int) -> Window:
    """A window of at most `limit` tokens, of which `most` are forced: behind a chain that it takes to its end. Not
    where a draft's next token is drawn already, and takes part in what is drawn here."""
    chain, end = target.chains.live(), target.committed + len(window.ids)
    if target.open.plain or window.parents or (target.rejects and window.goes_on) or (chain and chain.end > end):
        return window
    forced = constraint.forced_after(target.committed, window.ids, min(most, limit - len(window.ids)))
    if not forced:
        return window
    weights = (*window.weights, *(None,) * len(forced))
    return replace(window, ids=(*window.ids, *forced), weights=weights, num_forced=len(forced))
