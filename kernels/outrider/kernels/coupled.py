"""Coupled acceptance: target and draft take the token of least noise / probability for the same noise.

The token at a position is then a function of the seed and the target's probabilities alone, whatever was drafted; a
draft only says early what it will be. With exponential noise the least ratio is a draw from the probabilities (the
exponential race, which is the Gumbel-max trick). Greedy decoding uses the same acceptance with the arg max as choice.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.kernels import dispatch
from outrider.kernels.philox import Purpose, exponential_noise
from outrider.kernels.rejection import Windows


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
    if dispatch.runs_triton(probs):
        from outrider.kernels import coupled_triton

        return coupled_triton.coupled_choice(probs, noise)
    ratios = (noise / probs).numpy()  # [rows, vocab]; infinite for probability 0
    ids = ratios.argmin(axis=-1)  # [rows]; a NaN is taken first
    ids[~np.isfinite(ratios[np.arange(len(ids)), ids])] = -1
    return torch.from_numpy(ids)


def coupled_draw(
    probs: Tensor,  # [rows, vocab] float32
    seeds: Tensor,  # [rows] int64
    positions: Tensor,  # [rows] int64
    completions: Tensor,  # [rows] int64
    purpose: Purpose = Purpose.BONUS,
) -> Tensor:  # [rows] int64; -1 where no token has a probability above 0
    """`coupled_choice` under the noise of these counters, which a device computes on the spot."""
    if dispatch.runs_triton(probs):
        from outrider.kernels import coupled_triton

        return coupled_triton.coupled_draw(probs, seeds, positions, completions, purpose)
    return coupled_choice(probs, exponential_noise(seeds, positions, completions, probs.shape[1], purpose))


def coupled_accept(
    choices: Tensor,  # [rows] int64: the target's own token at each row
    windows: Windows,
    draft_ids: Tensor,  # [drafted] int64
) -> tuple[Tensor, Tensor]:
    """Accepts drafted tokens while they equal the target's own.

    Returns the numbers accepted, [n] int64, and the target's token after them, [n] int64; -1 where the window was fully
    accepted and no row follows.
    """
    if dispatch.runs_triton(choices):
        from outrider.kernels import coupled_triton

        return coupled_triton.coupled_accept(choices, windows, draft_ids)[:2]
    own, drafted = choices.tolist(), draft_ids.tolist()
    num_accepted, next_ids = [], []
    for row, num_rows, first, count in windows.on_host():  # a few ids: lists are faster than tensor operations
        held = 0
        while held < count and drafted[first + held] == own[row + held]:
            held += 1
        num_accepted.append(held)
        next_ids.append(own[row + held] if held < num_rows else -1)
    return torch.tensor(num_accepted, dtype=torch.int64), torch.tensor(next_ids, dtype=torch.int64)


def coupled_accept_tree(
    choices: Tensor,  # [rows] int64: the target's own token at each row
    windows: Windows,  # row 0 of a window judges the children of its root, row i + 1 those of its drafted token i
    draft_ids: Tensor,  # [drafted] int64
    parents: Tensor,  # [drafted] int64: the row that judges each drafted token; parents come first
) -> tuple[Tensor, Tensor, Tensor]:
    """Walks down from the root, to the child that is the target's own token, while there is one; of equal children the
    first.

    Returns the numbers accepted and the target's token after them as `coupled_accept` does, and which drafted tokens
    are accepted, [drafted] bool. A chain is the tree of parents 0, 1, 2, ...
    """
    if dispatch.runs_triton(choices):
        from outrider.kernels import coupled_triton

        return coupled_triton.coupled_accept(choices, windows, draft_ids, parents)
    own, drafted, above = choices.tolist(), draft_ids.tolist(), parents.tolist()
    next_ids, accepted = [], torch.zeros(len(drafted), dtype=torch.bool)
    num_accepted = torch.zeros_like(windows.num_drafted)
    for window, (row, num_rows, first, count) in enumerate(windows.on_host()):
        node = 0  # the row reached
        for index in range(first, first + count):
            if node < num_rows and above[index] == node and drafted[index] == own[row + node]:
                node = index - first + 1
                accepted[index] = True
                num_accepted[window] += 1
        next_ids.append(own[row + node] if node < num_rows else -1)
    return num_accepted, torch.tensor(next_ids, dtype=torch.int64), accepted
