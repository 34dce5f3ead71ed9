"""Services, network and clients under faults, from fixed seeds: thousands of rounds, and many more to prove it."""

from __future__ import annotations

import pytest
from simulation.campaign import Mode, all_jobs, law_p_values, run_many, run_world
from simulation.checks import Violation
from simulation.mutants import MUTANTS
from simulation.run import main
from simulation.world import Result

FAULTS = {f"{side} {what}" for side in ("target", "draft") for what in ("stream broken", "crashed", "stalled")}
DEVICE_ERRORS = {"target step failed", "draft step failed"}
ANSWERS = {"chain dropped", "forked", "sequence failed", "TargetHost preempted", "DraftHost preempted"}


def run(mode: Mode, num_rounds: int) -> Result:
    """Worlds of one mode; a Violation fails the test with the line that replays it."""
    try:
        return run_many(all_jobs(0, [mode]), num_rounds)[mode]
    except Violation as violation:
        pytest.fail(str(violation), pytrace=False)


@pytest.mark.parametrize("mode", [Mode.COUPLED, Mode.GREEDY, Mode.REJECTION])
def test_every_invariant_holds_under_faults(mode: Mode, prove: bool) -> None:
    """In coupled and greedy mode the output equals plain decoding's, whatever went wrong."""
    result = run(mode, 8_000 if prove else 2_000)
    assert result.num_accepted > 225
    assert result.faults.keys() >= FAULTS | DEVICE_ERRORS
    assert result.notes.keys() >= ANSWERS
    assert (result.notes["branch"] > 20) == (mode is not Mode.REJECTION)
    assert result.notes["target opened"] > 1.04 * len(result.outputs)


def test_the_law_of_rejection_sampling_holds_under_faults(prove: bool) -> None:
    result = run(Mode.LAW, 16_000 if prove else 3_000)
    assert result.num_accepted > 300 and result.num_drafted > 1_300
    assert result.faults.keys() >= FAULTS
    assert all(len(output) == len(result.outputs[0]) for output in result.outputs)
    assert min(law_p_values(result.outputs)) > 1e-4


@pytest.mark.parametrize("mode", list(Mode))
def test_a_world_is_a_function_of_its_seed(mode: Mode) -> None:
    assert run_world(mode, 4) == run_world(mode, 4)


def test_a_violation_says_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "the target goes past its credit")
    with mutant.apply():
        with pytest.raises(Violation) as caught:
            run_many(all_jobs(0, [mutant.mode]), 1_000)
        line = str(caught.value).splitlines()[-1]
        assert line.startswith("replay: python tests/simulation/run.py --mode greedy --seed ")
        assert main(line.split("run.py")[1].split()) == 1
    assert capsys.readouterr().err == f"{caught.value}\n"


def test_the_command_line_runs_many_worlds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "300", "--seed", "7"]) == 0
    assert "law of rejection sampling" in capsys.readouterr().out
