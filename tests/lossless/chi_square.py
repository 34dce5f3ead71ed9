"""Pearson's chi-square of counts against exact expectations. Bins expected less than five times are merged.

What is asked of the draws of one setting: every position, neighbouring pairs, and every way of coming about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lossless.statistics import BONUS, Array, Draws, Pair, Setting, draw, exact_laws, of_pair, of_position
from numpy.typing import NDArray
from scipy.stats import chi2

from outrider.rpc.words.sampling_params import TokenOrigin

LEAST_EXPECTED = 5.0
MAX_PAIRS = 4096  # cells of a joint law: a wide vocabulary has too many
LEAST_P = 1e-4
LEAST_P_BY_CHANCE = 1e-7  # where clocks have a say, every run is a new chance to fail


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


async def draw_from(pair: Pair, target: str, setting: Setting, num_sequences: int) -> tuple[Draws, dict[str, float]]:
    """The draws, and a p-value for each question to them."""
    draws = await draw(setting, target, pair.drafts[setting.draft], setting.seeds(num_sequences), pair.folder)
    return draws, p_values(draws, exact_laws(pair.hf, setting.prompt, setting.params, setting.depth))


async def check(pair: Pair, setting: Setting, num_sequences: int) -> None:
    """Draws, and compares with the laws; no bug hides behind a path that was not taken."""
    target = pair.with_head if setting.at_target else pair.cutting if setting.cut_windows else pair.target
    assert target is not None
    draws, found = await draw_from(pair, target, setting, num_sequences)
    print(f"{setting.name}: {draws.tokens.size} tokens, least p of {len(found)}: {min(found.values()):.2g}")
    assert draws.tokens.shape == (num_sequences, setting.depth)
    first = int(setting.at_target)  # before the first token a head has read nothing
    assert draws.drafted[:, first].mean() == 1.0 or (setting.cut_windows and draws.drafted.mean() > 0.5)
    assert draws.share(TokenOrigin.ACCEPTED) > 0.03 and draws.share(TokenOrigin.RECOVERED) > 0.03
    assert setting.windows_ahead or draws.share(TokenOrigin.BONUS) > (0.2 if setting is BONUS else 0.0)
    assert set(draws.by_method) == (set(setting.method.split(",")) if "," in setting.method else set()), "had no turn"
    assert min(found.values()) > (LEAST_P_BY_CHANCE if setting.depends_on_time else LEAST_P), found
