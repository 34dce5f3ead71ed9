"""The draft's model as a learner has it: the weights that it serves with, which stay, and low-rank ones beside them for
every key (LoRA, Hu et al., arXiv 2106.09685), which are trained, judged, and written as PEFT writes them.

The loss is the negative log likelihood of what the target drew under the draft's law through the same processors:
temperature, penalties, biases and masks are applied to the draft's logits as they were to the target's. Greedy tokens
are hard labels. Beside it stands the divergence from the draft as it was, on texts that it writes itself: what no
traffic says any more is not forgotten."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from outrider.engine.adapters.config import CONFIG_NAME
from outrider.engine.adapters.loader import WEIGHTS_NAME, read_adapter
from outrider.engine.loader import load_model
from outrider.engine.models.base import TakesAdapters
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.sampling.reference import adjust_logits
from outrider.learning.judgement import worth
from outrider.rpc.messages import Lesson
from outrider.training.model import continue_windows

LOWEST = -1e4  # of a logit: what a mask hides has no likelihood, and no gradient
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StudentPlan:
    """How weights are trained."""

    rank: int = 16
    learning_rate: float = 2e-3
    batch_size: int = 8  # lessons of a step
    num_tokens: int = 5  # of a pass, where the model drafts in parallel
    greedy_weight: float = 1.0  # of a greedy token's likelihood, beside a drawn one's
    replay_weight: float = 0.3  # of the divergence from the draft as it was
    replay_windows: int = 64
    replay_length: int = 128
    max_norm: float = 1.0  # of a step's gradient
    seed: int = 11


class Student:
    """One model, with the weights of one key at a time. Belongs to one thread."""

    def __init__(self, folder: Path, plan: StudentPlan) -> None:
        """Raises ValueError for a model that takes no adapters."""
        self.plan, self.folder = plan, folder
        served = load_model(folder, lone_file=True)  # as a draft has it; it is not kept
        if not isinstance(served.model, TakesAdapters):
            raise ValueError(f"model: {folder} takes no adapters; allowed: a model of our own decoder")
        self.digest, self.vocab_size, self._eos_ids = served.digest, served.vocab_size, served.eos_token_ids
        self._linears = served.model.adapters.linears
        names = sorted({name.rpartition(".")[2] for name in self._linears})
        self._config = LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=names, lora_dropout=0.0)
        torch.manual_seed(plan.seed)
        self._model: Any = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), self._config
        )
        self._trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._untrained = self.state()
        self._replay: Tensor | None = None

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
        for lesson in lessons:
            total = total + self._loss(lesson) / len(lessons)
        if self.plan.replay_weight:
            total = total + self.plan.replay_weight * self._divergence(number)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self.plan.max_norm)
        loss = float(total.detach())
        if not (math.isfinite(float(norm)) and math.isfinite(loss)):
            optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError("the loss is not finite")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def worth(self, lesson: Lesson, window: int, with_learned: bool = True) -> float:
        """What the present weights, or the model alone, are worth for a lesson, in rounds of so many drafted tokens."""
        return worth(lesson, self.logits(lesson, with_learned), window)

    @torch.inference_mode()
    def logits(self, lesson: Lesson, with_learned: bool = True) -> Tensor:  # [drawn, vocab] float32
        """Behind every token before one that was drawn, through the lesson's processors but for its temperature."""
        self._model.eval()
        if with_learned:
            return self._adjusted(lesson)
        with self._model.disable_adapter():
            return self._adjusted(lesson)

    def write(self, state: State, folder: Path) -> str:
        """Writes weights in PEFT's layout; the digest that a draft knows them by. Raises what reading them raises."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS_NAME)
        said = self._config.to_dict() | {"base_model_name_or_path": self.folder.name, "inference_mode": True}
        said["target_modules"] = sorted(said["target_modules"])
        (folder / CONFIG_NAME).write_text(json.dumps(said, indent=2, default=str) + "\n", encoding="utf-8")
        return read_adapter(folder, self._linears, self.digest).digest

    def read(self, folder: Path) -> State:
        """What `write` wrote. ValueError where it is another model's, or not whole."""
        read_adapter(folder, self._linears, self.digest)
        return dict(load_file(folder / WEIGHTS_NAME))

    def _loss(self, lesson: Lesson) -> Tensor:
        logits, sampling = self._adjusted(lesson), lesson.sampling
        ids = torch.tensor(lesson.output_ids[lesson.num_given :])  # [drawn]
        logits = logits if sampling.greedy else logits / sampling.temperature
        loss = F.nll_loss(F.log_softmax(logits, dim=-1), ids)
        return loss * self.plan.greedy_weight if sampling.greedy else loss

    def _adjusted(self, lesson: Lesson) -> Tensor:  # [drawn, vocab]
        ids = torch.tensor([[*lesson.prompt_ids, *lesson.output_ids[:-1]]])  # [1, tokens]
        count = len(lesson.output_ids) - lesson.num_given
        logits = self._model(ids, use_cache=False, logits_to_keep=count).logits[0].float()  # [drawn, vocab]
        given = tuple(lesson.output_ids[: lesson.num_given])
        drawn = lesson.output_ids[lesson.num_given : -1]
        sampler = SequenceSampler(lesson.sampling, lesson.prompt_ids, given, self._eos_ids, self.vocab_size)
        return adjust_logits(logits, assemble([SamplingRows(sampler, drawn)], for_argmax=True)).clamp_min(LOWEST)

    def _divergence(self, number: int) -> Tensor:
        """From the draft as it was, on a few of its own texts, a nat a token."""
        windows = self._written()
        size = max(1, self.plan.batch_size // 4)
        places = (torch.arange(size) + number * size) % len(windows)
        before, now = (F.log_softmax(said.float(), dim=-1).flatten(0, -2) for said in self._kept(windows[places]))
        return F.kl_div(now, before, reduction="batchmean", log_target=True)

    def _kept(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # [windows, length] -> [..., vocab], twice
        """What the draft as it was says of texts, and what it says now."""
        with torch.no_grad(), self._model.disable_adapter():
            before: Tensor = self._model(ids, use_cache=False).logits
        return before, self._model(ids, use_cache=False).logits

    @torch.no_grad()
    def _written(self) -> Tensor:  # [windows, length]
        """Texts of the draft as it was, each behind a token of its own."""
        if self._replay is None:
            generator = torch.Generator().manual_seed(self.plan.seed)
            ids = torch.randint(self.vocab_size, (self.plan.replay_windows, 1), generator=generator)
            with self._model.disable_adapter():
                self._replay = continue_windows(self._model, ids, self.plan.replay_length, 1.0, generator)
        return self._replay
