"""What `outrider bench learning` compares: a target that has changed under its draft, and the draft that offline
distillation makes for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.bench.results import note
from outrider.training.drafts import DraftPlan, export, make_draft, read_corpus
from outrider.training.train import corpus_batches, text_loss, train

TUNED_TOKENS = 28_000  # of the texts, which are read again and again
TUNED_LR = 0.004  # of matrices: a third of what a draft is trained with
TOLD_EVERY = 100  # steps


def tuned(target: Path, texts: Sequence[str], steps: int, folder: Path) -> Path:
    """The target after so many steps on a few of the texts, in a folder that is made. ValueError for fewer tokens than
    two steps read."""
    plan = plan_of("tuned", target, texts, steps, folder)
    stream = read_corpus(plan.corpus, target)[:TUNED_TOKENS]
    model, training = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), plan.training
    if len(stream) < (least := 2 * training.tokens_per_step):
        raise ValueError(f"tune_steps: the texts have {len(stream)} tokens; allowed: at least {least}")
    batches = corpus_batches(training, stream)
    train(model, text_loss(model), replace(training, matrix_lr=TUNED_LR), batches, on_step=told("the target", steps))
    export(model, plan)
    return plan.out


def distilled(draft: Path, target: Path, texts: Sequence[str], steps: int, folder: Path) -> tuple[Path, float]:
    """The draft after so many steps of `outrider model train draft` for the target, all weights of it, on what the
    target writes from places of the texts; and the processor time of all of that, in seconds."""
    plan, began = plan_of("distilled", target, texts, steps, folder), time.process_time()
    make_draft(replace(plan, start=draft), told("the reference", steps))
    return plan.out, round(time.process_time() - began, 1)


def plan_of(name: str, target: Path, texts: Sequence[str], steps: int, folder: Path) -> DraftPlan:
    """Of a run on these texts by one thread."""
    torch.set_num_threads(1)
    corpus = folder / f"{name}.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return DraftPlan(target=target, corpus=corpus, out=folder / name, parallel=False, steps=steps)


def told(what: str, steps: int) -> Callable[[int, float], None]:
    """Tells of a run now and then."""

    def tell(step: int, loss: float) -> None:
        if step % TOLD_EVERY == 0 or step == steps:
            note(f"{what}: step {step} of {steps}, {time.process_time():.0f} s of this process, loss {loss:.3f}")

    return tell
