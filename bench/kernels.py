"""Every kernel against its floor and against the PyTorch calls that it stands for:

    python bench/kernels.py [--device cpu|cuda] [--only NAME] [--quick]

Prints a table in Markdown, and stores it with its JSON in bench/results/kernels. What was not measured has no number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from kernels_case import CPU, CUDA, QUICK, WITHOUT_ROW, Case, K, Place
from kernels_layers import layer_cases
from kernels_measure import Differs, Probe, measure
from kernels_sampling import sampling_cases
from kernels_table import render, store
from kernels_windows import window_cases

from outrider.commands.bench_foreign import ForeignLoad
from outrider.commands.bench_machine import describe
from outrider.commands.bench_result import Json
from outrider.commands.bench_store import dump

LEAST_REPEATS = 10
RESULTS = Path(__file__).parent / "results" / "kernels"


def main() -> int:
    """The table; 1 if a row failed."""
    options = _options()
    place = CUDA if options.device == "cuda" else QUICK if options.quick else CPU
    result = _result(place, options)
    foreign = ForeignLoad()
    result["rows"] = [*_measured(place, options)]
    if place.name == "cpu":
        reason = "run it with --device cuda" if torch.cuda.is_available() else "no GPU"
        unmeasured = (case for case in cases(CUDA) if options.only in case.function)
        result["rows"] += [_names(case, CUDA) | {"not_measured": reason} for case in unmeasured]
    result["foreign_cpus"] = foreign.cpus()
    print("\n".join(render(result)))
    if options.output is not None:
        options.output.write_text(dump(result), encoding="utf-8")
    if not (options.quick or options.only):
        print(f"\nstored in {store(options.results, result)}", file=sys.stderr)
    return int(any(row.get("failed") for row in result["rows"]))


def cases(place: Place) -> Iterator[Case]:
    """Every row of a place."""
    yield from layer_cases(place)
    yield from sampling_cases(place)
    yield from window_cases(place)


def _measured(place: Place, options: argparse.Namespace) -> Iterator[Json]:
    """One row after the other. One that fails says so, and takes none of the others with it."""
    probe, failures = Probe(place, quick=options.quick), _failures(place)
    chosen = [case for case in cases(place) if options.only in case.function]
    for number, case in enumerate(chosen, 1):
        print(f"{number} of {len(chosen)}: {case.function}, {case.shape}", file=sys.stderr, flush=True)
        row = _names(case, place)
        try:
            row |= measure(place, probe, case.make, options.repeats, options.seed)
        except failures as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            print(f"  {reason}", file=sys.stderr)
            row |= {"not_measured": reason, "failed": True}
        yield row


def _failures(place: Place) -> tuple[type[Exception], ...]:
    """What a row may fail of."""
    if place.name == "cpu":
        return Differs, RuntimeError
    from triton.errors import TritonError  # of compilation, and of what a device cannot hold

    return Differs, RuntimeError, TritonError


def _names(case: Case, place: Place) -> Json:
    return {"function": case.function, "device": place.name, "shape": case.shape, "against": case.against}


def _result(place: Place, options: argparse.Namespace) -> Json:
    machine = describe()
    on_gpu = place.name == "cuda"
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine) | {"flags": list(machine.flags)},
        "device": {
            "name": torch.cuda.get_device_name() if on_gpu else machine.cpu,
            "dtype": str(place.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda if on_gpu else None,
        },
        "setup": {"repeats": options.repeats, "k": K, "quick": options.quick, "seed": options.seed},
        "rows": [],
        "without_row": WITHOUT_ROW,
        "foreign_cpus": None,
    }


def _options() -> argparse.Namespace:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found, help="default: a GPU where there is one")
    parser.add_argument("--repeats", type=int, default=LEAST_REPEATS + 1, help="alternating runs of each row, from 10")
    parser.add_argument("--only", default="", help="rows whose function's name holds this; stores nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs, and of the order")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two runs: does it work? Stores nothing")
    parser.add_argument("--output", type=Path, default=None, help="file to write the result to as well, as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stored results")
    options = parser.parse_args()
    if options.quick:
        options.device, options.repeats = "cpu", 2
    elif options.repeats < LEAST_REPEATS:
        parser.error(f"--repeats must be at least {LEAST_REPEATS}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here")
    return options


if __name__ == "__main__":
    sys.exit(main())
