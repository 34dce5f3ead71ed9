"""How many experts the rows of a pass went to: what a step of a mixture costs beside its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.engine.models.mixture_config import Mixture


@dataclass(slots=True)
class ExpertCensus:
    """Of the last pass; shared experts, which every row goes to, are left out."""

    mixture: Mixture
    device: torch.device
    num_woken: Tensor = field(init=False)  # [] int64: over all layers
    rows: Tensor = field(init=False)  # [layers, experts] int64: what each has; who counts in C leaves it as it is

    def __post_init__(self) -> None:
        shape = len(self.mixture.layers), self.mixture.num_experts
        self.rows = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.num_woken = torch.zeros((), dtype=torch.int64, device=self.device)

    def of_layer(self, index: int) -> Tensor:  # [experts] int64, to be written
        """Those of one layer of the model, which has experts."""
        return self.rows[sorted(self.mixture.layers).index(index)]

    def close(self) -> None:
        """All layers were computed."""
        torch.sum(self.rows > 0, dim=(0, 1), out=self.num_woken)


@runtime_checkable
class CountsExperts(Protocol):
    """A model that may be a mixture."""

    @property
    def census(self) -> ExpertCensus | None:
        """What it counts; None where it has no experts."""
