"""The settling stage: against loops, and against special tokens where nobody expects them.

A small model, decoded greedily, repeats itself. Every few steps the target continues corpus windows greedily, and it
trains on both: on the corpus as ever, and on its own text against what it gave before the stage, less every token that
completes an n-gram which the window already holds. That teacher is a distribution: what a repetition loses goes to the
likely tokens beside it. Special tokens are taken out of it too.

On the corpus the tokens that open a turn of the chat template, and the end tokens between two conversations cut from
one file, are no labels: they come after any line, and a prompt that ends with a line break would look like such a cut.
The first are never the model's to write; they become improbable everywhere.
"""

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from outrider.training.corpus import WindowSampler
from outrider.training.model import continue_windows, logits
from outrider.training.train import Batches, Loss, TrainPlan, corpus_batches, train

logger = logging.getLogger(__name__)

HASH_FACTOR = 1_000_003
END_ID = 0
TURN_IDS = slice(1, 3)  # <|user|> and <|assistant|>
IGNORED_LABEL = -100


@dataclass(frozen=True)
class RepetitionPlan:
    """What the model writes, how often it writes anew, and how it trains on it.

    `train` has one phase, of windows as long as the written ones: a step takes as many of each. The divergence from the
    teacher weighs `repeated_weight` where a repetition is, `weight` elsewhere.
    """

    train: TrainPlan
    steps_per_writing: int = 12
    windows: int = 256
    prompt: int = 64
    length: int = 193
    ngram: int = 4
    weight: float = 0.5
    repeated_weight: float = 8.0
    repeated_share: float = 0.0005  # what a repetition keeps of its probability, before the rest is scaled up
    turn_weight: float = 0.1
    turn_log_prob: float = math.log(1e-6)  # below this the tokens that open a turn cost nothing


def settle(model: LlamaForCausalLM, stream: Tensor, plan: RepetitionPlan, prepare: Callable[[Loss], Loss]) -> None:
    """Train `model` in place by the plan; `prepare` may compile the loss."""
    batches = paired_batches(model, stream, plan)
    train(model, prepare(settle_loss(model, frozen_copy(model), plan)), plan.train, batches)


def frozen_copy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model as it is now, its weights in bfloat16."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for weight in frozen.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return frozen


def paired_batches(model: LlamaForCausalLM, stream: Tensor, plan: RepetitionPlan) -> Batches:
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


def settle_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM, plan: RepetitionPlan) -> Loss:
    """The text's loss on the upper half of the windows, the blocking teacher's on the lower, the turns' on both."""

    def loss(windows: Tensor) -> Tensor:
        log_probs = F.log_softmax(logits(model, windows[:, :-1]).float(), dim=-1)  # [sequences, context, vocabulary]
        half = len(windows) // 2
        labels = windows[:half, 1:]
        labels = labels.masked_fill(unwritten(labels), IGNORED_LABEL)
        text = F.nll_loss(log_probs[:half].flatten(0, 1), labels.flatten())
        own = windows[half:]
        taught = blocked_probs(teacher, own, plan)  # [sequences, written, vocabulary]
        divergence = (torch.xlogy(taught, taught) - taught * log_probs[half:, plan.prompt - 1 :]).sum(-1)
        repeated = repetitions(own, plan.ngram)[:, plan.prompt :]
        divergence = torch.where(repeated, plan.repeated_weight, plan.weight) * divergence
        turns = (log_probs[..., TURN_IDS] - plan.turn_log_prob).clamp_min(0.0).mean()
        return text + divergence.mean() + plan.turn_weight * turns

    return loss


def unwritten(labels: Tensor) -> Tensor:
    """[sequences, length] bool: the tokens that open a turn, and the end tokens right before a user's turn."""
    opens_turn = (labels >= TURN_IDS.start) & (labels < TURN_IDS.stop)
    return opens_turn | ((labels == END_ID) & F.pad(opens_turn[:, 1:], (0, 1)))


@torch.no_grad()
def blocked_probs(teacher: LlamaForCausalLM, own: Tensor, plan: RepetitionPlan) -> Tensor:
    """What the teacher gives for each token after the prompt of `own`, repetitions and special tokens taken out."""
    probs = F.softmax(
        logits(teacher, own[:, :-1])[:, plan.prompt - 1 :].float(), dim=-1
    )  # [sequences, written, vocabulary]
    repeated = repetitions(own, plan.ngram)[:, plan.prompt :, None]
    ids = torch.arange(probs.shape[-1])
    probs = torch.where(repeated & (ids == own[:, plan.prompt :, None]), probs * plan.repeated_share, probs)
    probs = probs.masked_fill(ids < TURN_IDS.stop, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def repetitions(windows: Tensor, ngram: int) -> Tensor:
    """[sequences, length] bool: whether the n-gram that ends here also ended earlier in the same window."""
    grams = windows.unfold(1, ngram, 1)  # [sequences, length - ngram + 1, ngram]
    keys = torch.zeros(grams.shape[:2], dtype=torch.int64)
    for place in range(ngram):
        keys = keys * HASH_FACTOR + grams[..., place]
    equal = keys[:, :, None] == keys[:, None, :]
    seen = equal.tril(-1).any(-1)
    return F.pad(seen, (ngram - 1, 0))
