"""Windows that a target judged by rejection, judged again by the reference: from the weights that the draft drew by,
the random numbers of the seed and the probabilities of a pass of its own, alone and over nothing cached. What was
committed has to be what comes of it. So each row's law is that of the rule, which is proved elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry, PreparedAdapter
from outrider.engine.grammar.source import GrammarSpec
from outrider.engine.model_runner import ModelRunner
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.random.reference import Purpose, as_int64, words
from outrider.kernels.sampling.reference import logits_to_probs
from outrider.kernels.types import DraftWeights, Windows
from outrider.kernels.verify.reference import accept, accept_uniforms, draw
from outrider.rpc.messages import Open
from outrider.target_service.draft_buffer import Window
from outrider.target_service.outputs import VerifiedWindow, find_stop


@dataclass(frozen=True, slots=True)
class Judged:
    """A window, what it stood behind, and what was committed of it."""

    request: Open
    by_block: bool
    rejects: bool
    eos_ids: tuple[int, ...]
    tokens: tuple[int, ...]  # committed before
    prompt_len: int
    window: Window
    takes_next: bool
    num_rows: int
    ids: tuple[int, ...]
    logprobs: tuple[Any, ...]
    adapter: PreparedAdapter | None

    @classmethod
    def of(cls, verified: VerifiedWindow) -> Judged:
        """As the engine tells it, before it commits."""
        scheduled = verified.scheduled
        target = scheduled.target
        return cls(
            target.open, target.by_block, target.rejects, target.eos_ids,
            tuple(target.sequence.tokens[: scheduled.committed]), target.prompt_len, scheduled.window,
            scheduled.takes_next, scheduled.num_verify_rows, verified.ids, verified.logprobs,
            None if target.adapter is None else target.adapter.prepared,
        )  # fmt: skip


class Replay:
    """Judges again. The model is the target's own, the cache is not; the device's thread rests meanwhile."""

    def __init__(self, engine: Any) -> None:
        model, adapters = engine._runner.model, engine._runner.adapters
        self._vocab_size = engine.limits.vocab_size
        self._runner = ModelRunner(model, -(-engine.limits.max_model_len // 16), adapters=adapters)
        self._compiler = next(part for part in engine.parts if hasattr(part, "_grammars"))._grammars.compiler

    @torch.inference_mode()
    def check(self, judged: Judged) -> None:
        """AssertionError where something else comes of it."""
        logits = self._logits(judged)  # [rows, vocab]
        sampler = self._sampler(judged)
        drafted = judged.window.ids
        plan = SamplingRows(sampler, drafted if judged.takes_next else drafted[:-1])
        probs, invalid = logits_to_probs(logits, assemble([plan], token_mask=self._mask(sampler, plan)))
        windows = Windows.of([len(drafted)], [judged.num_rows])
        uniforms = accept_uniforms(self._words(judged, Purpose.ACCEPT)[: len(drafted)])
        accepted, weights = accept(
            probs, windows, torch.tensor(drafted, dtype=torch.int64), _weights(judged), uniforms,
            torch.tensor([True]) if judged.by_block else None, invalid,
        )  # fmt: skip
        count = int(accepted)
        ids = list(drafted[:count])
        if count < judged.num_rows:
            purpose = Purpose.BONUS if count == len(drafted) else Purpose.RECOVERED
            ids.append(int(draw(weights, self._words(judged, purpose)[count : count + 1])))
        num_output = len(judged.tokens) - judged.prompt_len
        left = judged.request.sampling.max_tokens - num_output
        length, *_ = find_stop(ids, judged.request.sampling, judged.eos_ids, num_output, left)
        assert tuple(ids[:length]) == judged.ids, f"{ids[:length]} and not {judged.ids} behind {num_output} tokens"
        self._check_logprobs(judged, logits)

    def _check_logprobs(self, judged: Judged, logits: Tensor) -> None:  # [rows, vocab]
        for row, (token, told) in enumerate(zip(judged.ids, judged.logprobs, strict=False)):
            own = logits[row].float().log_softmax(-1)[token]
            assert abs(told.values[list(told.ids).index(token)] - float(own)) < 1e-4

    def _logits(self, judged: Judged) -> Tensor:  # [rows, vocab] float32
        drafted = judged.window.ids[: judged.num_rows - 1]
        ids = [*judged.tokens, *drafted]
        table = list(range(-(-len(ids) // 16)))
        return self._runner.forward([BatchEntry(ids, 0, table, judged.num_rows, adapter=judged.adapter)])

    def _sampler(self, judged: Judged) -> SequenceSampler:
        prompt, output = judged.tokens[: judged.prompt_len], judged.tokens[judged.prompt_len :]
        sampling = judged.request.sampling
        sampler = SequenceSampler(sampling, prompt, output, judged.eos_ids, self._vocab_size)
        spec = GrammarSpec.of(sampling.structured_output, judged.request.reasoning)
        if spec is not None:
            matcher = self._compiler.compile(spec).matcher(output)
            sampler.constrain(matcher, judged.eos_ids if sampling.ignore_eos else ())
        return sampler

    def _mask(self, sampler: SequenceSampler, plan: SamplingRows) -> Tensor | None:  # [rows, words] int32
        if sampler.constraint is None or not sampler.constrained:
            return None
        mask = torch.empty(plan.num_rows, -(-self._vocab_size // 32), dtype=torch.int32)
        sampler.constraint.write_masks(sampler.num_output, plan.drafted, 0, mask)
        return mask

    def _words(self, judged: Judged, purpose: Purpose) -> Tensor:  # [rows, 4] int64
        first = len(judged.tokens)
        places = torch.arange(first, first + judged.num_rows)
        seeds = torch.full_like(places, as_int64(judged.request.seed))
        return words(
            seeds, places, purpose, torch.full_like(places, judged.request.completion), first if judged.by_block else 0
        )


def _weights(judged: Judged) -> DraftWeights:
    vectors = [None if one is None else (one.ids, one.weights) for one in judged.window.weights]
    return DraftWeights.of(vectors + [None] * (len(judged.window.ids) - len(vectors)))
