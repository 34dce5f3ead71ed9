"""A draft engine and a target engine in hand, without threads or gRPC: messages in, steps until they rest, events
out; and what a naive draft would have drawn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import ascii_backend, build_decoder, tiny_config, tiny_hf_model, tiny_state
from torch import Tensor

from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.grammar import DraftGrammars
from outrider.engine import cuda_graphs
from outrider.engine.adapters.loader import LoadedAdapter
from outrider.engine.adapters.resident import AdapterRoom, ResidentAdapters
from outrider.engine.batch import BatchEntry, StepLimits
from outrider.engine.grammar.compiler import GrammarCompiler, Matcher
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import ModelRunner, RunnerOptions
from outrider.engine.random import RandomKey
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.engine.token_tree import TokenTree
from outrider.kernels.random.reference import Purpose, as_int64, exponential_noise, words
from outrider.kernels.sampling.reference import draft_sample, greedy_choice, logits_to_probs
from outrider.kernels.verify.reference import coupled_choice
from outrider.proposers.base import TokenProposer
from outrider.proposers.draft_rows import DraftRule, DraftSampling
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.reencoding import JoinedVocabulary, PairMap
from outrider.proposers.vocabulary_map import VocabularyMap
from outrider.rpc.messages import (
    Commit,
    Credit,
    DraftEvent,
    DraftTokens,
    Failure,
    Open,
    PromptLogprobs,
    TargetEvent,
    TokenWeights,
)
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.device_verifier import verifier_of
from outrider.target_service.engine import TargetEngine
from outrider.target_service.grammars import Grammars
from outrider.target_service.outputs import ComputedStep
from outrider.target_service.sequence import TargetLimits

GREEDY = SamplingParams(temperature=0.0, max_tokens=400)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=400)
STREAM = 1


@cache
def tiny_draft(max_model_len: int | None = None, batch_invariant: bool = True) -> LoadedModel:
    """A tiny model, by default one whose rows are bit-identical in every batch."""
    state = tiny_state(tiny_hf_model())
    return build_decoder(tiny_config(), state, batch_invariant=batch_invariant, max_model_len=max_model_len)


def new_open(sequence_id: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **options: Any) -> Open:
    return Open(sequence_id, tuple(prompt), sampling, **options)


class DraftHarness:
    """One engine, one stream. `computed` holds the whole context of every row that was ever computed."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_model_len: int | None = None,
        batch_invariant: bool = True,
        more: Sequence[TokenProposer] = (),
        mappings: Sequence[PairMap] = (),
        tree: TokenTree | None = None,
        watched: bool = True,
        tokenizer: Path | None = None,  # a tokenizer.json, by which drafts know grammars
        loaded: LoadedModel | None = None,
        adapters: Mapping[str, LoadedAdapter] | None = None,  # of that model, by the names of a target's
        learned: AdapterRoom | None = None,
        name: str = "draft_model",
        **options: Any,
    ) -> None:
        self.loaded = loaded or tiny_draft(max_model_len, batch_invariant)
        joined = [JoinedVocabulary(mapping, mapping) for mapping in mappings]
        by_target = {vocabulary.mapping.target.fingerprint: vocabulary for vocabulary in joined}
        self.method = build_model_method(
            self.loaded,
            RunnerOptions(num_blocks=num_blocks),
            name,
            vocabularies=by_target,
            tree=tree,
            adapters=adapters,
            learned=learned,
        )
        if tokenizer is not None:
            grammars = DraftGrammars(tokenizer, self.loaded.vocab_size, self.loaded.eos_token_ids)
            self.method = replace(self.method, grammars=grammars)
        methods = make_methods([self.method, NgramProposer(2, 4), *more])
        self.engine = DraftEngine(methods, flush=self._flush, **options)
        self.events: list[DraftEvent] = []
        self.flushes: list[list[DraftEvent]] = []
        self.batches: list[list[BatchEntry]] = []
        self.computed: list[tuple[int, ...]] = []
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self._forward = self.method.proposer.runner.forward
        if watched:  # else chains are drawn on a device, where nobody sees what they compute
            self.method.proposer.runner.forward = self._watch  # type: ignore[method-assign]
        branch_planner = self.engine._branch_planner
        assert branch_planner is not None
        self._copy_blocks, branch_planner._copy_blocks = branch_planner._copy_blocks, self._copy

    def send(self, *messages: Any) -> None:
        self.engine.handle(Deliver(STREAM, messages, self.events.append))

    def run(self, *messages: Any) -> list[DraftEvent]:
        """Sends one frame and steps until the engine rests; what it answered."""
        first = len(self.events)
        self.send(*messages)
        for _ in range(2000):
            if self.engine.step(time.monotonic()) != 0.0:
                break
        return self.events[first:]

    def ids(self, *messages: Any) -> list[tuple[int, ...]]:
        return [event.ids for event in self.run(*messages) if isinstance(event, DraftTokens)]

    def check(self) -> None:
        drafts = self.engine.sequences.values()
        lines = [line for draft in drafts for line in (draft.sequence, *(b.sequence for b in draft.branches))]
        tables = [line.block_table for line in lines]
        self.method.cache.pool.check_integrity(tables)

    def _flush(self) -> None:
        if events := self.events[sum(map(len, self.flushes)) :]:
            self.flushes.append(events)

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


def naive(
    request: Open,
    tokens: Sequence[int],
    loaded: LoadedModel,
    mapping: VocabularyMap | None = None,
    chain: tuple[int, int] = (0, 0),
) -> tuple[int, TokenWeights | None]:
    """The next token after `tokens`, everything computed afresh for one sequence, in the target's ids; `chain` is its
    number and start."""
    runner, vocab_size, eos_ids = ModelRunner(loaded.model, 32), loaded.vocab_size, loaded.eos_token_ids
    own = list(tokens) if mapping is None else mapping.spell_all(tokens)
    logits = runner.forward([BatchEntry(own, 0, list(range(32)), 1)])  # [1, own vocab]
    if mapping is not None:
        vocab_size, eos_ids = len(mapping.target.tokens), mapping.targets_of(eos_ids)
        shared = {token_id: float(logits[0, own]) for token_id, own in mapping.to_draft.items()}
        logits = torch.tensor([[shared.get(token_id, -torch.inf) for token_id in range(vocab_size)]])
    prompt_len = len(request.prompt_ids)
    sampler = SequenceSampler(request.sampling, tokens[:prompt_len], tokens[prompt_len:], eos_ids, vocab_size)
    sampling = assemble([SamplingRows(sampler)])
    if request.sampling.greedy or (request.one_hot and request.acceptance == AcceptanceRule.REJECTION):
        return int(greedy_choice(logits, sampling)[0]), None
    probs, _ = logits_to_probs(logits, sampling)
    seed, place, completion = (torch.tensor([n]) for n in (as_int64(request.seed), len(tokens), request.completion))
    if request.acceptance == AcceptanceRule.COUPLED:
        return int(coupled_choice(probs, exponential_noise(seed, place, completion, vocab_size))), None
    by_chain = request.acceptance == AcceptanceRule.BLOCK
    draw = DraftSampling(DraftRule.REJECTION, RandomKey(0, 0), by_chain=by_chain).of_chain(*chain).key.draw
    samples = draft_sample(probs, words(seed, place, Purpose.DRAFT, completion, draw))
    return int(samples.token_ids), TokenWeights.of(samples.entry_ids.tolist(), samples.entry_weights.tolist())


VOCAB = 97
GRAMMAR_EOS = 2


def tiny_model(seed: int = 0, batch_invariant: bool = True, **options: Any) -> tuple[Any, LoadedModel]:
    """A transformers model and our decoder with the same weights."""
    hf = tiny_hf_model("llama", seed, **options)
    model = build_decoder(tiny_config("llama", **options), tiny_state(hf), batch_invariant=batch_invariant)
    return hf, model


class AtOnce(Executor):
    """Runs what it is given when it is given it."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


@cache
def grammar_compiler(vocab_size: int = VOCAB, eos_id: int = GRAMMAR_EOS) -> GrammarCompiler:
    """Of tokens that are single characters."""
    return GrammarCompiler(ascii_backend(vocab_size, eos_id).to_str().encode(), vocab_size, (eos_id,))


def slow_masks(patch: pytest.MonkeyPatch, behind: int, counts: Callable[[], bool] = lambda: True) -> list[int]:
    """From now on every mask behind so many tokens, and more, takes 20 ms of its thread; the list grows by the number
    of tokens behind which one was made, of those that count."""
    made: list[int] = []
    write = Matcher._write_mask

    def burning(self: Matcher, place: Any, row: Tensor) -> None:
        if counts():
            made.append(place.num_consumed)
        until = time.thread_time() + 0.02
        while place.num_consumed >= behind and time.thread_time() < until:
            pass
        write(self, place, row)

    patch.setattr(Matcher, "_write_mask", burning)
    return made


def grammars_at_once(vocab_size: int = VOCAB, eos_id: int = GRAMMAR_EOS) -> Grammars:
    """A target's constraints without threads, so that steps do not depend on time."""
    return Grammars(grammar_compiler(vocab_size, eos_id), AtOnce(), AtOnce())


@dataclass
class TargetHarness:
    """One engine and what it sent."""

    engine: TargetEngine
    now: float = 0.0
    num_steps: int = 0  # that ran
    events: dict[int, list[TargetEvent]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        num_blocks: int = 64,
        eos_ids: tuple[int, ...] = (),
        max_open_tokens: int = 0,
        adapters: ResidentAdapters | None = None,
        **options: Any,
    ) -> TargetHarness:
        limits = TargetLimits(
            loaded.vocab_size, loaded.max_model_len, eos_ids, num_blocks, max_open_tokens=max_open_tokens
        )
        harness: TargetHarness

        def count(_: ComputedStep) -> None:
            harness.num_steps += 1

        head = options.get("head")
        taps = head.taps if head else ()
        runner, clock = ModelRunner(loaded.model, num_blocks, taps=taps, adapters=adapters), lambda: harness.now
        engine = TargetEngine(runner, limits, clock=clock, **{"on_step": count} | options)
        harness = cls(engine)
        return harness

    def capture(self, limits: StepLimits) -> None:
        """Captures its steps, and what judges them, as a target on a GPU does at its start."""
        runner = self.engine._runner
        runner.capture(limits, cuda_graphs.CudaGraphs(runner.model.device))
        self.engine.steps.verifier = verifier_of(runner, VOCAB)

    def send(self, *messages: Any) -> None:
        for message in messages:
            sink = self.events.setdefault(message.sequence_id, []).append
            self.engine.handle(Deliver(1, [message], sink))

    def run(self, max_steps: int = 10_000) -> float | None:
        """Steps until nothing is due; returns what the engine would wait for."""
        for _ in range(max_steps):
            wait = self.engine.step(self.now)
            tables = [t.sequence.block_table for t in self.engine.scheduler.sequences.values()]
            self.engine.cache.pool.check_integrity(tables)
            if wait != 0.0:
                return wait
        raise RuntimeError("the engine never became idle")

    def commits(self, sequence_id: int) -> list[Commit]:
        return [event for event in self.events.get(sequence_id, []) if isinstance(event, Commit)]

    def failures(self, sequence_id: int) -> list[Failure]:
        return [event for event in self.events.get(sequence_id, []) if isinstance(event, Failure)]

    def prompt_logprobs(self, sequence_id: int) -> list[PromptLogprobs]:
        return [event for event in self.events.get(sequence_id, []) if isinstance(event, PromptLogprobs)]

    def output(self, sequence_id: int) -> list[int]:
        return [token for commit in self.commits(sequence_id) for token in commit.ids]

    def decode_plain(self, sequence_id: int, request: Open) -> list[int]:
        """The whole output with unlimited credit and no draft."""
        self.send(request, Credit(sequence_id, 1 << 20, 0))
        self.run()
        return self.output(sequence_id)


def opened(sequence_id: int, prompt: Sequence[int], **sampling: Any) -> Open:
    """An Open with the given sampling fields; `seed`, `acceptance` and other Open fields are taken out of them."""
    names = {
        "output_ids",
        "fork_of",
        "completion",
        "acceptance",
        "seed",
        "timeout_ms",
        "priority",
        "suspect",
        "salt",
        "model_digest",
        "first_chain",
        "method",
        "adapter",
    }
    own = {name: sampling.pop(name) for name in names & sampling.keys()}
    sampling.setdefault("temperature", 0.0)
    return Open(sequence_id, tuple(prompt), SamplingParams(**sampling), **own)


DraftFn = Callable[[list[int], int], tuple[list[int], list[TokenWeights | None]]]


def speculate(harness: TargetHarness, request: Open, k: int, draft: DraftFn, chain: int = 0) -> list[int]:
    """A sequential loop by hand: propose k from the committed tokens, verify, repeat."""
    sequence_id = request.sequence_id
    tokens = [*request.prompt_ids, *request.output_ids]
    harness.send(request, Credit(sequence_id, len(tokens) + 1, 0))
    seen = 0
    while True:
        harness.run()
        fresh = harness.commits(sequence_id)[seen:]
        seen += len(fresh)
        for commit in fresh:
            tokens += commit.ids
            if commit.finish_reason is not None:
                return tokens[len(request.prompt_ids) :]
        ids, weights = draft(tokens, k)
        chain += 1
        harness.send(
            DraftTokens(sequence_id, chain, len(tokens), tuple(ids), tuple(weights)),
            Credit(sequence_id, len(tokens) + k + 1, k, 60_000),
        )


def oracle(reference: Sequence[int], prompt_len: int, rng: random.Random, hit: float = 0.7) -> DraftFn:
    """Drafts the reference's own continuation, each token wrong with probability 1 - hit."""

    def draft(tokens: list[int], k: int) -> tuple[list[int], list[TokenWeights | None]]:
        ids = []
        for position in range(len(tokens) - prompt_len, len(tokens) - prompt_len + k):
            right = reference[position] if position < len(reference) else rng.randrange(VOCAB)
            ids.append(right if rng.random() < hit else rng.randrange(VOCAB))
        return ids, []

    return draft


def hf_greedy(hf: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own generate gives."""
    with torch.inference_mode():
        ids = hf.generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return [int(token) for token in ids[0, len(prompt) :]]


REJECTION, COUPLED, BLOCK = AcceptanceRule.REJECTION, AcceptanceRule.COUPLED, AcceptanceRule.BLOCK
