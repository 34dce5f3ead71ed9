"""Compiles every kernel of sampling, in each variant that the launches can ask for. Argument: the GPU's capability."""

from __future__ import annotations

import sys

import torch
from support.kernels import compile_only

from outrider.kernels.layers import triton as layers_triton
from outrider.kernels.random import triton as philox_triton
from outrider.kernels.sampling import triton as sampling_triton
from outrider.kernels.types import Allowed, DraftWeights, Entries, Penalties, RowSampling, Truncation, Windows
from outrider.kernels.verify import triton as verify_triton

ROWS, VOCAB_SIZE = 3, 4097


def compile_all() -> None:
    rows, probs = torch.arange(ROWS), torch.rand(ROWS, VOCAB_SIZE)
    words, windows, ids = torch.zeros(ROWS, 4, dtype=torch.int64), Windows.of([2, 0]), torch.tensor([1, 2])
    for purposes in (1, rows):
        philox_triton.words(rows, rows, purposes, rows, 0)
        philox_triton.vocabulary_words(rows, rows, purposes, rows, VOCAB_SIZE, 0)
        philox_triton.exponential_noise(rows, rows, purposes, rows, VOCAB_SIZE)
    verify_triton.coupled_choice(probs, probs)
    verify_triton.coupled_draw(probs, rows, rows, rows, 3)
    verify_triton.coupled_accept(torch.zeros(4, dtype=torch.int64), windows, ids)
    verify_triton.coupled_accept(torch.zeros(4, dtype=torch.int64), windows, ids, ids)
    verify_triton.accept(torch.rand(4, VOCAB_SIZE), windows, ids, DraftWeights.of([None, None]), ids.double())
    entries = verify_triton.PackedEntries(rows.int(), rows.int(), rows)
    verify_triton.accept_packed(torch.rand(4, VOCAB_SIZE), windows, ids, entries, ids.double())
    verify_triton.draw(probs.double(), words)
    numbers = rows.int()
    sampling_triton.advance(numbers, numbers, numbers, torch.zeros(ROWS, 8, dtype=torch.int32), numbers[:1], 16)
    sampling_triton.draft_sample(probs, words, 0.995, 512)
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
        layers_triton.linear(x, x)
        layers_triton.linear(x, x, x[:, 0].contiguous())
        sampling_triton.logits_to_probs(probs.to(dtype), RowSampling())
    sampling_triton.logits_to_probs(probs, everything)
    columns = {"temperature": rows.float(), "min_p": rows.float(), "truncation": everything.truncation}
    sampling_triton.logits_to_probs(probs, RowSampling(**columns))
    sampling_triton.greedy_choice(probs, everything)
    sampling_triton.greedy_choice(probs.bfloat16(), RowSampling())


if __name__ == "__main__":
    compiled = compile_only(int(sys.argv[1]))
    compile_all()
    print(" ".join(sorted({name for name, _ in compiled})))
