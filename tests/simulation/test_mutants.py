"""Each deliberate breakage must be found; one that survives fails its test."""

from __future__ import annotations

import pytest
from simulation.campaign import law_p_values, run_world
from simulation.checks import Violation
from simulation.mutants import MUTANTS, Mutant
from simulation.settings import Mode

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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_finds(mutant: Mutant) -> None:
    with mutant.apply():
        assert is_found(mutant), f"survives: {mutant.name}"
