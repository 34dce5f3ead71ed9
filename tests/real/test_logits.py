"""Teacher-forced on real text our logits are llama.cpp's on the same file, but for its rounding of activations to 8
bits, which ours does without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import logits_of

from outrider.bench.harness import BenchWorker
from outrider.engine.loader import load_model
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.hub import locate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_TEXTS, LENGTH = 50, 48
LEAST_EQUAL = 0.92  # choices of the two; where they differ, two tokens are as likely
LOSS_SHARE = 0.002


def test_logits_are_llama_cpps(
    model: Path, tokenizer: Tokenizer, paragraphs: list[str], llama_cpp: BenchWorker, tmp_path: Path
) -> None:
    """Choices, the loss on the text, and the largest difference of two logits, which is printed."""
    loaded = load_model(locate(model))
    equal, total, largest = 0, 0, 0.0
    losses = np.zeros(2)
    for text in paragraphs[:NUM_TEXTS]:
        ids = list(tokenizer.encode(text))[:LENGTH]
        assert len(ids) == LENGTH
        llama_cpp.ask({"ids": ids, "path": str(tmp_path / "logits.npy")})
        theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))  # [tokens, vocab]
        ours = logits_of(loaded, ids)  # [tokens, vocab]
        assert ours.shape == theirs.shape
        largest = max(largest, (ours - theirs).abs().max().item())
        equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        total += LENGTH
        target = torch.tensor(ids[1:])
        losses += [torch.nn.functional.cross_entropy(each[:-1], target).item() for each in (ours, theirs)]
    mine, other = losses / NUM_TEXTS
    print(f"largest difference {largest:.3f}; equal choices {equal}/{total}; loss {mine:.4f} and {other:.4f}")
    assert equal >= LEAST_EQUAL * total
    assert abs(mine / other - 1) <= LOSS_SHARE
