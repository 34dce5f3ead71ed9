"""Pearson's chi-square of counts against exact expectations. Bins expected less than five times are merged."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

Array = NDArray[np.float64]
LEAST_EXPECTED = 5.0


def p_value(counts: Array, law: Array) -> float:
    """Of independent draws from one law, arrays of the same shape. 0 where a token was drawn that cannot be."""
    return p_value_by_context(counts.reshape(1, -1), law.reshape(1, -1))


def p_value_by_context(counts: Array, laws: Array) -> float:
    """Of draws from several laws, [contexts, vocab] each: every context has the number of draws that it has, and its
    own bins; the statistics and the degrees of freedom add up. 1 where no context has draws for two bins."""
    if counts[laws == 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for context in np.nonzero(counts.sum(axis=1) >= 2 * LEAST_EXPECTED)[0]:
        row = counts[context]
        observed, expected = merged(row, laws[context] * row.sum())
        statistic += float(((observed - expected) ** 2 / expected).sum())
        freedom += len(expected) - 1
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def merged(counts: Array, expected: Array) -> tuple[Array, Array]:
    """Joins cells, the least expected first, until every bin is expected at least five times, [cells] -> [bins]."""
    order = np.argsort(expected, kind="stable")
    order = order[expected[order] > 0]  # what cannot be drawn is no bin
    starts, mass = [0], 0.0
    for index, cell in enumerate(expected[order]):
        if mass >= LEAST_EXPECTED:
            starts.append(index)
            mass = 0.0
        mass += float(cell)
    if mass < LEAST_EXPECTED and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(counts[order], starts), np.add.reduceat(expected[order], starts)
