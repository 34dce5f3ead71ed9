"""What is asked of the draws of one setting: every position, neighbouring pairs, and every way of coming about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from exactness.statistics_chi_square import p_value, p_value_by_context
from exactness.statistics_draws import Draws
from exactness.statistics_laws import Array, of_pair, of_position
from numpy.typing import NDArray

from outrider.rpc.sampling_params import TokenOrigin

MAX_PAIRS = 4096  # cells of a joint law: a wide vocabulary has too many


def p_values(draws: Draws, laws: Sequence[Array]) -> dict[str, float]:
    """A p-value for each question; 0 where a token came up whose probability is 0."""
    depth, vocab_size = draws.tokens.shape[1], laws[0].shape[0]
    found = {}
    for position in range(depth):
        counts = np.bincount(draws.tokens[:, position], minlength=vocab_size).astype(float)
        found[f"token {position}"] = p_value(counts, of_position(laws, position))
    for position in range(depth - 1 if vocab_size**2 <= MAX_PAIRS else 0):
        cells = draws.tokens[:, position] * vocab_size + draws.tokens[:, position + 1]
        counts = np.bincount(cells, minlength=vocab_size**2).astype(float)
        found[f"tokens {position} and {position + 1}"] = p_value(counts, of_pair(laws, position).reshape(-1))
    for name, chosen in _ways(draws).items():
        found |= _given_context(name, draws, chosen, laws)
    return found


def _ways(draws: Draws) -> dict[str, NDArray[np.bool_]]:
    """Which tokens each question is about. What came before a token decides, never the token: so the target's law given
    the context holds for each of them. (It would not for "accepted" and "recovered" apart.)"""
    ways = {f"drafted {n}": draws.drafted & (draws.offsets == n) for n in range(int(draws.offsets.max()) + 1)}
    ways["bonus"] = draws.origins == TokenOrigin.BONUS
    ways["plain"] = draws.origins == TokenOrigin.PLAIN
    return {name: chosen for name, chosen in ways.items() if chosen.any()}


def _given_context(name: str, draws: Draws, chosen: NDArray[np.bool_], laws: Sequence[Array]) -> dict[str, float]:
    """Context by context, and summed over the contexts. The sum's counts vary less than one multinomial law's would, so
    that test errs on the side of passing; with few draws it still sees most."""
    vocab_size = laws[0].shape[0]
    rows = np.concatenate([law.reshape(-1, vocab_size) for law in laws])  # [contexts, vocab]
    counts = np.zeros_like(rows)
    first = 0
    for position, law in enumerate(laws):
        context = np.zeros(len(draws.tokens), dtype=np.int64)
        for earlier in range(position):
            context = context * vocab_size + draws.tokens[:, earlier]
        mask = chosen[:, position]
        np.add.at(counts, (first + context[mask], draws.tokens[mask, position]), 1)
        first += law.size // vocab_size
    expected: Any = counts.sum(axis=1) @ rows
    return {
        f"{name}, by context": p_value_by_context(counts, rows),
        f"{name}, in sum": p_value(counts.sum(axis=0), expected / expected.sum()),
    }
