"""Each deliberate breakage must be found; one that survives fails its test."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.campaign import Mode, law_p_values, run_world
from simulation.checks import Violation
from simulation.mutants import MUTANTS, Mutant

MAX_WORLDS = {Mode.GREEDY: 300, Mode.COUPLED: 120, Mode.LAW: 64}
REFUTED = 1e-6


def is_found(mutant: Mutant) -> bool:
    """Whether the first worlds break an invariant, or their outputs the law."""
    outputs: list[tuple[int, ...]] = []
    for seed in range(MAX_WORLDS[mutant.mode]):
        try:
            outputs += run_world(mutant.mode, seed).outputs
        except Violation:
            return True
        if mutant.mode is Mode.LAW and seed % 8 == 7 and min(law_p_values(outputs)) < REFUTED:
            return True
    return False


SLOW = {  # long to find; `make prove` does
    "coin and residual share a word",
    "a block is cached before it is computed",
    "k is cut after the token was seen",
    "patience has no end",
}


def _form(mutant: Mutant) -> Any:
    marks = [pytest.mark.slow] if mutant.name in SLOW else []
    return pytest.param(mutant, marks=marks, id=mutant.name)


@pytest.mark.parametrize("mutant", [_form(mutant) for mutant in MUTANTS])
def test_the_simulation_finds(mutant: Mutant) -> None:
    with mutant.apply():
        assert is_found(mutant), f"survives: {mutant.name}"
