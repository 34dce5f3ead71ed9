"""Lessons that a target of known weights drew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.engine.random import RandomAhead, RandomKey, RandomRange, noise_source
from outrider.kernels.verify.reference import coupled_choice
from outrider.rpc.messages import Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

VOCAB = 300
GREEDY, DRAWN = SamplingParams(temperature=0.0, max_tokens=64), SamplingParams(temperature=0.7, max_tokens=64)


class Target:
    """Draws tokens as a target does under coupled acceptance, or greedily."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.digest = digest

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], count: int, sampling: SamplingParams, seed: int) -> list[int]:
        ids, noise = list(prompt), noise_source(VOCAB, torch.device("cpu"))
        span = RandomRange(RandomKey(seed, 0), RandomAhead(), len(prompt), count, len(prompt) + count)
        rows = noise.rows([span])  # [count, vocab]
        for place in range(count):
            logits = self._model(torch.tensor([ids])).logits[0, -1]
            if sampling.greedy:
                ids.append(int(logits.argmax()))
            else:
                probs = (logits / sampling.temperature).softmax(-1)
                ids.append(int(coupled_choice(probs[None], rows[place : place + 1])))
        return ids[len(prompt) :]

    def lesson(
        self, number: int, count: int = 24, sampling: SamplingParams = DRAWN, group: str = "", beginnings: int = 40
    ) -> Lesson:
        """One of so many prompts, each of which begins otherwise."""
        prompt = [(13 * number + 7 * index * index) % beginnings + 30 for index in range(6)]
        output = self.answer(prompt, count, sampling, number)
        return Lesson(self.digest, group, prompt, output, sampling, AcceptanceRule.COUPLED, number)
