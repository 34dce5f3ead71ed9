"""What drafts as a learner has it: the weights that it serves with, which stay, and low-rank ones beside them for every
key (LoRA, Hu et al., arXiv 2106.09685), which are trained, judged, and written as PEFT writes them.

The loss is the negative log likelihood of what the target drew under the draft's law through the same processors:
temperature, penalties, biases and masks are applied to the draft's logits as they were to the target's. Greedy tokens
are hard labels. Beside it stands the divergence from the draft as it was, on texts of no traffic: what that says no
more is not forgotten."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.engine.adapters.config import CONFIG_NAME
from outrider.engine.adapters.loader import PREFIX, WEIGHTS_NAME, read_adapter
from outrider.kernels.sampling.reference import adjust_logits
from outrider.kernels.types import RowSampling
from outrider.rpc.messages import Lesson
from outrider.rpc.words.sampling_params import SamplingParams

LOWEST = -1e4  # of a logit: what a mask hides has no likelihood, and no gradient
MOST_ASKED = math.sqrt(2)  # of a text's logits, by its loss: a softmax less a token, in every row, at temperature 1
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StudentPlan:
    """How weights are trained."""

    rank: int = 16
    learning_rate: float = 2e-3
    batch_size: int = 8  # lessons of a step
    num_tokens: int = 5  # of a pass or a chain, where several are learned at once
    greedy_weight: float = 1.0  # of a greedy token's likelihood, beside a drawn one's
    replay_weight: float = 0.3  # of the divergence from the draft as it was
    replay_windows: int = 64
    replay_length: int = 128
    max_norm: float = 1.0  # of a step's gradient
    seed: int = 11


@dataclass(frozen=True, slots=True)
class Base:
    """What stays."""

    folder: Path
    digest: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    linears: Mapping[str, tuple[int, int]]  # what an adapter may change, as services name it: outputs and inputs
    layer: tuple[str, str] = ("", "")  # what a name begins with in a service, and in the model that is trained


class Student(ABC):
    """One model or head, with the weights of one key at a time. Belongs to one thread."""

    def __init__(self, base: Base, model: nn.Module, plan: StudentPlan) -> None:
        self.plan, self._base = plan, base
        self.digest, self.vocab_size = base.digest, base.vocab_size
        of_service, of_model = base.layer
        names = sorted({name.removeprefix(of_service) for name in base.linears})
        ends = sorted({name.rpartition(".")[2] for name in names})
        targets = [of_model + name for name in names] if of_service else ends
        self._ends = ends
        self._config = LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=targets, lora_dropout=0.0)
        torch.manual_seed(plan.seed)
        self._model: Any = get_peft_model(model, self._config)
        self._trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._untrained = self.state()

    @abstractmethod
    def worth(self, lesson: Lesson, window: int, with_learned: bool = True) -> float:
        """What the present weights, or the model alone, are worth for a lesson, in rounds of so many drafted tokens."""

    def takes(self, lesson: Lesson) -> bool:
        """Whether it can be learned from here."""
        return True

    def untrained(self) -> State:
        """Weights that add nothing."""
        return {name: tensor.clone() for name, tensor in self._untrained.items()}

    def state(self) -> State:
        """A copy of the present weights."""
        found: State = get_peft_model_state_dict(self._model)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def hold(self, state: State) -> None:
        """Takes these weights in place of the present ones."""
        set_peft_model_state_dict(self._model, state)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Of the present weights, whoever holds them."""
        return torch.optim.AdamW(self._trained, lr=self.plan.learning_rate, weight_decay=0.0)

    def step(self, optimizer: torch.optim.Optimizer, lessons: Sequence[Lesson], number: int) -> float:
        """One step; its loss, a nat a token. Raises FloatingPointError where it is not finite, before any weight has
        changed."""
        self._model.train()
        total = torch.zeros(())
        for loss in self._losses(lessons):
            total = total + loss / len(lessons)
        if self.plan.replay_weight:
            total = total + self.plan.replay_weight * self._divergence(number)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self.plan.max_norm)
        mean = float(total.detach())
        if not (math.isfinite(float(norm)) and math.isfinite(mean)):
            optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError("the loss is not finite")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean

    def write(self, state: State, folder: Path) -> str:
        """Writes weights in PEFT's layout; the digest that a service knows them by. Raises what reading them raises."""
        folder.mkdir(parents=True, exist_ok=True)
        of_service, of_model = (PREFIX + part for part in self._base.layer)
        named = {of_service + name.removeprefix(of_model): tensor.contiguous() for name, tensor in state.items()}
        save_file(named, folder / WEIGHTS_NAME)
        said = self._config.to_dict() | {"base_model_name_or_path": self._base.folder.name, "inference_mode": True}
        said["target_modules"] = self._ends
        (folder / CONFIG_NAME).write_text(json.dumps(said, indent=2, default=str) + "\n", encoding="utf-8")
        return read_adapter(folder, self._base.linears, self.digest).digest

    def read(self, folder: Path) -> State:
        """What `write` wrote. ValueError where it is another model's, or not whole."""
        read_adapter(folder, self._base.linears, self.digest)
        of_service, of_model = (PREFIX + part for part in self._base.layer)
        found = load_file(folder / WEIGHTS_NAME)
        return {of_model + name.removeprefix(of_service): tensor for name, tensor in found.items()}

    @abstractmethod
    def _losses(self, lessons: Sequence[Lesson]) -> Iterator[Tensor]:
        """Of each, in any order: a nat a token, [], with a gradient."""

    @abstractmethod
    def _replayed(self, places: Tensor) -> tuple[Tensor, Tensor]:  # [some] -> [..., vocab], twice
        """What was said before of some of the texts of no traffic, and what is said now."""

    def _divergence(self, number: int) -> Tensor:
        """From the draft as it was, a nat a token."""
        size = max(1, self.plan.batch_size // 4)
        places = (torch.arange(size) + number * size) % self.plan.replay_windows
        before, now = (F.log_softmax(said.float(), dim=-1).flatten(0, -2) for said in self._replayed(places))
        return F.kl_div(now, before, reduction="batchmean", log_target=True)


def processed(logits: Tensor, sampling: RowSampling) -> Tensor:  # [rows, vocab] float32
    """All that precedes temperature, with a gradient wherever a token is likely at all; the argument itself where
    nothing applies."""
    adjusted = adjust_logits(logits, sampling)
    return adjusted if adjusted is logits else adjusted.clamp_min(LOWEST)


def bounded(loss: Tensor, logits: Tensor, sampling: SamplingParams) -> Tensor:  # [], [rows, vocab] -> []
    """The loss of a text, whose gradient asks no more of the logits that it was made of than it can at temperature 1
    without penalties: a law that is cold, or by which logits are multiplied, would outweigh all other texts."""
    if sampling.repetition_penalty == 1 and (sampling.greedy or sampling.temperature >= 1):
        return loss  # asks no more
    (asked,) = torch.autograd.grad(loss, logits, retain_graph=True)  # [rows, vocab]
    part: Tensor = loss * (MOST_ASKED / asked.norm(dim=-1).sum()).clamp(max=1.0)
    return part + (loss - part).detach()
