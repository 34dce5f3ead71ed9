"""Row parameters by position: a row after drafted tokens is processed as if they were committed.

Reported log probabilities: order, ranks, ties, modes.

Random numbers drawn ahead are those of each position, however they are asked for, and only so many are kept."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.environment import SEED

from outrider.engine.logprobs import ALL, reported_values, top_logprobs, with_listed
from outrider.engine.random import (
    MAX_WORD_ROWS,
    RandomAhead,
    RandomKey,
    RandomRange,
    RandomSource,
    noise_source,
    word_source,
)
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise, words
from outrider.kernels.sampling.reference import greedy_choice, logits_to_probs
from outrider.kernels.types import RowSampling
from outrider.rpc.words.sampling_params import SamplingParams

VOCAB_SIZE = 12
TOKENS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.87]),
    top_k=st.sampled_from([0, 4]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    allowed_token_ids=st.sampled_from([(), (0, 1, 2, 5, 8, 9, 11)]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-1.0, 2.0]), max_size=2),
    bad_words_ids=st.sampled_from([(), ((3,), (4, 5), (1, 1, 2))]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (7,)]),
)


def sampler(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> SequenceSampler:
    return SequenceSampler(SamplingParams(**params), prompt or [], output or [], eos_ids=[0], vocab_size=VOCAB_SIZE)


def support(window: SamplingRows, logits: torch.Tensor | None = None) -> list[list[int]]:
    rows = torch.zeros(window.num_rows, VOCAB_SIZE) if logits is None else logits
    probs, _ = logits_to_probs(rows, assemble([window]))
    return [row.nonzero().squeeze(1).tolist() for row in probs]


@given(PARAMS, st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=4), st.randoms())
@settings(max_examples=100)
def test_each_row_of_a_window_equals_plain_decoding(
    params: SamplingParams, prompt: list[int], output: list[int], drafted: list[int], random: Any
) -> None:
    logits = torch.tensor([[random.uniform(-3, 3) for _ in range(VOCAB_SIZE)] for _ in range(len(drafted) + 1)])
    committed = SequenceSampler(params, prompt, [], [0], VOCAB_SIZE)
    for token in output:
        committed.append([token])
    window, invalid = logits_to_probs(logits, assemble([SamplingRows(committed, drafted)]))
    for row in range(len(drafted) + 1):
        prefix = drafted[:row]
        plain = SequenceSampler(params, prompt, output + prefix, [0], VOCAB_SIZE)
        expected, expected_invalid = logits_to_probs(logits[row : row + 1], assemble([SamplingRows(plain)]))
        chain, _ = logits_to_probs(logits[row : row + 1], assemble([SamplingRows(committed, prefix, first=row)]))
        assert torch.equal(window[row], expected[0]) and torch.equal(chain, expected)
        assert bool(invalid[row]) == bool(expected_invalid)


@given(st.lists(st.tuples(PARAMS, st.lists(TOKENS, max_size=3)), min_size=1, max_size=4), st.randoms())
@settings(max_examples=50)
def test_a_batch_equals_each_sequence_alone(cases: list[tuple[SamplingParams, list[int]]], random: Any) -> None:
    plans = [SamplingRows(SequenceSampler(params, [1, 2], [3], [0], VOCAB_SIZE), drafted) for params, drafted in cases]
    num_rows = sum(plan.num_rows for plan in plans)
    logits = torch.tensor([[random.uniform(-3, 3) for _ in range(VOCAB_SIZE)] for _ in range(num_rows)])
    together, _ = logits_to_probs(logits, assemble(plans))
    start = 0
    for plan in plans:
        alone, _ = logits_to_probs(logits[start : start + plan.num_rows], assemble([plan]))
        assert torch.allclose(together[start : start + plan.num_rows], alone, rtol=1e-6, atol=0)
        start += plan.num_rows


def test_a_plain_batch_costs_nothing() -> None:
    plans = [SamplingRows(sampler([1, 2, 3]), [4, 5]), SamplingRows(sampler([1], top_k=VOCAB_SIZE), [])]
    assert assemble(plans) == RowSampling()


def test_min_tokens_hold_back_eos_and_stop_ids_by_position() -> None:
    counted = sampler([1], [2], min_tokens=3, stop_token_ids=(7,))
    rows = support(SamplingRows(counted, [4, 5, 6]))
    assert [0 in row for row in rows] == [7 in row for row in rows] == [False, False, True, True]
    counted.append([4, 5])
    assert 0 in support(SamplingRows(counted))[0]


def test_bad_words_match_over_committed_and_drafted_output() -> None:
    counted = sampler([4], [], bad_words_ids=((4, 5), (1, 1, 2), (9,)))
    rows = support(SamplingRows(counted, [4, 1, 1]))
    assert [5 in row for row in rows] == [True, False, True, True]  # the prompt's 4 does not count
    assert [2 in row for row in rows] == [True, True, True, False]
    assert not any(9 in row for row in rows)
    counted.append([1])
    assert [2 in row for row in support(SamplingRows(counted, [1]))] == [True, False]


def test_allowed_ids_are_kept_alone_and_strangers_ignored() -> None:
    assert (
        support(SamplingRows(sampler(allowed_token_ids=(3, 5, 3, 99), logit_bias={99: 5.0, 3: 1.0}), [1]))
        == [[3, 5]] * 2
    )
    assert support(SamplingRows(sampler([99, -1], [99], repetition_penalty=2.0), [99])) == [list(range(VOCAB_SIZE))] * 2


def test_many_allowed_ids_are_a_mask_made_once() -> None:
    vocab_size = 5_000
    wanted = tuple(range(0, vocab_size, 2))
    plans = [
        SamplingRows(SequenceSampler(SamplingParams(allowed_token_ids=ids), [1], [], [0], vocab_size), [2, 4])
        for ids in ((), wanted, (7,))
    ]
    packed = assemble(plans).allowed
    assert packed is not None and packed.masks.shape == (2, vocab_size)
    assert packed.rows.tolist() == [3, 4, 5, 6, 7, 8] and packed.mask_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert (packed.masks[0] == 0).nonzero().squeeze(1).tolist() == list(wanted)
    device = torch.device("cpu")
    assert plans[1].sampler.allowed_on(device) is plans[1].sampler.allowed_on(device)
    other = SequenceSampler(SamplingParams(allowed_token_ids=tuple(range(0, vocab_size, 2))), [3], [], [0], vocab_size)
    assert other.allowed_on(device) is plans[1].sampler.allowed_on(device)  # another completion of the request


def test_biases_and_bad_words_are_of_their_own_rows() -> None:
    plans = [
        SamplingRows(sampler(), [1]),
        SamplingRows(sampler(logit_bias={3: 2.0, 5: -1.0}, bad_words_ids=((9,), (1, 8))), [1]),
        SamplingRows(sampler(logit_bias={4: 1.0}), []),
    ]
    packed = assemble(plans)
    assert packed.bias is not None and packed.bias_values is not None and packed.banned is not None
    found = zip(packed.bias.rows.tolist(), packed.bias.ids.tolist(), packed.bias_values.tolist(), strict=True)
    assert list(found) == [(2, 3, 2.0), (2, 5, -1.0), (3, 3, 2.0), (3, 5, -1.0), (4, 4, 1.0)]
    banned = zip(packed.banned.rows.tolist(), packed.banned.ids.tolist(), strict=True)
    assert sorted(banned) == [(2, 9), (3, 8), (3, 9)]


def test_allowed_ids_that_are_all_unknown_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids"):
        sampler(allowed_token_ids=(99,))


@pytest.mark.parametrize("drafted", [[], [1, 1, 2]])
def test_greedy_choices_are_the_one_hot_rows(drafted: list[int]) -> None:
    plans = [
        SamplingRows(sampler([1, 2, 1], [3], temperature=0, frequency_penalty=1.0, repetition_penalty=1.2), drafted)
    ]
    logits = torch.randn(len(drafted) + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    ids, invalid = greedy_choice(logits, assemble(plans, for_argmax=True))
    assert torch.equal(logits_to_probs(logits, assemble(plans))[0].argmax(dim=-1), ids) and not invalid.any()


def test_a_mask_is_applied_by_row() -> None:
    masks = torch.tensor([[0b0110], [0b1000]], dtype=torch.int32)
    probs, _ = logits_to_probs(torch.zeros(2, VOCAB_SIZE), assemble([SamplingRows(sampler(), [1])], "cpu", masks))
    assert [row.nonzero().squeeze(1).tolist() for row in probs] == [[1, 2], [3]]


ROW = [0.0, 3.0, 1.0, 3.0, 2.0]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.data())
@settings(max_examples=100)
def test_equals_sorting(row: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    count = data.draw(st.integers(ALL, len(row) + 2))
    [got] = top_logprobs(torch.tensor([row], dtype=torch.float32), [chosen], [count])
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: len(row) if count == ALL else count]
    assert got.ids == [chosen] + [i for i in order if i != chosen]
    assert got.values == [row[i] for i in got.ids]
    assert got.ranks == [1 + sum(value > row[i] for value in row) for i in got.ids]


def test_the_chosen_token_comes_first_and_once() -> None:
    outside, inside, alone = top_logprobs(torch.tensor([ROW] * 3), [0, 3, 2], [2, 2, 0])
    assert (outside.ids, outside.ranks) == ([0, 1, 3], [5, 1, 1])
    assert (inside.ids, inside.ranks) == ([3, 1], [1, 1])
    assert (alone.ids, alone.values, alone.ranks) == ([2], [1.0], [4])


def test_listed_ids_come_behind_the_chosen_one_each_once() -> None:
    values = torch.tensor(ROW)
    [chosen] = top_logprobs(values[None], [3], [0])
    got = with_listed(chosen, values, [2, 3, 0, 2])
    assert (got.ids, got.values, got.ranks) == ([3, 2, 0], [ROW[3], ROW[2], ROW[0]], [1, 4, 5])


def test_modes() -> None:
    logits = torch.tensor([ROW])
    sampling = RowSampling(temperature=torch.tensor([0.5]))
    probs, _ = logits_to_probs(logits, sampling)
    values = {
        mode: reported_values(mode, logits, sampling, probs)[0]
        for mode in ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")
    }
    assert values["raw_logits"].tolist() == ROW
    assert values["processed_logits"].tolist() == [2 * value for value in ROW]
    assert torch.allclose(values["raw_logprobs"].exp(), logits.softmax(dim=-1)[0])
    assert torch.allclose(values["processed_logprobs"].exp(), probs[0])
    with pytest.raises(ValueError, match="unknown logprobs mode"):
        reported_values("raw_odds", logits, sampling, probs)


def test_cut_ids_rank_last_at_minus_infinity() -> None:
    logits = torch.tensor([ROW])
    sampling = RowSampling(min_p=torch.tensor([0.2]))
    probs, _ = logits_to_probs(logits, sampling)
    [got] = top_logprobs(reported_values("processed_logprobs", logits, sampling, probs), [1], [ALL])
    assert got.ids == [1, 3, 4, 0, 2]
    assert got.ranks == [1, 1, 3, 4, 4]
    assert got.values[3:] == [-math.inf, -math.inf]


@pytest.mark.parametrize("vocab_size", [3, 97, 5_000])
def test_a_batch_equals_its_rows(vocab_size: int) -> None:
    """Rows that want none, some, more than there are, and all; half of them full of ties."""
    values = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    values[::2] = values[::2].round()
    chosen, counts = [0, 1, 2] * 2 + [0, 1], [0, 2, 20, ALL, 20, 1, 2, 0]
    together = top_logprobs(values, chosen, counts)
    for row, (token, count) in enumerate(zip(chosen, counts, strict=True)):
        assert top_logprobs(values[row : row + 1], [token], [count]) == [together[row]]
        order = sorted(range(vocab_size), key=lambda i, row=row: (-values[row, i], i))  # type: ignore[misc]
        wanted = order if count == ALL else order[:count]
        assert together[row].ids == [token, *(i for i in wanted if i != token)]
        assert together[row].values == [float(values[row, i]) for i in together[row].ids]


CPU = torch.device("cpu")
NOISE_VOCAB_SIZE = 33


def held(ahead: RandomAhead) -> list[int]:
    return [position for position in range(200) if ahead.get(position) is not None]


def test_rows_are_those_of_each_position() -> None:
    keys = [RandomKey(2**64 - 1, 0), RandomKey(5, 3)]
    aheads = [RandomAhead(), RandomAhead()]
    steps = ((7, 1, 90, 12), (8, 3, 91, 12), (11, 5, 200, 12), (9, 2, 90, 12), (3, 70, 90, 500), (4, 9, 91, 0))
    for first, count, second, limit in steps:
        spans = [RandomRange(keys[0], aheads[0], first, count, limit), RandomRange(keys[1], aheads[1], second, 1, 95)]
        positions = [*range(first, first + count), second]
        seeds = torch.tensor([as_int64(keys[0].seed)] * count + [keys[1].seed])
        completions = torch.tensor([0] * count + [3])
        expected = words(seeds, torch.tensor(positions), Purpose.DRAFT, completions)
        assert torch.equal(word_source(CPU).rows(spans), expected)
        fresh = [RandomRange(span.key, RandomAhead(), span.first, span.count, 0) for span in spans]
        noise = exponential_noise(seeds, torch.tensor(positions), completions, NOISE_VOCAB_SIZE)
        assert torch.equal(noise_source(NOISE_VOCAB_SIZE, CPU).rows(fresh), noise)


def test_more_rows_than_are_kept_are_still_all_there() -> None:
    wide = noise_source(100_000, CPU)
    assert wide.most == 1
    rows = wide.rows([RandomRange(RandomKey(4, 0), RandomAhead(), 10, 3, 13)])
    expected = exponential_noise(torch.tensor([4] * 3), torch.arange(10, 13), torch.zeros(3).long(), 100_000)
    assert torch.equal(rows, expected)


def test_one_call_draws_the_window_and_a_pause_the_next_one() -> None:
    source, key, ahead = word_source(CPU), RandomKey(1, 0), RandomAhead()
    source.rows([RandomRange(key, ahead, 10, 1, 14)])
    assert held(ahead) == list(range(10, 14))
    assert source.prepare(RandomRange(key, ahead, 11, 7, 18)) and not source.prepare(RandomRange(key, ahead, 12, 6, 18))
    assert held(ahead) == list(range(10, 18))
    assert not source.prepare(RandomRange(key, ahead, 11, 1, 11 + MAX_WORD_ROWS + 1))  # more than are kept
    assert source.prepare(RandomRange(key, ahead, 17, 1, 17 + MAX_WORD_ROWS))
    assert held(ahead) == list(range(17, 17 + MAX_WORD_ROWS))
    source.rows([RandomRange(key, ahead, 5, 1, 6)])
    assert held(ahead) == [5]


def test_overlapping_spans_of_one_sequence_get_their_own_rows() -> None:
    """Branches of a sequence ask for positions before and behind each other, more than are kept."""
    rng, key = random.Random(SEED), RandomKey(5, 1)
    for most in (1, 2, 5):
        source, ahead = RandomSource(word_source(CPU).generate, most, CPU), RandomAhead()
        for _ in range(60):
            firsts = [rng.randrange(40) for _ in range(rng.randrange(1, 6))]
            spans = [RandomRange(key, ahead, first, rng.randrange(1, 4), first + rng.randrange(8)) for first in firsts]
            positions = [position for span in spans for position in range(span.first, span.first + span.count)]
            columns = [torch.full((len(positions),), value) for value in (key.seed, key.completion)]
            expected = words(columns[0], torch.tensor(positions), Purpose.DRAFT, columns[1])
            assert torch.equal(source.rows(spans), expected)
