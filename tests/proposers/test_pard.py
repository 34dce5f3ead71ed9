"""Parallel drafts: what one pass gives is what transformers computes behind the same masks, drawn position by position
as any draft model's; and nothing of a mask stays in the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import build_decoder, save_tiny, tiny_config, tiny_hf_model, tiny_state
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.checkpoint import mask_token_id
from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager
from outrider.engine.loader import LoadedModel, load_model
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import WrongCheckpoint
from outrider.engine.random import RandomKey
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.random.reference import Purpose, exponential_noise, words
from outrider.kernels.sampling.reference import draft_sample, greedy_choice, logits_to_probs
from outrider.kernels.verify.reference import coupled_choice
from outrider.proposers.draft_rows import DraftedToken, DraftRows, DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText
from outrider.proposers.drawing import pack
from outrider.proposers.pard import MOST_MASKS, PardProposer
from outrider.rpc.words.sampling_params import SamplingParams

MASK = 96
PROMPT = [5, 9, 33, 7, 7, 61, 2, 40, 18]
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.9, "bad_words_ids": ((3, 4), (11,))}
LOADED = build_decoder(tiny_config(pard_token=MASK), tiny_state(tiny_hf_model()), batch_invariant=True)


class Drafts:
    """Sequences over one proposer."""

    def __init__(self, loaded: LoadedModel = LOADED) -> None:
        self.cache = KVCacheManager(BlockPool(64))
        self.proposer = PardProposer(ModelRunner(loaded.model, 64), MASK)

    def rows(self, tokens: list[int], rule: DraftRule, num_rows: int | None = None, **sampling: Any) -> DraftRows:
        params = SamplingParams(temperature=0.0 if rule is DraftRule.ARGMAX else 0.7, **sampling)
        sequence = CachedSequence(list(tokens))
        self.cache.extend(sequence, num_tokens=len(tokens) + 8)
        sampler = SequenceSampler(params, tokens, [], [], LOADED.vocab_size)
        draft_sampling = DraftSampling(rule, RandomKey(1, 0))
        limit = len(tokens) + 20
        return DraftRows(DraftText(sequence), num_rows or len(tokens), len(tokens), sampler, draft_sampling, limit)


def masked_logits(hf: Any, tokens: list[int], count: int) -> Tensor:  # [count, vocab]
    """What transformers gives for the tokens after these."""
    with torch.inference_mode():
        logits: Tensor = hf(torch.tensor([[*tokens, *[MASK] * (count - 1)]])).logits[0, -count:]
    return logits


def drawn_by_hand(logits: Tensor, row: DraftRows) -> list[DraftedToken]:  # [count, vocab]
    """One position after the other, everything of a position made for it alone."""
    tokens, drafted = list(row.text.tokens), list[DraftedToken]()
    for line in logits.index_fill(1, torch.tensor([MASK]), -torch.inf):
        sampling = assemble([SamplingRows(row.sampler, drawn := [t.token_id for t in drafted], first=len(drawn))])
        seed, place, completion = (torch.tensor([number]) for number in (1, len(tokens) + len(drafted), 0))
        if row.draft_sampling.rule is DraftRule.ARGMAX:
            drafted.append(DraftedToken(int(greedy_choice(line[None], sampling)[0])))
            continue
        probs, _ = logits_to_probs(line[None], sampling)
        if row.draft_sampling.rule is DraftRule.COUPLED:
            noise = exponential_noise(seed, place, completion, LOADED.vocab_size)
            drafted.append(DraftedToken(int(coupled_choice(probs, noise))))
            continue
        found = draft_sample(probs, words(seed, place, Purpose.DRAFT, completion, 0))
        drafted.append(DraftedToken(int(found.token_ids), pack(found.entry_ids), pack(found.entry_weights)))
    return drafted


def weights_of(token: DraftedToken) -> dict[int, int]:
    """By id."""
    ids, weights = (np.frombuffer(part, dtype="<u4").tolist() for part in (token.ids, token.weights))
    return dict(zip(ids, weights, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rule", list(DraftRule))
@pytest.mark.parametrize("sampling", [{}, PENALTIES], ids=["free", "counting"])
def test_a_folder_of_the_public_layout_drafts_what_transformers_gives_behind_masks(
    family: str, rule: DraftRule, sampling: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load_model(save_tiny(tmp_path, family, pard_token=MASK))
    assert loaded.mask_token_id == MASK
    drafts = Drafts(loaded)
    assert isinstance(PardProposer.of(drafts.proposer.runner, loaded), PardProposer)
    row = drafts.rows(PROMPT, rule, **sampling)
    expected = drawn_by_hand(masked_logits(tiny_hf_model(family), PROMPT, 5), row)
    (drafted,) = drafts.proposer.run([row], [5])
    assert [token.token_id for token in drafted] == [token.token_id for token in expected]
    for token, other in zip(drafted, expected, strict=True):
        weights, others = weights_of(token), weights_of(other)
        assert all(abs(weights.get(id_, 0) - others.get(id_, 0)) <= 2 for id_ in weights | others)  # by rounding
    assert bool(drafted[0].weights) == (rule is DraftRule.REJECTION)
    assert row.sequence.tokens == [*PROMPT, *(token.token_id for token in drafted)]


def test_what_a_mask_left_in_the_cache_is_not_read_again() -> None:
    drafts = Drafts()
    row = drafts.rows(PROMPT, DraftRule.ARGMAX)
    drafts.proposer.run([row], [6])
    sequence = row.sequence
    assert len(sequence) == len(PROMPT) + 6 and sequence.num_computed_tokens == len(PROMPT)
    again = replace(row, num_rows=6)
    fresh = Drafts()
    expected = fresh.proposer.run([fresh.rows(list(sequence.tokens), DraftRule.ARGMAX)], [4])
    assert drafts.proposer.run([again], [4]) == expected


MIXED = [DraftRule.COUPLED, DraftRule.ARGMAX, DraftRule.REJECTION, DraftRule.REJECTION, DraftRule.COUPLED]
COUNTS = [3, 1, 5, 2, 4]
SAMPLINGS: list[dict[str, Any]] = [{}, {}, PENALTIES, {}, PENALTIES]


def test_a_mixed_batch_draws_what_each_alone_would() -> None:
    together = Drafts()
    prompts = [PROMPT[index:] for index in range(5)]
    rows = [together.rows(*each[:2], **each[2]) for each in zip(prompts, MIXED, SAMPLINGS, strict=True)]
    chunk = together.rows(PROMPT, DraftRule.REJECTION, num_rows=2)
    drafted = together.proposer.run([*rows[:2], chunk, *rows[2:]], [*COUNTS[:2], 1, *COUNTS[2:]])
    assert drafted.pop(2) == [] and chunk.sequence.num_computed_tokens == 2
    for prompt, rule, sampling, count, tokens in zip(prompts, MIXED, SAMPLINGS, COUNTS, drafted, strict=True):
        alone = Drafts()
        assert alone.proposer.run([alone.rows(prompt, rule, **sampling)], [count]) == [tokens]
        assert len(tokens) == count


def test_other_tokens_are_ranked_at_every_position() -> None:
    drafts = Drafts()
    row = replace(drafts.rows(PROMPT, DraftRule.ARGMAX), num_top_tokens=3)
    logits = drafts.proposer.runner.forward([BatchEntry([*PROMPT, MASK, MASK], 0, row.sequence.block_table, 3)])
    ranked = logits.index_fill(1, torch.tensor([MASK]), -torch.inf).topk(4).indices.tolist()
    (drafted,) = drafts.proposer.run([row], [3])
    assert [[token.token_id, *token.top_tokens] for token in drafted] == ranked


@pytest.mark.parametrize("sampling", [{}, PENALTIES], ids=["free", "counting"])
@pytest.mark.parametrize("rule", list(DraftRule))
def test_a_position_that_is_not_finite_ends_the_chain(rule: DraftRule, sampling: dict[str, Any]) -> None:
    expected = Drafts()
    (whole,) = expected.proposer.run([expected.rows(PROMPT, rule, **sampling)], [5])
    drafts = Drafts()
    forward = drafts.proposer.runner.forward

    def broken(entries: object) -> Tensor:
        logits = forward(entries)  # type: ignore[arg-type]
        logits[2] = float("nan")
        return logits

    drafts.proposer.runner.forward = broken  # type: ignore[method-assign]
    row = drafts.rows(PROMPT, rule, **sampling)
    assert drafts.proposer.run([row], [5]) == [whole[:2]]
    assert len(row.sequence) == len(PROMPT) + 2 and row.sequence.num_computed_tokens == len(PROMPT)


def test_the_mask_is_never_drafted() -> None:
    hf = tiny_hf_model()
    with torch.no_grad():
        hf.lm_head.weight[MASK] = 50 * hf.lm_head.weight[MASK].sign()
    drafts = Drafts(build_decoder(tiny_config(), tiny_state(hf), batch_invariant=True))
    prompts = [PROMPT[index:] for index in range(8)]
    logits = torch.cat([masked_logits(hf, prompt, 4) for prompt in prompts])
    assert (logits.argmax(-1) == MASK).any()
    for tokens in drafts.proposer.run([drafts.rows(prompt, DraftRule.ARGMAX) for prompt in prompts], [4] * 8):
        assert all(token.token_id != MASK for token in tokens)


def test_masks_of_one_pass_are_bounded() -> None:
    drafts = Drafts()
    rows = [drafts.rows(PROMPT, DraftRule.ARGMAX)] * 3 + [drafts.rows(PROMPT, DraftRule.ARGMAX, num_rows=2)]
    assert drafts.proposer.tokens_at_once(rows, [4, 1, 0, 4]) == [4, 1, 1, 1]
    many = drafts.proposer.tokens_at_once(rows, [10_000] * 4)
    assert sum(count - 1 for count in many) <= MOST_MASKS and min(many[:3]) > 32


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, None),
        ({"pard_token": 96}, 96),
        ({"ptd_token_id": 0}, 0),
        ({"pard_token": None, "ptd_token_id": 7}, 7),
    ],
)
def test_where_a_config_names_its_mask(config: dict[str, Any], found: int | None) -> None:
    assert mask_token_id({"vocab_size": 97, **config}) == found


@pytest.mark.parametrize("value", [97, -1, "7", 1.5])
def test_a_mask_outside_the_vocabulary(value: object) -> None:
    with pytest.raises(WrongCheckpoint, match=r"pard_token is .*; allowed: an id below vocab_size, 97"):
        mask_token_id({"vocab_size": 97, "pard_token": value})


def test_a_model_without_a_mask_token() -> None:
    loaded = build_decoder(tiny_config(), tiny_state(tiny_hf_model()))
    with pytest.raises(ValueError, match=r"names no mask token; allowed: .* pard_token or ptd_token_id"):
        PardProposer.of(ModelRunner(loaded.model, 4), loaded)
