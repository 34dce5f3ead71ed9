"""Training multiplies numbers that the processor multiplies fast, and learns the same by them."""

from __future__ import annotations

import pytest
import torch

from outrider.training import model, optimizer
from outrider.training.model import fast_products, has_bfloat16_products
from outrider.training.optimizer import Muon, orthogonal


@pytest.mark.parametrize(
    ("features", "expected"),
    [(set(), False), ({"avx2"}, False), ({"avx512f", "avx512_bf16"}, True), ({"amx_bf16"}, True)],
)
def test_a_processor_that_has_none_emulates_none(
    features: set[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "cpu_features", lambda: frozenset(features))
    assert has_bfloat16_products.__wrapped__() is expected
    monkeypatch.setattr(model, "has_bfloat16_products", lambda: expected)
    with fast_products():
        made = torch.ones(2, 2) @ torch.ones(2, 2)
    assert made.dtype == (torch.bfloat16 if expected else torch.float32)


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48)])
def test_its_steps_are_those_of_pytorchs_muon(
    shape: tuple[int, int], is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "has_bfloat16_products", lambda: is_fast)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    made = Muon([ours], lr=0.02, weight_decay=0.1), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for one in made:
            one.step()
    moved = (theirs.detach() - 1).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert made[0].state_dict()["state"][0].keys() == made[1].state_dict()["state"][0].keys()
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3 and values.max() < 1.5
