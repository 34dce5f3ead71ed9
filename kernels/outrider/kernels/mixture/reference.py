"""A mixture of experts (Shazeer et al., arXiv 1701.06538; its routing as Mixtral's, arXiv 2401.04088): a router sends
each row to some of them, and what they give is added up by the router's weights, in ascending order of the experts. So
a row's sum depends on no other row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import dispatch

Expert = Callable[[Tensor], Tensor]  # [rows, hidden] -> the same


def route(
    scores: Tensor,  # [rows, experts] of any floating type; behind them the shared expert's gate, if there is one
    num_chosen: int,
    *,
    normalised: bool,  # the weights of the chosen ones sum to 1
    has_shared: bool = False,
) -> tuple[Tensor, Tensor]:  # [rows, ways] int64, ascending; [rows, ways] float32
    """The experts with the highest scores, of equal ones the lowest, and their weights of the softmax over all; last
    the shared one, whose weight is a sigmoid."""
    if dispatch.runs_triton(scores):
        from outrider.kernels.mixture.triton import route as launch

        return launch(scores, num_chosen, normalised=normalised, has_shared=has_shared)
    own = scores[:, :-1].float() if has_shared else scores.float()
    ranked = own.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    chosen = ranked.sort(dim=-1).values
    exponentials = torch.exp(own - own.amax(-1, keepdim=True))  # softmax's own bits depend on where a row stands
    weights = exponentials.gather(1, chosen) / exponentials.sum(-1, keepdim=True)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if has_shared:
        shared = torch.full_like(chosen[:, :1], own.shape[1])
        chosen = torch.cat([chosen, shared], dim=-1)
        weights = torch.cat([weights, 1.0 / (1.0 + torch.exp(-scores[:, -1:].float()))], dim=-1)
    return chosen, weights


def mix(
    x: Tensor,  # [rows, hidden]
    chosen: Tensor,  # [rows, ways] int64
    weights: Tensor,  # [rows, ways] float32
    experts: Sequence[Expert],
) -> Tensor:  # [rows, hidden]
    """What the experts give, summed in float32. Each computes its own rows together."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        rows, ways = (chosen == expert).nonzero(as_tuple=True)
        total[rows] += weights[rows, ways, None] * experts[expert](x[rows]).float()
    return total.to(x.dtype)


def mix_stacked(
    x: Tensor,  # [rows, hidden]
    chosen: Tensor,  # [rows, ways] int64
    weights: Tensor,  # [rows, ways] float32
    gate_up: Tensor,  # [experts, 2 * width, hidden]
    down: Tensor,  # [experts, hidden, width]
    gate: Callable[[Tensor], Tensor],  # [rows, 2 * width] -> [rows, width]
    biases: tuple[Tensor, Tensor] | None = None,  # [experts, 2 * width], [experts, hidden]
    counts: Tensor | None = None,  # [experts] int64, written: how many rows each has
) -> Tensor:  # [rows, hidden]
    """The same of gated experts of one width. On an accelerator nothing of it is read on the host."""
    if dispatch.runs_triton(x):
        from outrider.kernels.mixture.triton import mix as launch

        return launch(x, chosen, weights, gate_up, down, gate, biases, counts)
    if counts is not None:
        counts.copy_(torch.bincount(chosen.flatten(), minlength=len(counts)))

    def expert(index: int, rows: Tensor) -> Tensor:
        of_gate, of_down = (None, None) if biases is None else (part[index] for part in biases)
        return F.linear(gate(F.linear(rows, gate_up[index], of_gate)), down[index], of_down)

    return mix(x, chosen, weights, [partial(expert, index) for index in range(len(down))])
