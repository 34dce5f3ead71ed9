"""The law of what clients get, through the gateway's loop and draft and target services behind gRPC: chi-square against
the exact probabilities of the target alone, under both acceptance rules, for every sampling parameter that shapes them.

The short form draws 3,000 tokens, as many as a mutant needs, in ten settings that have every kind of draft, every rule
and every parameter among them; the long one more settings, and 200,000 tokens with each parameter alone, of which a
night's run, whose seed is new, draws a tenth. Seeds are fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lossless.chi_square import LEAST_P_BY_CHANCE, check, draw_from, p_value, p_value_by_context, p_values
from lossless.statistics import (
    LONG,
    RELOADS,
    RELOADS_BY_BLOCK,
    SHORT,
    TEMPERATURE_1,
    WIDE,
    WIDE_VOCAB,
    Pair,
    Setting,
    changed_all_the_time,
    draft_in_process,
    draw,
    exact_laws,
    serving,
)
from scipy.stats import chi2, chisquare
from support.proofs import mostly_long


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", mostly_long([*SHORT, *LONG], SHORT), ids=lambda setting: setting.name)
async def test_tokens_follow_the_targets_law(pair: Pair, setting: Setting, prove: bool) -> None:
    await check(pair, setting, setting.long if prove else setting.short)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_wide_vocabulary(tmp_path: Path) -> None:
    with serving(tmp_path, ("half",), scale=2.0, vocab_size=WIDE_VOCAB, num_hidden_layers=1) as wide:
        await check(wide, WIDE, WIDE.long)


def test_chi_square() -> None:
    law = np.array([0.5, 0.3, 0.19, 0.004, 0.006, 0.0])
    counts, bins = np.array([520.0, 290.0, 180.0, 4.0, 6.0, 0.0]), [520, 290, 180, 10]
    assert p_value(counts, law) == pytest.approx(chisquare(bins, [500, 300, 190, 10]).pvalue)
    two = p_value_by_context(np.stack((counts, counts)), np.stack((law, law)))
    statistic = 2 * chisquare(bins, [500, 300, 190, 10]).statistic
    assert two == pytest.approx(chi2.sf(statistic, 6))
    assert p_value(np.array([5000.0, 3000.0, 1900.0, 40.0, 59.0, 1.0]), law) == 0.0  # once is too often


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", mostly_long([RELOADS, RELOADS_BY_BLOCK], [RELOADS]), ids=lambda one: one.name)
async def test_weights_that_change_in_mid_stream(pair: Pair, setting: Setting, prove: bool) -> None:
    found, met = await draw_over_reloads(pair, setting, setting.long if prove else setting.short)
    print(f"{setting.name}: {len(met)} changes met {sum(met)} sequences, least p {min(found.values()):.2g}")
    assert sum(met) > 200, met
    assert min(found.values()) > LEAST_P_BY_CHANCE, found


async def draw_over_reloads(pair: Pair, setting: Setting, num_sequences: int) -> tuple[dict[str, float], list[int]]:
    """A p-value for each question, and how many sequences were open at each change of the weights."""
    folders = [pair.folder.parent / name for name in ("tempered", "opposite")]
    async with (
        draft_in_process(folders[1]) as draft,
        changed_all_the_time(draft, folders) as met,
    ):
        draws = await draw(setting, pair.target, draft.server.address, setting.seeds(num_sequences))
    assert draws.drafted[:, 0].mean() == 1.0
    return p_values(draws, exact_laws(pair.hf, setting.prompt, setting.params, setting.depth)), met


async def test_a_seed_fixes_the_draws(pair: Pair) -> None:
    first, second = [(await draw_from(pair, pair.target, TEMPERATURE_1, 200))[0] for _ in range(2)]
    assert (first.tokens == second.tokens).all() and (first.origins == second.origins).all()
