"""What `outrider bench learning` compares: a target that has changed under its draft, and the draft that offline
distillation makes for it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.bench.results import note
from outrider.training.drafts import TOKENIZER_FILES, DraftPlan, make_draft
from outrider.training.model import fast_products

TUNED_TOKENS = 28_000  # of the texts, which are read again and again
WINDOW, BATCH, LEARNING_RATE = 256, 8, 5e-4


def tuned(target: Path, texts: Sequence[str], steps: int, folder: Path, seed: int = 0) -> Path:
    """The target after so many steps on a few of the texts, in a folder that is made. ValueError for texts that are
    shorter than a window."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    dtype = model.dtype
    model = model.float().train()
    ids = torch.tensor([token for text in texts for token in tokenizer.encode(text)][:TUNED_TOKENS])  # [tokens]
    if len(ids) <= WINDOW:
        raise ValueError(f"tune_steps: {len(ids)} tokens of texts; allowed: more than {WINDOW}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(steps):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,))
        windows = ids[starts[:, None] + torch.arange(WINDOW)]  # [windows, tokens]
        with fast_products():
            loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            note(f"the target is tuned: step {step + 1} of {steps}, loss {float(loss.detach()):.2f}")
    made = folder / f"{target.name}-tuned"
    model.to(dtype).save_pretrained(made)
    for path in (path for pattern in TOKENIZER_FILES for path in target.glob(pattern)):
        shutil.copyfile(path, made / path.name)
    return made


def distilled(draft: Path, target: Path, texts: Sequence[str], steps: int, folder: Path) -> tuple[Path, float]:
    """The draft after so many steps of `outrider model train draft` for the target, all weights of it, on what the
    target writes from places of the texts; and the processor time of all of that, in seconds."""
    torch.set_num_threads(1)
    corpus = folder / "texts.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    plan = DraftPlan(target=target, corpus=corpus, out=folder / "distilled", parallel=False, start=draft, steps=steps)
    began = time.process_time()

    def told(step: int, loss: float) -> None:
        if step % 500 == 0:
            note(f"the reference: step {step} of {steps}, {time.process_time() - began:.0f} s, loss {loss:.3f}")

    make_draft(plan, told)
    return plan.out, round(time.process_time() - began, 1)
