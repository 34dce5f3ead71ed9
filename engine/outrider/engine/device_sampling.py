"""The sampling parameters of rows as columns on a device: what needs no more than a number a row."""

from __future__ import annotations

import torch

from outrider.engine.sampling import SequenceSampler
from outrider.engine.staging import Column, StagedColumns
from outrider.kernels.logits_to_probs import RowSampling, Truncation

OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}  # what leaves a row as it is, and pads others


def sampling_columns(num_rows: int) -> list[Column]:
    """What `row_sampling` reads."""
    return [
        Column("temperature", torch.float32, num_rows),
        Column("min_p", torch.float32, num_rows),
        Column("top_k", torch.int64, num_rows),
        Column("top_p", torch.float64, num_rows),
    ]


def parameters_of(sampler: SequenceSampler) -> dict[str, float]:
    """A sequence's numbers in these columns. A greedy row's are off: its arg max does not ask for them."""
    params = sampler.params
    if sampler.greedy:
        return OFF
    cut = {"top_k": params.top_k, "top_p": params.top_p} if sampler.truncated else {}
    return OFF | {"temperature": params.temperature, "min_p": params.min_p} | cut


def says_all(sampler: SequenceSampler) -> bool:
    """Whether the columns hold all that a sequence asks for: no single ids, and no penalties."""
    return not (sampler.restricted or sampler.penalised)


def row_sampling(columns: StagedColumns) -> RowSampling:
    """The parameters of every row; each does nothing where it is off. Greedy rows are drawn like the others, and nobody
    asks what was drawn."""
    every_row = torch.arange(len(columns["top_k"]), device=columns["top_k"].device)  # [rows]
    return RowSampling(
        temperature=columns["temperature"],
        min_p=columns["min_p"],
        truncation=Truncation(every_row, columns["top_k"], columns["top_p"]),
    )
