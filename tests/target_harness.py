"""A target engine driven step by step, without threads or gRPC, on a tiny random model with a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.loader import LoadedModel, build_decoder
from outrider.engine.model_runner import ModelRunner
from outrider.rpc.messages import Commit, Credit, Failure, Open, Piece, PromptLogprobs, TargetEvent, TokenWeights
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.engine import StreamCommand, TargetEngine
from outrider.target_service.outputs import StepReport
from outrider.target_service.sequence import TargetLimits

VOCAB = 97


def tiny_model(seed: int = 0, batch_invariant: bool = True, **options: Any) -> tuple[Any, LoadedModel]:
    """A transformers model and our decoder with the same weights."""
    hf = tiny_hf_model("llama", seed, **options)
    model = build_decoder(tiny_config("llama", **options), tiny_state(hf), batch_invariant=batch_invariant)
    return hf, model


@dataclass
class Harness:
    """One engine and what it sent."""

    engine: TargetEngine
    now: float = 0.0
    num_steps: int = 0  # that ran
    events: dict[int, list[TargetEvent]] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedModel, num_blocks: int = 64, eos_ids: tuple[int, ...] = (), **options: Any) -> Harness:
        limits = TargetLimits(loaded.vocab_size, loaded.max_model_len, eos_ids, num_blocks)
        harness: Harness

        def count(_: StepReport) -> None:
            harness.num_steps += 1

        runner, clock = ModelRunner(loaded.model, num_blocks), lambda: harness.now
        engine = TargetEngine(runner, limits, clock=clock, **{"on_step": count} | options)
        harness = cls(engine)
        return harness

    def send(self, *messages: Any) -> None:
        for message in messages:
            sink = self.events.setdefault(message.sequence_id, []).append
            self.engine.handle(StreamCommand(1, message, sink))

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
    }
    own = {name: sampling.pop(name) for name in names & sampling.keys()}
    sampling.setdefault("temperature", 0.0)
    return Open(sequence_id, tuple(prompt), SamplingParams(**sampling), **own)


DraftFn = Callable[[list[int], int], tuple[list[int], list[TokenWeights | None]]]


def speculate(harness: Harness, request: Open, k: int, draft: DraftFn, chain: int = 0) -> list[int]:
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
            Piece(sequence_id, chain, len(tokens), tuple(ids), tuple(weights)),
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


REJECTION, COUPLED = AcceptanceRule.REJECTION, AcceptanceRule.COUPLED
