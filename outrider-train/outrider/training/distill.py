"""Distillation: a draft learns the target's distributions, on the corpus and on text that the target wrote.

The loss mixes three terms at every position: the divergence from the target's distribution (KL), the probability that
rejection sampling would refuse the draft's token (half the L1 distance), and the text's own next token. What the
target writes matters because a draft works on nothing else: some of it is greedy, some sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from outrider.training.corpus import WindowSampler
from outrider.training.model import continue_windows, logits
from outrider.training.train import Batches, Loss

SEED = 11
LEAST_LOG_PROB = -30.0


@dataclass(frozen=True)
class DistillWeights:
    """The weights of the three terms."""

    divergence: float = 0.6
    refusal: float = 0.6
    text: float = 0.1

    def apart(self, whole: Tensor, picked: Tensor, top_probs: Tensor) -> tuple[Tensor, Tensor]:
        """How far a draft is from a target whose likeliest tokens are known. whole: [...], the logarithm of the sum of
        all logits' exponentials; picked: [..., TOP + 1], the logits of the target's likeliest tokens and of the text's
        own; top_probs: [..., TOP]. Returns the loss, up to the target's entropy, which is given, and how likely the
        draft's token would be accepted, [...] each. What a draft cannot say counts as hardly ever said; what it could,
        and says still less, keeps its gradient, or one that begins far off would learn nothing."""
        log_probs = (picked - whole[..., None]).masked_fill(picked.isneginf(), LEAST_LOG_PROB)
        top, text = log_probs[..., :-1], log_probs[..., -1]
        overlap = torch.minimum(top_probs, top.exp()).sum(-1)
        loss = -self.divergence * (top_probs * top).sum(-1) - self.refusal * overlap - self.text * text
        return loss, overlap


@dataclass(frozen=True)
class WrittenPlan:
    """How much text the target writes, and when: windows of `prompt` corpus tokens and what the target adds.

    Up to step `fresh_from` one step in `pool_every` reads a pool written before the start. From then on the target
    writes `batch_size` windows anew every `steps_per_writing` steps, two times greedily and once sampled, and one step
    in `fresh_every` reads them: a draft soon knows a pool by heart, the greedy half above all.
    """

    pool_windows: int
    fresh_from: int
    pool_every: int = 3
    fresh_every: int = 2
    steps_per_writing: int = 64
    batch_size: int = 256
    prompt: int = 64
    length: int = 257


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, weights: DistillWeights) -> Loss:
    """The draft's loss on windows [sequences, length + 1]; the target's logits are computed on the way."""

    def loss(windows: Tensor) -> Tensor:
        inputs, following = windows[:, :-1], windows[:, 1:].flatten()
        with torch.no_grad():
            target_log = F.log_softmax(logits(target, inputs).flatten(0, 1).float(), dim=-1)  # [positions, vocabulary]
        draft_log = F.log_softmax(logits(draft, inputs).flatten(0, 1).float(), dim=-1)
        target_probs = target_log.exp()
        divergence = (target_probs * (target_log - draft_log)).sum(-1).mean()
        refusal = 0.5 * (target_probs - draft_log.exp()).abs().sum(-1).mean()
        text = F.nll_loss(draft_log, following)
        return weights.divergence * divergence + weights.refusal * refusal + weights.text * text

    return loss


def write_pool(target: LlamaForCausalLM, stream: Tensor, plan: WrittenPlan) -> Tensor:
    """Windows [plan.pool_windows, plan.length] int64 that the target continued, greedy and sampled by turns."""
    generator = torch.Generator().manual_seed(SEED)
    prompts = _prompts(stream, plan, SEED)
    written = [
        continue_windows(target, prompts(index), plan.length, index % 2, generator)
        for index in range(plan.pool_windows // plan.batch_size)
    ]
    windows = torch.cat(written)
    return windows[torch.randperm(len(windows), generator=generator)]


def mixed_batches(
    corpus: Batches, pool: Tensor, target: LlamaForCausalLM, stream: Tensor, plan: WrittenPlan, tokens_per_step: int
) -> Batches:
    """The corpus's batches and, by the plan, written windows; to be asked for step by step."""
    size = tokens_per_step // (plan.length - 1)
    fresh = _fresh_windows(target, stream, plan)

    def batch(step: int) -> Tensor:
        every, turn = (plan.pool_every, step) if step < plan.fresh_from else (plan.fresh_every, step - plan.fresh_from)
        windows = pool if step < plan.fresh_from else fresh(turn // plan.steps_per_writing)
        if turn % every != every - 1:
            return corpus(step)
        start = (turn // every) * size % (len(windows) - size + 1)
        return windows[start : start + size]

    return batch


def _fresh_windows(target: LlamaForCausalLM, stream: Tensor, plan: WrittenPlan) -> Batches:
    """The windows of each writing, a function of its number alone; the latest are kept."""
    prompts = _prompts(stream, plan, SEED + 1)
    latest: dict[int, Tensor] = {}

    def windows(writing: int) -> Tensor:
        if writing not in latest:
            latest.clear()
            temperature = 1.0 if writing % 3 == 2 else 0.0
            generator = torch.Generator().manual_seed(SEED + 2 + writing)
            latest[writing] = continue_windows(target, prompts(writing), plan.length, temperature, generator)
        return latest[writing]

    return windows


def _prompts(stream: Tensor, plan: WrittenPlan, seed: int) -> Batches:
    sampler = WindowSampler(stream, plan.prompt, plan.batch_size, seed)
    return lambda index: sampler.batch(index)[:, : plan.prompt]
