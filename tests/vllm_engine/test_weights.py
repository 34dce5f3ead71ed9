"""Drafts' weights as vLLM's own rejection sampler takes them: what it commits follows the target's law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from lossless.chi_square import p_value_by_context
from numpy.typing import NDArray
from support.environment import SEED
from support.kernels import BAD_VECTORS, packed
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from outrider.kernels.sampling.reference import draft_sample
from outrider.rpc.messages import TokenWeights
from outrider.target_service.draft_buffer import ChainBuffer, Window
from outrider.vllm.rows import DraftedRow
from outrider.vllm.weights import attach_weights, draft_probs, weights_of

Array = NDArray[np.float64]

VOCAB = 16
BAD = {
    name: None if vector is None else TokenWeights(*vector)
    for name, vector in zip(BAD_VECTORS, packed(list(BAD_VECTORS.values())), strict=True)
}


def probs_of(weights: dict[str, list[TokenWeights | None]], windows: dict[str, list[int]], vocab: int = 3) -> Any:
    ids = torch.tensor([token for window in windows.values() for token in window], dtype=torch.int32)
    found = draft_probs(weights, list(windows), [len(window) for window in windows.values()], ids, vocab)
    return None if found is None else found.tolist()


# What the rows are.


def test_weights_are_normalised() -> None:
    given: dict[str, list[TokenWeights | None]] = {
        "a": [TokenWeights.of([2, 0], [3, 1]), None],
        "c": [TokenWeights.of([1], [7])],
    }
    made = probs_of(given, {"a": [2, 1], "b": [0], "c": [1]})
    assert made == [[0.25, 0.0, 0.75], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_hold_is_one_hot(bad: str) -> None:
    good = TokenWeights.of([0, 1], [1, 3])
    for window in ([BAD[bad], good], [good, BAD[bad]]):
        rows = [[0.0, 1.0, 0.0] if entry is BAD[bad] else [0.25, 0.75, 0.0] for entry in window]
        assert probs_of({"a": window}, {"a": [1, 1]}) == rows


def test_bytes_of_no_whole_number_are_one_hot() -> None:
    broken = TokenWeights(b"\1\0\0\0\0", b"\1\0\0\0\0")
    assert probs_of({"a": [broken, TokenWeights.of([1], [1])]}, {"a": [1, 1]}) == [[0.0, 1.0, 0.0]] * 2


def test_without_weights_there_are_no_rows() -> None:
    assert probs_of({}, {"a": [1]}) is None
    assert probs_of({"other": [TokenWeights.of([1], [1])]}, {"a": [1]}) is None
    assert probs_of({"a": [TokenWeights.of([1], [1])]}, {"a": []}) is None


def test_a_window_may_be_shorter_or_longer_than_its_weights() -> None:
    half = TokenWeights.of([0, 1], [1, 1])
    assert probs_of({"a": [half]}, {"a": [1, 1]}) == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]
    assert probs_of({"a": [half, half]}, {"a": [1], "b": [2]}) == [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]


def test_a_row_that_was_filled_up_was_drawn_from_nothing() -> None:
    made = probs_of({"a": [TokenWeights.of([1], [1])]}, {"a": [1], "b": [-1, -1]})
    assert made == [[0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]


def test_weights_of_drawn_windows_travel_with_the_step() -> None:
    half = TokenWeights.of([0, 1], [1, 1])

    def row(request_id: str, weighs: bool, *weights: TokenWeights | None) -> DraftedRow:
        row = DraftedRow(request_id, 1, [5], 1, 9, weighs, ChainBuffer([5], 8))
        row.window = Window(1, (1,) * len(weights), weights, False)
        return row

    rows = [row("cut", True, half, None, half), row("greedy", False, half), row("one-hot", True, None)]
    step = SchedulerOutput.make_empty()
    step.scheduled_spec_decode_tokens = {"cut": [1, 1], "greedy": [1], "one-hot": [1], "unknown": [1]}
    attach_weights(step, {row.request_id: row for row in rows})
    assert weights_of(step) == {"cut": (half, None)}


# What is committed.

NUM_REQUESTS, NUM_DRAFTED = 6000, 3
PASSES = 1e-4  # seeds are fixed; what is wrong is far below
FILLED_UP = "filled up"
Probs = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """One batch: its requests take turns in how they are sampled, and in what their drafted tokens bring along."""

    name: str
    sampling: Sequence[tuple[float, int, float]] = ((1.0, 0, 1.0),)  # temperature, top_k, top_p
    brings: Sequence[str] = ("weights",)  # or a key of BAD, or FILLED_UP
    seeded: bool = False


NARROW, GREEDY = (0.7, 5, 0.9), (0.0, 0, 1.0)
SETTINGS = [
    Setting("temperature 1"),
    Setting("temperature 0.7, top_k, top_p", (NARROW,)),
    Setting("one-hot", brings=("missing",)),
    Setting("one-hot, temperature 0.7, top_k, top_p", (NARROW,), ("missing",)),
    Setting("mixed", ((1.0, 0, 1.0), NARROW, GREEDY, (1.3, 0, 0.8), (0.9, 7, 1.0)), ("weights", "missing")),
    Setting("malformed", brings=tuple(BAD)),
    Setting("malformed among others", (NARROW, (1.0, 0, 1.0)), ("weights", "duplicate id", "total of 2^24")),
    Setting("filled up", brings=("weights", FILLED_UP), sampling=(NARROW, (1.0, 0, 1.0), (1.0, 0, 1.0))),
    Setting("filled up, one-hot", brings=(FILLED_UP, "missing", "missing")),
    Setting("seeds", (NARROW, (1.0, 0, 1.0)), ("weights", "weights", "missing"), seeded=True),
]


@dataclass
class Pair:
    """A target and a draft whose next token depends on the one before alone, [vocab, vocab] logits each."""

    target: Tensor = field(default_factory=lambda: 1.5 * torch.randn(VOCAB, VOCAB))
    draft: Tensor = field(default_factory=lambda: 1.5 * torch.randn(VOCAB, VOCAB))


@pytest.fixture(scope="module")
def sampler(worker_kernels: None) -> RejectionSampler:
    return RejectionSampler(Sampler())


def law(logits: Array, temperature: float, top_k: int, top_p: float) -> Array:
    """The target's, [vocab] -> [vocab]."""
    if temperature == 0:
        return cast(Array, np.eye(len(logits))[logits.argmax()])
    descending = np.argsort(-logits)
    probs = np.exp((logits - logits.max()) / temperature)
    probs[descending[top_k or len(probs) :]] = 0
    probs /= probs.sum()
    probs[descending[np.searchsorted(np.cumsum(probs[descending]), top_p) + 1 :]] = 0
    return cast(Array, probs / probs.sum())


def committed(sampler: RejectionSampler, pair: Pair, setting: Setting, changed: Probs) -> list[list[int]]:
    """Of every request what a step commits behind token 0, by vLLM's sampler."""
    chains = torch.zeros(NUM_REQUESTS, 1 + NUM_DRAFTED, dtype=torch.int64)  # token 0, and what is drafted
    given: dict[str, list[TokenWeights | None]] = {str(number): [] for number in range(NUM_REQUESTS)}
    brings = [setting.brings[number % len(setting.brings)] for number in range(NUM_REQUESTS)]
    for place in range(NUM_DRAFTED):
        words = torch.randint(1 << 32, (NUM_REQUESTS, 4))
        drawn = draft_sample(pair.draft[chains[:, place]].softmax(-1), words)
        chains[:, place + 1] = drawn.token_ids
        ids, weights = drawn.entry_ids.tolist(), drawn.entry_weights.tolist()
        for number, (start, end) in enumerate(zip(drawn.entry_starts[:-1], drawn.entry_starts[1:], strict=True)):
            own = TokenWeights.of(ids[start:end], weights[start:end])
            given[str(number)].append(own if brings[number] == "weights" else BAD.get(brings[number]))
    logits = pair.target[chains].flatten(0, 1)  # [requests * (drafted + 1), vocab]
    for number, kind in enumerate(brings):
        if kind == FILLED_UP:
            chains[number, 1:] = -1
    metadata = metadata_of(chains[:, 1:])
    rows = draft_probs(given, list(given), metadata.num_draft_tokens, metadata.draft_token_ids, VOCAB)
    probs = None if rows is None else changed(rows)
    output = sampler(metadata, probs, logits, sampling_of(setting)).sampled_token_ids
    tokens: list[list[int]] = sampler.parse_output(output, VOCAB)[0]
    return tokens


def metadata_of(drafted: Tensor) -> SpecDecodeMetadata:  # [requests, drafted]
    metadata = SpecDecodeMetadata.make_dummy(drafted.tolist(), torch.device("cpu"))
    rows = torch.arange(len(drafted) * (NUM_DRAFTED + 1), dtype=torch.int32).view(-1, NUM_DRAFTED + 1)
    metadata.target_logits_indices = rows[:, :-1].flatten()
    metadata.bonus_logits_indices = rows[:, -1].contiguous()
    return metadata


def sampling_of(setting: Setting) -> SamplingMetadata:
    turns = [setting.sampling[number % len(setting.sampling)] for number in range(NUM_REQUESTS)]
    temperatures, top_k, top_p = (torch.tensor(column) for column in zip(*turns, strict=True))
    greedy, none = temperatures == 0, torch.empty(0)
    return SamplingMetadata(
        temperature=temperatures,
        all_greedy=bool(greedy.all()),
        all_random=not bool(greedy.any()),
        top_p=top_p,
        top_k=torch.where(top_k == 0, VOCAB, top_k).int(),
        generators={n: torch.Generator().manual_seed(SEED + n) for n in range(NUM_REQUESTS) if setting.seeded},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in turns],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def p_values(tokens: list[list[int]], pair: Pair, setting: Setting) -> list[float]:
    """Of the first token, and of each further place in the window, given the token before it. What came before a token
    decides which question it is asked for, never the token; whether a window goes on behind it, its draft decides."""
    found = []
    for place in range(NUM_DRAFTED + 1):
        counts = np.zeros((len(setting.sampling), VOCAB, VOCAB))  # by way of sampling, token before, token
        for number, window in enumerate(tokens):
            if len(window) > place:
                before = window[place - 1] if place else 0
                counts[number % len(setting.sampling), before, window[place]] += 1
        laws = [[law(row.double().numpy(), *way) for row in pair.target] for way in setting.sampling]
        found.append(p_value_by_context(counts.reshape(-1, VOCAB), np.array(laws).reshape(-1, VOCAB)))
    return found


def as_they_are(probs: Tensor) -> Tensor:
    return probs


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_tokens_follow_the_targets_law(setting: Setting, sampler: RejectionSampler) -> None:
    pair = Pair()
    tokens = committed(sampler, pair, setting, as_they_are)
    assert all(len(window) >= 1 for window in tokens)
    assert {len(window) for window in tokens} >= {1, 2}
    found = p_values(tokens, pair, setting)
    assert min(found) > PASSES, found


def test_what_was_filled_up_is_never_taken(sampler: RejectionSampler) -> None:
    tokens = committed(sampler, Pair(), Setting("", brings=(FILLED_UP, "weights")), as_they_are)
    assert {len(window) for window in tokens[::2]} == {1}


def test_a_draft_that_is_the_target_is_taken_with_weights_alone(sampler: RejectionSampler) -> None:
    logits = torch.randn(VOCAB, VOCAB)
    lengths = {
        kind: np.mean([len(window) for window in committed(sampler, Pair(logits, logits), setting, as_they_are)])
        for kind, setting in (("weights", Setting("")), ("one-hot", Setting("", brings=("missing",))))
    }
    assert lengths["weights"] > NUM_DRAFTED + 0.99  # the draft leaves out what is most improbable
    assert lengths["one-hot"] < 2


def twice_too_improbable(probs: Tensor) -> Tensor:
    return probs / 2


def of_the_place_before(probs: Tensor) -> Tensor:
    return probs.roll(1, 0)


@pytest.mark.parametrize("mutant", [twice_too_improbable, of_the_place_before])
def test_wrong_weights_are_seen(mutant: Probs, sampler: RejectionSampler) -> None:
    pair = Pair()
    assert min(p_values(committed(sampler, pair, SETTINGS[0], mutant), pair, SETTINGS[0])) < PASSES


def test_a_wrong_temperature_is_seen(sampler: RejectionSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", lambda x, ends, count, **_: x.new_ones(count))
    pair, setting = Pair(), Setting("", ((0.7, 0, 1.0),))
    assert min(p_values(committed(sampler, pair, setting, as_they_are), pair, setting)) < PASSES
