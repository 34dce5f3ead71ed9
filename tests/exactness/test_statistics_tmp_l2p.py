"""The law of what clients get, through the gateway's loop and real draft and target services behind gRPC: chi-square
against the exact probabilities of the target alone, for every sampling parameter that shapes them.

The short forms draw 20,000 tokens for each sampling setting, the long ones 200,000 of every position. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from exactness.statistics_checks import p_values
from exactness.statistics_chi_square import p_value, p_value_by_context
from exactness.statistics_draws import Setting, draw
from exactness.statistics_laws import exact_laws
from exactness.statistics_mutants import (
    Mutation,
    bonus_of_the_row_before,
    none,
    penalties_of_the_committed,
    residual_is_target,
)
from exactness.statistics_services import MAX_ROWS, Pair, serving
from scipy.stats import chi2, chisquare

from outrider.target.boot import build, load
from outrider.target.settings import TargetSettings
from outrider.wire.sampling import AcceptanceRule, TokenOrigin

LEAST_P = 1e-4
VOCAB, WIDE_VOCAB = 16, 4096
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": -0.6, "frequency_penalty": -1.8}  # it likes to repeat
EVERY_TOKEN = (7, 2, 11, 0, 5, 14, 9, 3, 12, 6, 1, 15, 8, 4, 13, 10, 7)  # whatever comes next, n-grams have a match

SAMPLING = [
    Setting("temperature 1"),
    Setting("temperature 0.6", {"temperature": 0.6}),
    Setting("top_p", {"top_p": 0.8}),
    Setting("min_p", {"min_p": 0.05}),
    Setting("penalties", PENALTIES),
]
DRAFTING = [
    Setting("bonus", draft="tempered"),
    Setting("coupled", acceptance=AcceptanceRule.COUPLED, short=3_334, long=66_667),
    Setting("ngram", method="ngram", prompt=EVERY_TOKEN, short=3_334, long=66_667),
]
WIDE = Setting("wide", draft="half", k=1, depth=2, short=2_048, long=40_960)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving(tmp_path_factory.mktemp("narrow"), ("opposite", "tempered"), vocab_size=VOCAB) as running:
        yield running


async def check(pair: Pair, setting: Setting, num_sequences: int) -> None:
    """Draws, and compares with the laws; no bug hides behind a path that was not taken."""
    draws = await draw(setting, pair.target, pair.drafts[setting.draft], setting.seeds(num_sequences))
    assert draws.tokens.shape == (num_sequences, setting.depth) and draws.drafted[:, 0].all()
    assert draws.share(TokenOrigin.ACCEPTED) > 0.03 and draws.share(TokenOrigin.RECOVERED) > 0.03
    if setting.draft == "tempered":
        assert draws.share(TokenOrigin.BONUS) > 0.2
    found = p_values(draws, exact_laws(pair.hf, setting.prompt, setting.params, setting.depth))
    print(setting.name, num_sequences, {k: float(f"{v:.2g}") for k, v in found.items()}, {o.name: round(draws.share(o), 3) for o in TokenOrigin})
    assert min(found.values()) > LEAST_P, found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", [*SAMPLING, *DRAFTING], ids=lambda setting: setting.name)
async def test_tokens_follow_the_targets_law(pair: Pair, setting: Setting, prove: bool) -> None:
    await check(pair, setting, setting.long if prove else setting.short)


@pytest.mark.timeout(3600)
async def test_a_wide_vocabulary(tmp_path_factory: pytest.TempPathFactory, prove: bool) -> None:
    folder = tmp_path_factory.mktemp("wide")
    with serving(folder, ("half",), scale=2.0, vocab_size=WIDE_VOCAB, num_hidden_layers=1) as wide:
        await check(wide, WIDE, WIDE.long if prove else WIDE.short)


def test_chi_square() -> None:
    law = np.array([0.5, 0.3, 0.19, 0.004, 0.006, 0.0])
    counts, bins = np.array([520.0, 290.0, 180.0, 4.0, 6.0, 0.0]), [520, 290, 180, 10]
    assert p_value(counts, law) == pytest.approx(chisquare(bins, [500, 300, 190, 10]).pvalue)
    two = p_value_by_context(np.stack((counts, counts)), np.stack((law, law)))
    statistic = 2 * chisquare(bins, [500, 300, 190, 10]).statistic
    assert two == pytest.approx(chi2.sf(statistic, 6))
    assert p_value(np.array([5000.0, 3000.0, 1900.0, 40.0, 59.0, 1.0]), law) == 0.0  # once is too often


async def test_a_seed_fixes_the_draws(pair: Pair) -> None:
    setting = SAMPLING[0]
    address = pair.drafts[setting.draft]
    first, second = [await draw(setting, pair.target, address, setting.seeds(200)) for _ in range(2)]
    assert (first.tokens == second.tokens).all() and (first.origins == second.origins).all()


@pytest.mark.parametrize(
    ("mutation", "setting", "num_sequences"),
    [
        (none, SAMPLING[4], 1000),
        (residual_is_target, SAMPLING[0], 800),
        (bonus_of_the_row_before, DRAFTING[0], 1200),
        (penalties_of_the_committed, SAMPLING[4], 1000),
    ],
)
async def test_mutants_are_found(
    pair: Pair, mutation: Mutation, setting: Setting, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    settings = TargetSettings(model=pair.folder, listen="127.0.0.1:0", threads=1, max_rows=int(MAX_ROWS), cache_mb=16)
    service = build(settings, load(settings))
    await service.server.start()
    try:
        seeds = setting.seeds(num_sequences)
        draws = await draw(setting, service.server.address, pair.drafts[setting.draft], seeds)
    finally:
        await service.stop()
    found = p_values(draws, exact_laws(pair.hf, setting.prompt, setting.params, setting.depth))
    assert (min(found.values()) > LEAST_P) == (mutation is none), found
