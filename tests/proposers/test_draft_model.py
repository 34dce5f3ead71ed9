"""Steps of mixed batches: each row is drawn by its own rule, from integers or noise that were drawn ahead."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.blocks import BlockPool
from outrider.engine.loader import build_decoder
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling import SequenceSampler
from outrider.engine.sequence import Sequence, SequenceCache
from outrider.kernels.philox import Purpose, as_int64, exponential_noise, words
from outrider.proposers.draft_model import DraftLaw, DraftModelProposer, DraftRows, DraftRule
from outrider.proposers.random_ahead import MAX_WORD_ROWS, RandomAhead, RandomKey, noise_source, word_source
from outrider.wire.sampling import SamplingParams

LOADED = build_decoder(tiny_config(), tiny_state(tiny_hf_model()), batch_invariant=True)
VOCAB_SIZE = LOADED.vocab_size


class Drafts:
    """Sequences over one proposer."""

    def __init__(self) -> None:
        self.cache = SequenceCache(BlockPool(32))
        self.proposer = DraftModelProposer(ModelRunner(LOADED.model, 32))

    def rows(self, tokens: list[int], rule: DraftRule, num_rows: int | None = None, seed: int = 1) -> DraftRows:
        params = SamplingParams(temperature=0.0 if rule is DraftRule.ARGMAX else 0.7)
        sampler = SequenceSampler(params, tokens, [], [], VOCAB_SIZE)
        sequence = Sequence(list(tokens))
        self.cache.extend(sequence)
        law = DraftLaw(rule, RandomKey(seed, 0))
        return DraftRows(sequence, num_rows or len(tokens), len(tokens), sampler, law, len(tokens) + 8)


PROMPTS = [[1, 2, 3], [9, 8], [30, 31, 32, 33], [50], [60, 61, 62]]
RULES = [DraftRule.COUPLED, DraftRule.ARGMAX, DraftRule.REJECTION, DraftRule.REJECTION, DraftRule.ARGMAX]


def test_a_mixed_batch_draws_what_each_alone_would() -> None:
    together = Drafts()
    rows = [together.rows(prompt, rule) for prompt, rule in zip(PROMPTS, RULES, strict=True)]
    rows.insert(2, together.rows([5, 6, 7, 8], DraftRule.REJECTION, num_rows=2))  # a chunk: nothing is drawn
    drafted = together.proposer.step(rows)
    assert drafted.pop(2) is None and len(rows[2].sequence) == 4
    assert rows.pop(2).sequence.num_computed_tokens == 2
    for prompt, rule, row, token in zip(PROMPTS, RULES, rows, drafted, strict=True):
        alone = Drafts()
        assert alone.proposer.step([alone.rows(prompt, rule)]) == [token]
        assert token is not None and row.sequence.tokens == [*prompt, token.token_id]
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
    drafts.proposer.runner.forward = broken  # type: ignore[method-assign, assignment]
    first, second, third = drafts.proposer.step(rows)
    assert first == expected[0] and second is None and third is not None
    assert len(rows[1].sequence) == 2 and rows[1].sequence.num_computed_tokens == 1


CPU = torch.device("cpu")


def test_random_numbers_ahead_are_those_of_each_position() -> None:
    keys = [RandomKey(2**64 - 1, 0), RandomKey(5, 3)]
    aheads = [RandomAhead(), RandomAhead()]
    for first, second, limit in ((7, 90, 12), (8, 91, 12), (11, 200, 12), (9, 90, 12), (3, 90, 500)):
        seeds = torch.tensor([as_int64(key.seed) for key in keys])
        positions, completions = torch.tensor([first, second]), torch.tensor([0, 3])
        places = [(keys[0], aheads[0], first, limit), (keys[1], aheads[1], second, 95)]
        assert torch.equal(word_source(CPU).rows(places), words(seeds, positions, Purpose.DRAFT, completions))
        fresh = [(key, RandomAhead(), position, 0) for key, _, position, _ in places]
        expected = exponential_noise(seeds, positions, completions, VOCAB_SIZE)
        assert torch.equal(noise_source(VOCAB_SIZE, CPU).rows(fresh), expected)


def held(ahead: RandomAhead) -> list[int]:
    return [position for position in range(200) if ahead.get(position) is not None]


def test_one_call_draws_the_window_and_a_pause_the_next_one() -> None:
    source, key, ahead = word_source(CPU), RandomKey(1, 0), RandomAhead()
    source.rows([(key, ahead, 10, 14)])
    assert held(ahead) == list(range(10, 14))
    assert source.prepare((key, ahead, 11, 18)) and not source.prepare((key, ahead, 12, 18))
    assert held(ahead) == list(range(10, 18))
    assert not source.prepare((key, ahead, 11, 11 + MAX_WORD_ROWS + 1))  # more than are kept
    assert source.prepare((key, ahead, 17, 17 + MAX_WORD_ROWS))
    assert held(ahead) == list(range(17, 17 + MAX_WORD_ROWS))
    for position in held(ahead):
        expected = words(torch.tensor([1]), torch.tensor([position]), Purpose.DRAFT, torch.tensor([0]))
        assert torch.equal(source.rows([(key, ahead, position, 0)]), expected)
    source.rows([(key, ahead, 5, 6)])
    assert held(ahead) == [5]


def test_a_prepared_window_draws_nothing_new() -> None:
    drafts = Drafts()
    row = drafts.rows([1, 2, 3], DraftRule.COUPLED)
    assert drafts.proposer.prepare(row.law, 3, 12) and not drafts.proposer.prepare(row.law, 3, 12)
    assert not drafts.proposer.prepare(drafts.rows([1], DraftRule.ARGMAX).law, 3, 12)
    expected = Drafts()
    assert drafts.proposer.step([row]) == expected.proposer.step([expected.rows([1, 2, 3], DraftRule.COUPLED)])
    assert held(row.law.ahead) == list(range(3, 12))
