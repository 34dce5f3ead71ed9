"""A draft engine in hand: messages in, steps until it rests, pieces out; and what a naive draft would have drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method
from outrider.draft_service.engine import Attach, Deliver, DraftEngine
from outrider.engine.batch import BatchEntry
from outrider.engine.loader import LoadedModel, build_decoder
from outrider.engine.model_runner import ModelRunner, RunnerOptions
from outrider.engine.sampler import SamplingRows, SequenceSampler, process, process_greedy
from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.kernels.verify.reference import coupled_choice
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.messages import Commit, Credit, DraftEvent, Open, Piece, TokenWeights
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=400)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=400)
STREAM = 1


@cache
def tiny_model(max_model_len: int | None = None, batch_invariant: bool = True) -> LoadedModel:
    """A tiny model, by default one whose rows are bit-identical in every batch."""
    state = tiny_state(tiny_hf_model())
    return build_decoder(tiny_config(), state, batch_invariant=batch_invariant, max_model_len=max_model_len)


def new_open(sequence_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **options: Any) -> Open:
    return Open(sequence_id, tuple(prompt), sampling, **options)


class Harness:
    """One engine, one stream. `computed` holds the whole context of every row that was ever computed."""

    def __init__(
        self, num_blocks: int = 64, max_model_len: int | None = None, batch_invariant: bool = True, **options: Any
    ) -> None:
        self.loaded = tiny_model(max_model_len, batch_invariant)
        self.method = build_model_method(self.loaded, RunnerOptions(num_blocks=num_blocks))
        self.engine = DraftEngine(make_methods([self.method, NgramProposer(2, 4)]), **options)
        self.events: list[DraftEvent] = []
        self.flushes: list[list[DraftEvent]] = []
        self.batches: list[list[BatchEntry]] = []
        self.computed: list[tuple[int, ...]] = []
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.engine.handle(Attach(STREAM, self._sink))
        self._forward = self.method.proposer.runner.forward
        self.method.proposer.runner.forward = self._watch  # type: ignore[method-assign]
        grower = self.engine._grower
        assert grower is not None
        self._copy_blocks, grower._copy_blocks = grower._copy_blocks, self._copy

    def send(self, *messages: Any) -> None:
        self.engine.handle(Deliver(STREAM, messages))

    def run(self, *messages: Any) -> list[DraftEvent]:
        """Sends one frame and steps until the engine rests; what it answered."""
        self.send(*messages)
        first = len(self.events)
        for _ in range(2000):
            if self.engine.step(time.monotonic()) != 0.0:
                break
        return self.events[first:]

    def ids(self, *messages: Any) -> list[tuple[int, ...]]:
        return [event.ids for event in self.run(*messages) if isinstance(event, Piece)]

    def check(self) -> None:
        drafts = self.engine.sequences.values()
        lines = [line for draft in drafts for line in (draft.sequence, *(b.sequence for b in draft.branches))]
        tables = [line.block_table for line in lines]
        self.method.cache.pool.check_integrity(tables)

    def _sink(self, events: Sequence[DraftEvent]) -> None:
        self.events.extend(events)
        self.flushes.append(list(events))

    def _watch(self, entries: Sequence[BatchEntry]) -> torch.Tensor:
        self.batches.append(list(entries))
        for entry in entries:
            for offset, token in enumerate(entry.token_ids):
                position = entry.start + offset
                before = self._slots[self._slot(entry, position - 1)] if position else ()
                self.computed.append((*before, token))
                self._slots[self._slot(entry, position)] = (*before, token)
        return self._forward(entries)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for offset in range(16):
                self._slots[target, offset] = self._slots.get((source, offset), ())
        self._copy_blocks(pairs)

    @staticmethod
    def _slot(entry: BatchEntry, position: int) -> tuple[int, int]:
        return entry.block_table[position // 16], position % 16


def commit(sequence_id: int, position: int, *ids: int, **options: Any) -> Commit:
    return Commit(sequence_id, position, ids, **options)


def credit(sequence_id: int, until: int, max_window: int = 4, max_branches: int = 0) -> Credit:
    return Credit(sequence_id, until, max_window, max_branches=max_branches)


def naive(request: Open, tokens: Sequence[int], loaded: LoadedModel) -> tuple[int, TokenWeights | None]:
    """The next token after `tokens`, everything computed afresh for one sequence."""
    runner = ModelRunner(loaded.model, 32)
    logits = runner.forward([BatchEntry(list(tokens), 0, list(range(32)), 1)])
    prompt_len = len(request.prompt_ids)
    sampler = SequenceSampler(
        request.sampling, tokens[:prompt_len], tokens[prompt_len:], loaded.eos_token_ids, loaded.vocab_size
    )
    plan = [SamplingRows(sampler)]
    if request.sampling.greedy or (request.one_hot and request.acceptance == AcceptanceRule.REJECTION):
        return int(process_greedy(logits, plan)[0]), None
    probs, _ = process(logits, plan)
    place = [torch.tensor([n]) for n in (as_int64(request.seed), len(tokens), request.completion)]
    if request.acceptance == AcceptanceRule.COUPLED:
        return int(coupled_choice(probs, exponential_noise(*place, loaded.vocab_size))), None
    samples = draft_sample(probs, words(place[0], place[1], Purpose.DRAFT, place[2]))
    return int(samples.token_ids), TokenWeights.of(samples.entry_ids.tolist(), samples.entry_weights.tolist())
