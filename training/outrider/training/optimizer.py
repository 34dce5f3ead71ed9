"""Muon for the matrices of the layers, AdamW for embeddings and norms.

Muon takes the momentum of a matrix's gradient and replaces it by the nearest matrix with orthogonal rows or columns
(five Newton-Schulz steps): every direction then learns at one rate, which takes far fewer tokens than AdamW.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape are stepped together as one batch of products."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in _by_shape(group["params"]):
                directions = [self._direction(weight, group["momentum"]) for weight in weights]
                updates = orthogonalise(torch.stack(directions))  # [matrices, rows, columns]
                rows, columns = updates.shape[1:]
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                    weight.add_(update, alpha=-scale)

    def _direction(self, weight: Tensor, momentum: float) -> Tensor:
        gradient = weight.grad
        if gradient is None:
            raise ValueError("a matrix without a gradient was given to Muon")
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        average: Tensor = state["momentum"]
        average.lerp_(gradient, 1.0 - momentum)
        direction: Tensor = gradient.lerp(average, momentum)
        return direction


def orthogonalise(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each of `matrices` [matrices, rows, columns], in bfloat16 products."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return orthogonal


class Optimizer:
    """Both optimizers behind one step, with one factor on their learning rates."""

    def __init__(self, model: nn.Module, *, matrix_lr: float, vector_lr: float, weight_decay: float) -> None:
        matrices = [weight for name, weight in model.named_parameters() if is_matrix(name, weight)]
        vectors = [weight for name, weight in model.named_parameters() if not is_matrix(name, weight)]
        self._muon = Muon(matrices, lr=matrix_lr, weight_decay=weight_decay)
        self._adam = torch.optim.AdamW(vectors, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._rates = ((self._muon, matrix_lr), (self._adam, vector_lr))

    def step(self, factor: float) -> None:
        """One step at `factor` times the full learning rates; clears the gradients."""
        for optimizer, rate in self._rates:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon trains this weight."""
    return weight.ndim == 2 and "embed" not in name


def _by_shape(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for weight in weights:
        groups[weight.shape].append(weight)
    return list(groups.values())
