"""Muon for the matrices of the layers, AdamW for embeddings, language-model heads and norms.

Muon replaces the momentum of a matrix's gradient by the nearest matrix with orthogonal rows or columns: every direction
then learns at one rate, which takes far fewer tokens than AdamW.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Optimizer:
    """Both optimizers behind one step, with one factor on their learning rates."""

    def __init__(self, model: nn.Module, *, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        matrices = [weight for name, weight in model.named_parameters() if is_matrix(name, weight)]
        vectors = [weight for name, weight in model.named_parameters() if not is_matrix(name, weight)]
        self._muon = torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=weight_decay)
        self._adam = torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._rates: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (self._muon, matrix_lr),
            (self._adam, vector_lr),
        )

    def step(self, factor: float) -> None:
        """One step at `factor` times the full learning rates; clears the gradients."""
        for optimizer, rate in self._rates:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept of each weight, as "muon.0.momentum_buffer". Rates are no part of it: every step sets them."""
        return {
            f"{name}.{weight}.{kind}": tensor
            for name, optimizer in self._named
            for weight, kept in optimizer.state_dict()["state"].items()
            for kind, tensor in kept.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state_dict` gave."""
        for name, optimizer in self._named:
            kept: dict[int, dict[str, Tensor]] = {}
            for key, tensor in state.items():
                owner, weight, kind = key.split(".")
                if owner == name:
                    kept.setdefault(int(weight), {})[kind] = tensor
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": kept, "param_groups": groups})

    @property
    def _named(self) -> tuple[tuple[str, torch.optim.Optimizer], ...]:
        return ("muon", self._muon), ("adam", self._adam)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon trains this weight: what has a row for each token it does not."""
    return weight.ndim == 2 and "emb" not in name and "head." not in name
