"""The simulation from the command line: one world again, or many.

python tests/simulation/run.py --mode coupled --seed 12
python tests/simulation/run.py --rounds 1000000 --processes 4
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from simulation.campaign import Mode, all_jobs, law_p_values, run_many, run_world
from simulation.checks import Violation
from simulation.world import Result

LEAST_P = 1e-6  # three tests, and any seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every invariant held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode", choices=[mode.value for mode in Mode], default="coupled", help="of the world to run again"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the world to run again, or of the first of many")
    parser.add_argument("--rounds", type=int, help="run worlds of every mode until they have made that many rounds")
    parser.add_argument("--processes", type=int, default=1, help="for many worlds")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if options.rounds is None:
            mode = Mode(options.mode)
            _show(mode.value, run_world(mode, options.seed))
            return 0
        return _run_many(options)
    except Violation as violation:
        print(violation, file=sys.stderr)
        return 1


def _run_many(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    totals = run_many(all_jobs(options.seed), options.rounds, options.processes)
    for mode, result in totals.items():
        _show(mode.value, result)
    wall = time.perf_counter() - started
    num_rounds = sum(result.num_rounds for result in totals.values())
    p_values = law_p_values(totals[Mode.LAW].outputs)
    print(f"{num_rounds} rounds in {wall:.0f} s ({num_rounds / wall:.0f}/s)")
    shown = ", ".join(f"{value:.3g}" for value in p_values)
    print(f"law of rejection sampling, first and last three tokens, each token: p = {shown}")
    if min(p_values) > LEAST_P:
        return 0
    print(f"replay: python tests/simulation/run.py --rounds {options.rounds} --seed {options.seed}", file=sys.stderr)
    return 1


def _show(name: str, result: Result) -> None:
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted((result.faults + result.notes).items()))
    print(
        f"{name}: {len(result.outputs)} requests ({result.num_failed} failed as they may), {result.num_rounds} rounds, "
        f"{result.num_drafted} tokens drafted, {result.num_accepted} accepted, {result.virtual_s:.1f} virtual seconds; "
        f"{faults}"
    )


if __name__ == "__main__":
    sys.exit(main())
