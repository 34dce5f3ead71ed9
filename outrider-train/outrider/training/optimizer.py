"""Muon for the matrices of the layers, AdamW for embeddings, language-model heads and norms.

Muon replaces the momentum of a matrix's gradient by the nearest matrix with orthogonal rows or columns: every direction
then learns at one rate, which takes far fewer tokens than AdamW.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outrider.training.model import has_bfloat16_products

MOMENTUM, LEAST_NORM = 0.95, 1e-7
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a step of Newton and Schulz, by which small singular values grow fastest
STEPS = 5


class Muon(torch.optim.Muon):
    """PyTorch's, whose products are of bfloat16 numbers only where the processor has such products: elsewhere they took
    most of a step of training."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                held = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonal(weight.grad.lerp(held, MOMENTUM))  # by Nesterov
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:  # [rows, columns]
    """About the nearest matrix with orthogonal rows or columns: the singular values lie between 0.5 and 1.5 (Jordan et
    al., 2024, "Muon: an optimizer for hidden layers in neural networks")."""
    is_high = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if is_high else matrix).to(torch.bfloat16 if has_bfloat16_products() else torch.float32)
    found: Tensor = wide / wide.norm().clamp_min(LEAST_NORM)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return (found.T if is_high else found).to(matrix.dtype)


class Optimizer:
    """Both optimizers behind one step, with one factor on their learning rates."""

    def __init__(self, model: nn.Module, *, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        matrices = [weight for name, weight in model.named_parameters() if is_matrix(name, weight)]
        vectors = [weight for name, weight in model.named_parameters() if not is_matrix(name, weight)]
        self._muon = Muon(matrices, lr=matrix_lr, weight_decay=weight_decay)
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
