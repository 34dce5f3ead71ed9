"""Against loops: a small model, decoded greedily, repeats itself; unlikelihood training takes that away.

Every few steps the target continues corpus windows greedily, and it trains on both: on the corpus as ever, and on its
own text by lowering the probability of every token that completes an n-gram which the window already holds (Welleck
et al., "Neural text generation with unlikelihood training", 2020).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.training.corpus import WindowSampler
from outrider.training.decoding import continue_windows
from outrider.training.model import Llama
from outrider.training.train import Batches, Loss, TrainPlan, corpus_batches, train

logger = logging.getLogger(__name__)

HASH_FACTOR = 1_000_003


@dataclass(frozen=True)
class RepetitionPlan:
    """What the model writes, how often it writes anew, and how it trains on it.

    `train` has one phase, of windows as long as the written ones: a step takes as many of each.
    """

    train: TrainPlan
    steps_per_writing: int = 12
    windows: int = 256
    prompt: int = 64
    length: int = 193
    ngram: int = 4
    weight: float = 2.0


def unlearn_repetition(model: Llama, stream: Tensor, plan: RepetitionPlan, prepare: Callable[[Loss], Loss]) -> None:
    """Train `model` in place by the plan; `prepare` may compile the loss."""
    batches = paired_batches(model, stream, plan)
    train(model, prepare(unlikelihood_loss(model, plan)), plan.train, batches)


def paired_batches(model: Llama, stream: Tensor, plan: RepetitionPlan) -> Batches:
    """The corpus's windows, and below them as many that the model wrote, to be asked for step by step."""
    corpus = corpus_batches(plan.train, stream)
    prompts = WindowSampler(stream, plan.prompt, plan.windows, plan.train.seed)
    written = torch.empty(0, plan.length, dtype=torch.int64)

    def batch(step: int) -> Tensor:
        nonlocal written
        writing, place = divmod(step, plan.steps_per_writing)
        if place == 0:
            start = prompts.batch(writing)[:, : plan.prompt]
            written = continue_windows(model, start, plan.length, 0.0, torch.Generator())
            share = repetitions(written, plan.ngram)[:, plan.prompt :].float().mean().item()
            logger.info("step %d: %.3f of the greedy text repeats", step, share)
        windows = corpus(step)
        rows = torch.arange(place * len(windows), (place + 1) * len(windows)) % len(written)
        return torch.cat([windows, written[rows]])

    return batch


def unlikelihood_loss(model: Llama, plan: RepetitionPlan) -> Loss:
    """The text's loss on the upper half of the windows, the repetitions' on the lower half."""

    def loss(windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1]).float()  # [sequences, context, vocabulary]
        half = len(windows) // 2
        text = F.cross_entropy(logits[:half].flatten(0, 1), windows[:half, 1:].flatten())
        own = windows[half:]
        log_probs = F.log_softmax(logits[half:], dim=-1).gather(-1, own[:, 1:, None])[..., 0]
        refused = -torch.log(-torch.expm1(log_probs.clamp_max(-1e-6)))  # -log(1 - p): [sequences, context]
        repeated = repetitions(own, plan.ngram)[:, plan.prompt :]
        unlikelihood = (refused[:, plan.prompt - 1 :] * repeated).mean()
        return text + plan.weight * unlikelihood

    return loss


def repetitions(windows: Tensor, ngram: int) -> Tensor:
    """[sequences, length] bool: whether the n-gram that ends here also ended earlier in the same window."""
    grams = windows.unfold(1, ngram, 1)  # [sequences, length - ngram + 1, ngram]
    keys = torch.zeros(grams.shape[:2], dtype=torch.int64)
    for place in range(ngram):
        keys = keys * HASH_FACTOR + grams[..., place]
    equal = keys[:, :, None] == keys[:, None, :]
    seen = equal.tril(-1).any(-1)
    return F.pad(seen, (ngram - 1, 0))
