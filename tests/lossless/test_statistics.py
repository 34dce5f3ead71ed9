"""The law of what clients get, through the gateway's loop and draft and target services behind gRPC: chi-square against
the exact probabilities of the target alone, under both acceptance rules, for every sampling parameter that shapes them.

The short form draws 3,000 tokens, as many as a mutant needs, in ten settings that have every kind of draft, every rule
and every parameter among them; the long one more settings, and 200,000 tokens with each parameter alone. Seeds are
fixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lossless.chi_square import LEAST_P, LEAST_P_BY_CHANCE, check, draw_from, p_value, p_value_by_context, p_values
from lossless.mutants import (
    Mutation,
    a_head_s_weights_are_in_another_order,
    a_lookup_replaces_what_was_drawn,
    bonus_of_the_row_before,
    coupling_lets_one_more_stay,
    logits_are_a_quarter_too_flat,
    mapped_draws_are_not_renormalised,
    penalties_of_the_committed,
    residual_is_target,
    weights_are_not_those_drawn_from,
)
from lossless.statistics import (
    BONUS,
    BY_BLOCK,
    HEAD,
    HEAD_BY_BLOCK,
    IN_TURN,
    LONG,
    MAPPED,
    RELOADS,
    RELOADS_BY_BLOCK,
    SHORT,
    TEMPERATURE_1,
    TEMPERATURE_1_COUPLED,
    VOCAB,
    WIDE,
    WIDE_VOCAB,
    WITH_PENALTIES,
    Pair,
    Setting,
    changed_all_the_time,
    draft_in_process,
    draw,
    exact_laws,
    serving,
    target_in_process,
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_weights_of_another_model_than_drew_are_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many changes meet a piece is the clock's to say: it is drawn again where there were few."""
    weights_are_not_those_drawn_from(monkeypatch)
    for attempt in range(6):
        setting = replace(RELOADS, name=f"{RELOADS.name}, attempt {attempt}")
        found, met = await draw_over_reloads(pair, setting, 2_200)
        print(f"weights_are_not_those_drawn_from: {sum(met)} sequences met, least p {min(found.values()):.2g}")
        if min(found.values()) < LEAST_P:
            return
    pytest.fail(f"not found: {found}")


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


@pytest.mark.parametrize(
    ("mutation", "setting", "num_sequences"),
    [
        (residual_is_target, TEMPERATURE_1, 800),
        (residual_is_target, BY_BLOCK, 800),
        (bonus_of_the_row_before, BONUS, 1200),
        (penalties_of_the_committed, WITH_PENALTIES, 1000),
        (coupling_lets_one_more_stay, TEMPERATURE_1_COUPLED, 800),
        (logits_are_a_quarter_too_flat, TEMPERATURE_1, 1500),
    ],
)
async def test_mutants_are_found(
    pair: Pair, mutation: Mutation, setting: Setting, num_sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With far fewer draws than the unharmed services get."""
    mutation(monkeypatch)
    async with target_in_process(pair.folder) as target:
        _, found = await draw_from(pair, target, setting, num_sequences)
    print(f"{mutation.__name__}: {min(found.values()):.2g}")
    assert min(found.values()) < LEAST_P, found


@pytest.mark.parametrize("setting", [HEAD, HEAD_BY_BLOCK], ids=lambda setting: setting.name)
async def test_a_head_whose_weights_are_others_is_found(
    pair: Pair, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_head_s_weights_are_in_another_order(monkeypatch)
    async with target_in_process(pair.folder, pair.folder.parent / "head") as target:
        _, found = await draw_from(pair, target, setting, 300)
    print(f"a_head_s_weights_are_in_another_order: {min(found.values()):.2g}")
    assert min(found.values()) < LEAST_P, found


async def test_a_mapped_draft_that_draws_from_all_it_has_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped_draws_are_not_renormalised(monkeypatch)
    async with draft_in_process(pair.folder.parent / "mapped", target_tokenizer=[pair.folder]) as draft:
        draws = await draw(MAPPED, pair.target, draft.server.address, MAPPED.seeds(1_200))
    found = p_values(draws, exact_laws(pair.hf, MAPPED.prompt, MAPPED.params, MAPPED.depth))
    print(f"mapped_draws_are_not_renormalised: {min(found.values()):.2g}")
    assert min(found.values()) < LEAST_P, found


async def test_a_method_that_is_chosen_by_a_drawn_token_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a_lookup_replaces_what_was_drawn(monkeypatch)
    setting = replace(IN_TURN, prompt=(*IN_TURN.prompt, VOCAB - 1))  # which is new: the model begins
    options = {"method": setting.method, "suffix_decoding_min_token_prob": 0, "suffix_decoding_max_spec_factor": 9}
    async with draft_in_process(pair.folder.parent / "opposite", **options) as draft:
        draws = await draw(setting, pair.target, draft.server.address, setting.seeds(1_500))
    found = p_values(draws, exact_laws(pair.hf, setting.prompt, setting.params, setting.depth))
    print(f"a_lookup_replaces_what_was_drawn: {min(found.values()):.2g}")
    assert min(found.values()) < LEAST_P, found
