"""Compiles every kernel of sampling, in each variant that the launches can ask for. Argument: the GPU's capability."""

from __future__ import annotations

import sys

import torch
from offline_compiler import compile_only

from outrider.kernels import (
    advance_triton,
    coupled_triton,
    draft_sample_triton,
    linear_triton,
    logits_to_probs_triton,
    philox_triton,
    rejection_triton,
)
from outrider.kernels.logits_to_probs import Allowed, Entries, Penalties, RowSampling, Truncation
from outrider.kernels.rejection import DraftWeights, Windows

ROWS, VOCAB_SIZE = 3, 4097


def compile_all() -> None:
    rows, probs = torch.arange(ROWS), torch.rand(ROWS, VOCAB_SIZE)
    words, windows, ids = torch.zeros(ROWS, 4, dtype=torch.int64), Windows.of([2, 0]), torch.tensor([1, 2])
    for purposes in (1, rows):
        philox_triton.words(rows, rows, purposes, rows, 0)
        philox_triton.vocabulary_words(rows, rows, purposes, rows, VOCAB_SIZE, 0)
        philox_triton.exponential_noise(rows, rows, purposes, rows, VOCAB_SIZE)
    coupled_triton.coupled_choice(probs, probs)
    coupled_triton.coupled_draw(probs, rows, rows, rows, 3)
    coupled_triton.coupled_accept(torch.zeros(4, dtype=torch.int64), windows, ids)
    coupled_triton.coupled_accept(torch.zeros(4, dtype=torch.int64), windows, ids, ids)
    rejection_triton.accept(torch.rand(4, VOCAB_SIZE), windows, ids, DraftWeights.of([None, None]), ids.double())
    entries = rejection_triton.PackedEntries(rows.int(), rows.int(), rows)
    rejection_triton.accept_packed(torch.rand(4, VOCAB_SIZE), windows, ids, entries, ids.double())
    rejection_triton.draw(probs.double(), words)
    numbers = rows.int()
    advance_triton.advance(numbers, numbers, numbers, torch.zeros(ROWS, 8, dtype=torch.int32), numbers[:1], 16)
    draft_sample_triton.draft_sample(probs, words, 0.995, 512)
    everything = RowSampling(
        Allowed(rows, rows, torch.zeros(1, VOCAB_SIZE)),
        *[Entries(rows, rows)] * 2,
        bias_values=rows.float(),
        penalties=Penalties(rows, rows, *[rows.float()] * 4),
        token_mask=torch.zeros(ROWS, -(-VOCAB_SIZE // 32), dtype=torch.int32),
        temperature=rows.float(),
        greedy_rows=rows[:1],
        min_p=rows.float(),
        truncation=Truncation(rows, rows, rows.double()),
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.zeros(ROWS, 512, dtype=dtype)
        linear_triton.linear(x, x)
        linear_triton.linear(x, x, x[:, 0].contiguous())
        logits_to_probs_triton.logits_to_probs(probs.to(dtype), RowSampling())
    logits_to_probs_triton.logits_to_probs(probs, everything)
    columns = {"temperature": rows.float(), "min_p": rows.float(), "truncation": everything.truncation}
    logits_to_probs_triton.logits_to_probs(probs, RowSampling(**columns))
    logits_to_probs_triton.greedy_choice(probs, everything)
    logits_to_probs_triton.greedy_choice(probs.bfloat16(), RowSampling())


if __name__ == "__main__":
    compiled = compile_only(int(sys.argv[1]))
    compile_all()
    print(" ".join(sorted({name for name, _ in compiled})))
