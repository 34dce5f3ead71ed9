"""Ways to be wrong that the draws must show: each replaces a part of the target with one that is nearly right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.sampler import SequenceSampler
from outrider.kernels.types import Penalties, Windows
from outrider.kernels.verify.reference import accept, coupled_accept

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def residual_is_target(patch: Patch) -> None:
    """A refused token is replaced by a draw from the target's law, as if nothing had been drafted."""

    def mutant(target_probs: Tensor, windows: Windows, *arguments: Any) -> tuple[Tensor, Tensor]:
        num_accepted, next_weights = accept(target_probs, windows, *arguments)
        plain = target_probs.index_select(0, windows.next_rows(num_accepted)).double()
        return num_accepted, torch.where(next_weights.sum(dim=-1, keepdim=True) > 0, plain, next_weights)

    patch.setattr("outrider.target_service.verifier.accept", mutant)


def bonus_of_the_row_before(patch: Patch) -> None:
    """The token after a whole window is drawn from the row that judged the window's last token."""

    def mutant(windows: Windows, num_accepted: Tensor) -> Tensor:
        whole = (num_accepted == windows.num_drafted) & (num_accepted > 0)
        return windows.row_starts + torch.minimum(num_accepted - whole.long(), windows.num_rows - 1)

    patch.setattr(Windows, "next_rows", mutant)


def penalties_of_the_committed(patch: Patch) -> None:
    """Penalties ignore the tokens drafted before the row's own."""
    penalties = SequenceSampler.penalties

    def mutant(sampler: SequenceSampler, drafted: Sequence[int], first: int, start: int) -> Penalties:
        parts = [penalties(sampler, (), 0, start + row) for row in range(len(drafted) - first + 1)]
        return Penalties(*(torch.cat([getattr(part, name.name) for part in parts]) for name in fields(Penalties)))

    patch.setattr(SequenceSampler, "penalties", mutant)


def coupling_lets_one_more_stay(patch: Patch) -> None:
    """The drafted token that first differs from the target's own stays as well."""

    def mutant(choices: Tensor, windows: Windows, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        num_accepted, _ = coupled_accept(choices, windows, draft_ids)
        num_accepted = torch.minimum(num_accepted + 1, windows.num_drafted)
        return num_accepted, torch.where(windows.has_next(num_accepted), choices[windows.next_rows(num_accepted)], -1)

    patch.setattr("outrider.target_service.verifier.coupled_accept", mutant)
