"""Lessons that a target of known weights drew, and what a draft service makes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.engines import DraftHarness, commit, credit, new_open
from transformers import AutoModelForCausalLM

from outrider.engine.adapters.loader import load_adapter
from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.loader import load_model
from outrider.engine.random import RandomAhead, RandomKey, RandomRange, noise_source
from outrider.kernels.verify.reference import coupled_choice
from outrider.rpc.learning.lessons import UNSALTED
from outrider.rpc.messages import DraftTokens, Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

VOCAB, WINDOW = 300, 3
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


def counting(target_digest: str, count: int) -> list[Lesson]:
    """Of a target that counts by sevens."""
    dice, found = random.Random(2), []
    for number in range(count):
        text = [dice.randrange(30, 54)]
        for _ in range(16):
            text.append(30 + (text[-1] - 30 + 7) % 24)
        prompt = [*(dice.randrange(60, 99) for _ in range(3)), text[0]]
        found.append(Lesson(target_digest, "", prompt, text[1:], GREEDY, AcceptanceRule.COUPLED, number))
    return found


def served(draft: Path, lesson: Lesson, name: str = "draft_model", learned: Path | None = None) -> tuple[int, int, int]:
    """What a draft service's drafts come to, round by round: accepted, drafted within the text, and rounds."""
    loaded = load_model(draft)
    harness = DraftHarness(loaded=loaded, name=name, learned=AdapterRoom(1, 16), learn_from=[UNSALTED])
    if learned is not None:
        runner = harness.method.proposer.runner
        assert runner.adapters is not None
        adapter = runner.adapters.prepare(load_adapter(learned, loaded.model, loaded.digest))
        harness.engine.put_learned(lesson.key, adapter)
    text, at = [*lesson.prompt_ids, *lesson.output_ids], len(lesson.prompt_ids)
    opened = new_open(
        1, lesson.prompt_ids, lesson.sampling, acceptance=lesson.acceptance, seed=lesson.seed,
        model_digest=lesson.target_digest, fresh_seed=True,
    )  # fmt: skip
    said: list[Any] = harness.run(opened, credit(1, at + WINDOW, WINDOW))
    accepted = drafted = rounds = 0
    while at < len(text):
        pieces = [event for event in said if isinstance(event, DraftTokens) and event.position == at]
        ids = pieces[-1].ids[: len(text) - at]
        agreed = next((i for i, token in enumerate(ids) if token != text[at + i]), len(ids))
        accepted, drafted, rounds = accepted + agreed, drafted + len(ids), rounds + 1
        new = text[at : at + agreed + 1]
        chain = pieces[-1].chain
        at += len(new)
        said = harness.run(
            commit(1, at - len(new), *new, chain=chain, num_drafted=len(ids), num_accepted=agreed),
            credit(1, at + WINDOW, WINDOW),
        )
    return accepted, drafted, rounds
