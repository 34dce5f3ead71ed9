"""Coupled acceptance: target and draft take the token of least noise / probability for the same noise.

The token at a position is then a function of the seed and the target's probabilities alone, whatever was drafted; a
draft only says early what it will be. With exponential noise the least ratio is a draw from the probabilities (the
exponential race, which is the Gumbel-max trick). Greedy decoding uses the same acceptance with the arg max as choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.rejection import Windows, count_accepted


def first_argmax(values: Tensor) -> Tensor:
    """Index of the greatest value of each row, [rows, vocab] -> [rows] int64; ties to the lowest id.

    Both libraries promise the first of equal values; numpy's is an order of magnitude faster on a CPU.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def coupled_choice(
    probs: Tensor,  # [rows, vocab] float32
    noise: Tensor,  # [rows, vocab] float32, exponential, under the same counters on both sides
) -> Tensor:  # [rows] int64; -1 where no token has a probability above 0
    """The token of least noise / probability; ids of probability 0 never win, ties go to the lowest id."""
    ratios = noise / probs  # [rows, vocab]; infinite for probability 0
    ids = first_argmax(ratios.neg_())  # [rows]
    least = ratios.gather(1, ids[:, None]).squeeze(1)  # [rows]
    return torch.where(least.isfinite(), ids, -1)


def coupled_accept(
    choices: Tensor,  # [rows] int64: the target's own token at each row
    windows: Windows,
    draft_ids: Tensor,  # [drafted] int64
) -> tuple[Tensor, Tensor]:
    """Accepts drafted tokens while they equal the target's own.

    Returns the numbers accepted, [n] int64, and the target's token after them, [n] int64; -1 where the window was fully
    accepted and no row follows.
    """
    accepted = choices[windows.row_of_draft] == draft_ids  # [drafted]
    num_accepted = count_accepted(accepted, windows)
    next_ids = choices[windows.next_rows(num_accepted)]
    return num_accepted, torch.where(windows.has_next(num_accepted), next_ids, -1)
