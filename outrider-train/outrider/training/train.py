"""The training loop: a fixed number of steps, with checkpoints from which a run goes on unchanged."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from outrider.training.corpus import WindowSampler
from outrider.training.model import logits
from outrider.training.optimizer import Optimizer

logger = logging.getLogger(__name__)

LOG_EVERY = 50
CHECKPOINT_EVERY = 200
MODEL, OPTIMIZER = "model.", "optimizer."  # what names in a checkpoint begin with

Loss = Callable[[Tensor], Tensor]
Batches = Callable[[int], Tensor]
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class TrainPlan:
    """How long and how fast to train: every step sees `tokens_per_step` tokens.

    The learning rate rises for `warmup_steps`, holds, and falls linearly to zero over the last `decay_steps`.
    `phases` are (first step, window length): short windows train faster, so they come first.
    """

    steps: int
    decay_steps: int
    phases: tuple[tuple[int, int], ...] = ((0, 256),)
    warmup_steps: int = 100
    tokens_per_step: int = 8192
    matrix_lr: float = 0.02
    vector_lr: float = 0.003
    weight_decay: float = 0.01
    seed: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens the whole run sees, repeats included."""
        return self.steps * self.tokens_per_step

    def rate(self, step: int) -> float:
        """The factor on the learning rates at `step`."""
        rise = (step + 1) / max(1, self.warmup_steps)
        fall = (self.steps - step) / max(1, self.decay_steps)
        return min(1.0, rise, fall)

    def context(self, step: int) -> int:
        """The window length at `step`."""
        return max((first, context) for first, context in self.phases if first <= step)[1]


def corpus_batches(plan: TrainPlan, stream: Tensor) -> Batches:
    """The plan's windows of the training stream: [sequences, context + 1] int64 for each step."""
    samplers = {
        context: WindowSampler(stream, context, max(1, plan.tokens_per_step // context), plan.seed)
        for _, context in plan.phases
    }
    return lambda step: samplers[plan.context(step)].batch(step)


def text_loss(model: LlamaForCausalLM) -> Loss:
    """The mean negative log-likelihood of each window's next tokens."""

    def loss(windows: Tensor) -> Tensor:
        computed = logits(model, windows[:, :-1])  # [sequences, context, vocabulary]
        return F.cross_entropy(computed.flatten(0, 1).float(), windows[:, 1:].flatten())

    return loss


def train(
    model: nn.Module,
    loss: Callable[[Batch], Tensor],
    plan: TrainPlan,
    batches: Callable[[int], Batch],
    checkpoint: Path | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train `model` in place to the plan's end, from `checkpoint` if it exists; the loss of every step taken, of which
    `on_step` is told as well."""
    optimizer = Optimizer(model, matrix_lr=plan.matrix_lr, vector_lr=plan.vector_lr, weight_decay=plan.weight_decay)
    first = load_checkpoint(checkpoint, model, optimizer) if checkpoint else 0
    losses: list[float] = []
    started = time.monotonic()
    for step in range(first, plan.steps):
        value = loss(batches(step))
        torch.autograd.backward(value)
        optimizer.step(plan.rate(step))
        losses.append(value.item())
        on_step(step + 1, losses[-1])
        if (step + 1) % LOG_EVERY == 0:
            _log(plan, step + 1, losses, time.monotonic() - started)
        if checkpoint and ((step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == plan.steps):
            save_checkpoint(checkpoint, model, optimizer, step + 1)
    return losses


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write the run's whole state."""
    model_state = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    optimizer_state = {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer.state_dict().items()}
    save_tensors(path, {**model_state, **optimizer_state, "step": torch.tensor(step)})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file; a crash leaves the one before it, or this one. Of tied tensors all but the first are copies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, apart, seen = path.with_suffix(".partial"), dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        apart[name] = whole.clone() if whole.untyped_storage().data_ptr() in seen else whole
        seen.add(whole.untyped_storage().data_ptr())
    save_file(apart, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore a run's state if `path` exists; the number of steps it has taken."""
    if not path.exists():
        return 0
    state = load_file(path)
    model.load_state_dict(_part(state, MODEL))
    optimizer.load_state_dict(_part(state, OPTIMIZER))
    return int(state["step"])


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _log(plan: TrainPlan, step: int, losses: list[float], seconds: float) -> None:
    recent = losses[-LOG_EVERY:]
    mean = sum(recent) / len(recent)
    rate = len(losses) * plan.tokens_per_step / seconds
    logger.info("step %d of %d: loss %.3f, %.0f tokens/s", step, plan.steps, mean, rate)
