"""Row parameters by position: a row after drafted tokens is processed as if they were committed."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble, process, process_greedy
from outrider.kernels.types import RowSampling
from outrider.rpc.sampling_params import SamplingParams

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
    probs, _ = process(torch.zeros(window.num_rows, VOCAB_SIZE) if logits is None else logits, [window])
    return [row.nonzero().squeeze(1).tolist() for row in probs]


@given(PARAMS, st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=4), st.lists(TOKENS, max_size=4), st.randoms())
@settings(max_examples=100, deadline=None)
def test_each_row_of_a_window_equals_plain_decoding(
    params: SamplingParams, prompt: list[int], output: list[int], drafted: list[int], random: Any
) -> None:
    logits = torch.tensor([[random.uniform(-3, 3) for _ in range(VOCAB_SIZE)] for _ in range(len(drafted) + 1)])
    committed = SequenceSampler(params, prompt, [], [0], VOCAB_SIZE)
    for token in output:
        committed.append([token])
    window, invalid = process(logits, [SamplingRows(committed, drafted)])
    for row in range(len(drafted) + 1):
        prefix = drafted[:row]
        plain = SequenceSampler(params, prompt, output + prefix, [0], VOCAB_SIZE)
        expected, expected_invalid = process(logits[row : row + 1], [SamplingRows(plain)])
        chain, _ = process(logits[row : row + 1], [SamplingRows(committed, prefix, first=row)])
        assert torch.equal(window[row], expected[0]) and torch.equal(chain, expected)
        assert bool(invalid[row]) == bool(expected_invalid)


@given(st.lists(st.tuples(PARAMS, st.lists(TOKENS, max_size=3)), min_size=1, max_size=4), st.randoms())
@settings(max_examples=50, deadline=None)
def test_a_batch_equals_each_sequence_alone(cases: list[tuple[SamplingParams, list[int]]], random: Any) -> None:
    plans = [SamplingRows(SequenceSampler(params, [1, 2], [3], [0], VOCAB_SIZE), drafted) for params, drafted in cases]
    num_rows = sum(plan.num_rows for plan in plans)
    logits = torch.tensor([[random.uniform(-3, 3) for _ in range(VOCAB_SIZE)] for _ in range(num_rows)])
    together, _ = process(logits, plans)
    start = 0
    for plan in plans:
        alone, _ = process(logits[start : start + plan.num_rows], [plan])
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
    ids, invalid = process_greedy(logits, plans)
    assert torch.equal(process(logits, plans)[0].argmax(dim=-1), ids) and not invalid.any()


def test_a_mask_is_applied_by_row() -> None:
    masks = torch.tensor([[0b0110], [0b1000]], dtype=torch.int32)
    probs, _ = process(torch.zeros(2, VOCAB_SIZE), [SamplingRows(sampler(), [1])], masks)
    assert [row.nonzero().squeeze(1).tolist() for row in probs] == [[1, 2], [3]]
