"""What a language-model head says of many states, of no more rows at once than LOGITS_BYTES hold.

The logits of a step's 4,000 rows at 262,144 ids are 4 GB, and a loss would hold them several times over. A loss needs
little of each row: the logarithm of the sum of all exponentials, and the logits of a few ids. These are kept, and the
rest of the logits is computed once more, part by part, when the gradient is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGITS_BYTES = 64 << 20

Product = Callable[[Tensor], Tensor]  # [rows, hidden] -> [rows, outputs]


def rows_at_once(num_outputs: int) -> int:
    """Rows whose logits, in float32, LOGITS_BYTES hold; one at least."""
    return max(1, LOGITS_BYTES // (num_outputs * torch.float32.itemsize))


@dataclass(frozen=True)
class LanguageHead:
    """A product, of the outputs `ids` of the vocabulary where it has not all."""

    product: Product
    num_outputs: int
    weights: tuple[Tensor, ...] = ()  # those of the product that are trained
    ids: Tensor | None = None  # [outputs]
    places: Tensor | None = None  # [vocabulary]: the output of each id, -1 where it has none

    @classmethod
    def of_ids(cls, product: Product, weights: tuple[Tensor, ...], ids: Tensor, vocab_size: int) -> LanguageHead:
        """One whose outputs are these ids, [outputs], of the vocabulary."""
        places = torch.full((vocab_size,), -1).index_copy(0, ids, torch.arange(len(ids)))
        return cls(product, len(ids), weights, ids, places)

    def said(self, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """states: [..., hidden]; ids: [..., picks]. Returns the logarithm of the sum of all logits' exponentials,
        [...], and the logits of the ids, [..., picks], -inf of what it cannot say; float32, with gradients."""
        places = ids if self.places is None else self.places[ids]
        rows, picks = states.flatten(0, -2), places.clamp_min(0).flatten(0, -2)
        if len(rows) <= rows_at_once(self.num_outputs):
            whole, picked = summed(self.product(rows).float(), picks)
        else:
            whole, picked = _Said.apply(self, rows, picks, *self.weights)  # type: ignore[no-untyped-call]
        return whole.view(ids.shape[:-1]), picked.view(ids.shape).masked_fill(places < 0, -math.inf)

    @torch.no_grad()
    def best(self, states: Tensor) -> Tensor:  # [..., hidden] -> [...]
        """The likeliest id of each."""
        rows = states.flatten(0, -2)
        outputs = torch.cat([self.product(rows[part]).argmax(-1) for part in self.parts(len(rows))])
        return (outputs if self.ids is None else self.ids[outputs]).view(states.shape[:-1])

    def logits(self, states: Tensor) -> Tensor:  # [..., hidden] -> [..., outputs]
        """With a gradient, of detached states."""
        with torch.enable_grad():  # so that autocast may keep its copies of the weights
            return self.product(states).float()

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Those that are computed one after the other."""
        count = rows_at_once(self.num_outputs)
        return (slice(start, start + count) for start in range(0, num_rows, count))


def summed(logits: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:  # [rows, outputs], [rows, picks]
    """What is needed of logits: [rows] and [rows, picks]."""
    return logits.logsumexp(-1), logits.gather(-1, picks)


class _Said(torch.autograd.Function):
    """As LanguageHead.said of rows, [rows, hidden], and outputs, [rows, picks]."""

    @staticmethod
    def forward(
        ctx: Any, head: LanguageHead, rows: Tensor, picks: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:  # [rows], [rows, picks]
        whole, picked = torch.empty(len(rows)), torch.empty(picks.shape)
        for part in head.parts(len(rows)):
            whole[part], picked[part] = summed(head.logits(rows[part].detach()).detach(), picks[part])
        ctx.head, ctx.autocast = head, torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(rows, picks, whole)
        return whole, picked

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        head, (rows, picks, whole), (to_whole, to_picked) = ctx.head, ctx.saved_tensors, given
        to_rows, to_weights = torch.empty_like(rows), [torch.zeros_like(weight) for weight in head.weights]
        with torch.autocast("cpu", torch.bfloat16, enabled=ctx.autocast):
            for part in head.parts(len(rows)):
                says = picks[part], whole[part, None], to_whole[part, None], to_picked[part]
                to_rows[part], *found = _gradients(head, rows[part].detach().requires_grad_(), *says)
                for total, one in zip(to_weights, found, strict=True):
                    total.add_(one)
                del found  # or two are there with the next part's
        return None, to_rows, None, *to_weights


def _gradients(
    head: LanguageHead, states: Tensor, picks: Tensor, whole: Tensor, to_whole: Tensor, to_picked: Tensor
) -> tuple[Tensor, ...]:
    """Of the states, [rows, hidden], and the weights, by those of what their logits sum up to, [rows, 1], and of the
    picked ones, [rows, picks]."""
    logits = head.logits(states)
    gradient = (logits.detach() - whole).exp_().mul_(to_whole).scatter_add_(-1, picks, to_picked)
    return torch.autograd.grad(logits, [states, *head.weights], gradient)
