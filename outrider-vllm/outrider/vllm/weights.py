"""What drafted tokens were drawn from, on their way from the scheduler to the sampler: beside the step's output, which
goes to every worker; there they become the rows of probabilities that vLLM's rejection sampler takes.

The law is the protocol's: a drafted token is accepted with target / draft probability, else replaced by a draw from
what the target has more of (arXiv 2211.17192). A token without weights is one-hot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.types import DraftWeights
from outrider.kernels.verify.reference import check_weights
from outrider.rpc.messages import TokenWeights
from outrider.vllm.rows import DraftedRow

ATTRIBUTE = "outrider_weights"  # of a SchedulerOutput: by vLLM's request ids, one entry a drafted token
StepWeights = Mapping[str, Sequence[TokenWeights | None]]


def attach_weights(step: Any, rows: Mapping[str, DraftedRow]) -> None:
    """Puts the weights of the windows that are drawn beside vLLM's plan of a step."""
    found: dict[str, Sequence[TokenWeights | None]] = {}
    for request_id, ids in step.scheduled_spec_decode_tokens.items():
        row = rows.get(request_id)
        if row is not None and row.weighs and any(row.window.weights):
            found[request_id] = row.window.weights[: len(ids)]
    if found:
        setattr(step, ATTRIBUTE, found)


def weights_of(step: Any) -> StepWeights:
    """The same, where the step is computed."""
    return getattr(step, ATTRIBUTE, {})


def draft_probs(
    weights: StepWeights,
    request_ids: Sequence[str],  # by the rows of the batch
    num_drafted: Sequence[int],  # of each
    draft_ids: Tensor,  # [drafted] int: of all
    vocab_size: int,
) -> Tensor | None:  # [drafted, vocab] float32, where draft_ids are
    """What each drafted token was drawn from; one-hot where nothing says it, or what says it does not hold. A row that
    was filled up, whose id is -1, was drawn from nothing. None where all are one-hot."""
    vectors: list[tuple[bytes, bytes] | None] = []  # by drafted token
    for request_id, count in zip(request_ids, num_drafted, strict=True):
        given = [None if entry is None else (entry.ids, entry.weights) for entry in weights.get(request_id, ())[:count]]
        vectors += [*given, *[None] * (count - len(given))]
    if not any(vectors):
        return None
    entries, ids = DraftWeights.of(vectors), draft_ids.cpu().long()
    usable, _, totals = check_weights(entries, ids, vocab_size)  # [drafted] each
    kept = usable[entries.draft_of].nonzero().squeeze(1)  # [kept] of the entries
    one_hot = (~usable & (ids >= 0)).nonzero().squeeze(1)  # [one-hot] of the drafted
    rows = torch.cat((entries.draft_of[kept], one_hot))
    columns = torch.cat((entries.ids[kept], ids[one_hot]))
    values = torch.cat((entries.weights[kept], torch.ones_like(one_hot))) / totals[rows]
    probs = torch.zeros(len(ids) * vocab_size, device=draft_ids.device)
    probs.scatter_(0, (rows * vocab_size + columns).to(probs.device), values.to(probs))
    return probs.view(-1, vocab_size)
