"""Steps of mixed batches: each row is drawn by its own rule, from integers or noise that were drawn ahead."""

from __future__ import annotations

import pytest
import torch
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager
from outrider.engine.model_runner import ModelRunner
from outrider.engine.random import RandomAhead, RandomKey
from outrider.engine.sampler import SequenceSampler
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_rows import DraftRows, DraftRule, DraftSampling
from outrider.proposers.draft_text import DraftText
from outrider.rpc.words.sampling_params import SamplingParams

LOADED = build_decoder(tiny_config(), tiny_state(tiny_hf_model()), batch_invariant=True)
VOCAB_SIZE = LOADED.vocab_size


class Drafts:
    """Sequences over one proposer."""

    def __init__(self) -> None:
        self.cache = KVCacheManager(BlockPool(32))
        self.proposer = DraftModelProposer(ModelRunner(LOADED.model, 32))

    def rows(self, tokens: list[int], rule: DraftRule, num_rows: int | None = None, seed: int = 1) -> DraftRows:
        params = SamplingParams(temperature=0.0 if rule is DraftRule.ARGMAX else 0.7)
        sampler = SequenceSampler(params, tokens, [], [], VOCAB_SIZE)
        sequence = CachedSequence(list(tokens))
        self.cache.extend(sequence)
        draft_sampling = DraftSampling(rule, RandomKey(seed, 0))
        return DraftRows(
            DraftText(sequence), num_rows or len(tokens), len(tokens), sampler, draft_sampling, len(tokens) + 8
        )


PROMPTS = [[1, 2, 3], [9, 8], [30, 31, 32, 33], [50], [60, 61, 62]]
RULES = [DraftRule.COUPLED, DraftRule.ARGMAX, DraftRule.REJECTION, DraftRule.REJECTION, DraftRule.ARGMAX]


def test_a_mixed_batch_draws_what_each_alone_would() -> None:
    together = Drafts()
    rows = [together.rows(prompt, rule) for prompt, rule in zip(PROMPTS, RULES, strict=True)]
    rows.insert(2, together.rows([5, 6, 7, 8], DraftRule.REJECTION, num_rows=2))  # a chunk: nothing is drawn
    drafted = together.proposer.step(rows)
    assert drafted.pop(2) == [] and len(rows[2].sequence) == 4
    assert rows.pop(2).sequence.num_computed_tokens == 2
    for prompt, rule, row, (token,) in zip(PROMPTS, RULES, rows, drafted, strict=True):
        alone = Drafts()
        assert alone.proposer.step([alone.rows(prompt, rule)]) == [[token]]
        assert row.sequence.tokens == [*prompt, token.token_id]
        assert row.sequence.num_computed_tokens == len(prompt)
        assert bool(token.weights) == (rule is DraftRule.REJECTION)
        assert not token.ids or token.token_id in token.ids


@pytest.mark.parametrize("rule", list(DraftRule))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_draw_nothing(rule: DraftRule, value: float) -> None:
    drafts = Drafts()
    forward = drafts.proposer.runner.forward

    def broken(entries: object) -> torch.Tensor:
        logits = forward(entries)  # type: ignore[arg-type]
        logits[1] = value
        return logits

    rows = [drafts.rows(prompt, rule) for prompt in PROMPTS[:3]]
    expected = Drafts().proposer.step([Drafts().rows(prompt, rule) for prompt in PROMPTS[:1]])
    drafts.proposer.runner.forward = broken  # type: ignore[method-assign]
    first, second, third = drafts.proposer.step(rows)
    assert first == expected[0] and second == [] and len(third) == 1
    assert len(rows[1].sequence) == 2 and rows[1].sequence.num_computed_tokens == 1


CPU = torch.device("cpu")


def held(ahead: RandomAhead) -> list[int]:
    return [position for position in range(200) if ahead.get(position) is not None]


def test_a_prepared_window_draws_nothing_new() -> None:
    drafts = Drafts()
    row = drafts.rows([1, 2, 3], DraftRule.COUPLED)
    assert drafts.proposer.prepare(row.draft_sampling, 3, 12) and not drafts.proposer.prepare(row.draft_sampling, 3, 12)
    assert not drafts.proposer.prepare(drafts.rows([1], DraftRule.ARGMAX).draft_sampling, 3, 12)
    expected = Drafts()
    assert drafts.proposer.step([row]) == expected.proposer.step([expected.rows([1, 2, 3], DraftRule.COUPLED)])
    assert held(row.draft_sampling.ahead) == list(range(3, 12))
