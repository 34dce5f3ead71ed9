"""Every kernel against its floor and against the PyTorch calls that it stands for:

    outrider bench kernels [--device cpu|cuda] [--only NAME] [--quick]

Prints a table in Markdown, and stores it with its JSON in outrider-bench/results/kernels. What was not measured has no
number. A case is measured with kernel and comparison in turn, and in every repeat the device's own copy, read and
product."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.bench.harness import RESULTS
from outrider.bench.kernels_cases import (
    CPU,
    CUDA,
    QUICK,
    WITHOUT_ROW,
    Case,
    K,
    KernelWork,
    Place,
    cases,
)
from outrider.bench.results import (
    ForeignLoad,
    Json,
    bracketed,
    dump,
    markdown,
    median_of,
    new_result,
    other_programs,
    spread,
    store,
)

LEAST_REPEATS = 10
WARM_UP = 3  # calls that count for nothing: the first one compiles
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the greatest value
SIZES = {"cpu": (64 << 20, 1536), "cuda": (128 << 20, 8192)}  # float32 numbers, which no cache holds; rows of a square
QUICK_SIZES = (1 << 18, 128)
HEAD = ("function", "where", "shape", "us", "floor us", "share of floor", "compared with", "us", "times as fast")


class Differs(ValueError):
    """The kernel and what it is compared with disagree: no times are worth telling."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reached in one repeat."""

    copy_gb_s: float  # read and written bytes both count
    read_gb_s: float  # above the copy's where a processor reads what it is about to write
    product_gflop_s: float

    def floor_us(self, work: KernelWork) -> float:
        """The time below which nothing is possible at these rates."""
        return max(self.memory_us(work), work.flops / self.product_gflop_s / 1e3)

    def memory_us(self, work: KernelWork) -> float:
        """For its bytes alone."""
        return work.num_bytes / max(self.copy_gb_s, self.read_gb_s) / 1e3


class Probe:
    """A copy, a sum and a product of the device's own. The copy also empties the caches before every timed call, so
    that a call finds its inputs in memory; on a GPU it keeps the device busy while the host launches what follows."""

    def __init__(self, place: Place, *, quick: bool = False) -> None:
        numbers, square = QUICK_SIZES if quick else SIZES[place.device]
        self._source = torch.ones(numbers, device=place.device)
        self._target = torch.empty_like(self._source)
        self._left, self._right = torch.randn(2, square, square, device=place.device).to(place.dtype)
        self._result = torch.empty_like(self._left)

    @property
    def num_bytes(self) -> int:
        """That a read takes from memory; a copy writes as many."""
        return self._source.nbytes

    def copy(self) -> None:
        """Reads and writes."""
        self._target.copy_(self._source)

    def read(self) -> None:
        """Reads alone."""
        self._target.sum()

    def product(self) -> None:
        """A square product in the place's type."""
        torch.mm(self._left, self._right, out=self._result)

    def rates(self, copies_us: list[float], read_us: float, product_us: float) -> Rates:
        """The best copy counts: the floor is to be one."""
        num_bytes, flops = self.num_bytes, 2 * self._left.shape[0] ** 3
        return Rates(2 * num_bytes / min(copies_us) / 1e3, num_bytes / read_us / 1e3, flops / product_us / 1e3)


@torch.inference_mode()
def measure(place: Place, probe: Probe, make: Callable[[], KernelWork], repeats: int, seed: int) -> Json:
    """The numbers of one row. Raises Differs."""
    torch.manual_seed(seed)
    work, order = make(), random.Random(seed)
    _compare(work, TOLERANCE[place.dtype])
    sides = {"us": work.kernel, "against_us": work.against}
    for side in sides.values():
        for _ in range(WARM_UP):
            side()
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        times, rates = _repeat(place, probe, sides, order.sample(tuple(sides), 2))
        floor_us = rates.floor_us(work)
        found["floor_us"].append(floor_us)
        found["share_of_floor"].append(floor_us / times["us"])
        found["times_as_fast"].append(times["against_us"] / times["us"])
        for name, value in (times | asdict(rates)).items():
            found[name].append(value)
    bound = "memory" if floor_us == rates.memory_us(work) else "product"
    sizes = {"bytes": work.num_bytes, "flops": work.flops, "bound": bound}
    return sizes | {name: spread(values) for name, values in found.items()}


def _repeat(
    place: Place, probe: Probe, sides: Mapping[str, Callable[[], Any]], order: Sequence[str]
) -> tuple[dict[str, float], Rates]:
    """Each side once, after a copy; its microseconds by name."""
    product, read = timed(place, probe.product), timed(place, probe.read)
    copies, runs = [], {}
    for name in order:
        copies.append(timed(place, probe.copy))
        runs[name] = timed(place, sides[name])
    times = {name: run() for name, run in runs.items()}
    return times, probe.rates([copy() for copy in copies], read(), product())


def timed(place: Place, call: Callable[[], Any]) -> Callable[[], float]:
    """Runs it; the microseconds are read later, so that the host does not wait for a GPU between calls."""
    if place.device == "cpu":
        started = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - started) * 1e6
        return lambda: elapsed
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()

    def read() -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    return read


def _compare(work: KernelWork, tolerance: float) -> None:
    mine, theirs = _tensors(work.kernel()), _tensors(work.against())
    for own, other in zip(mine[: work.compared], theirs[: work.compared], strict=True):
        if own.shape != other.shape:
            raise Differs(f"shape {tuple(own.shape)}, not {tuple(other.shape)}")
        own, other = own.float(), other.float()
        unequal = own != other  # infinities may be
        deviation = (own - other)[unequal].abs().max() if bool(unequal.any()) else own.new_zeros(())
        most = other[other.isfinite()].abs().max()
        if not bool(deviation <= tolerance * most):
            raise Differs(f"differs by {float(deviation):.3g} where the greatest value is {float(most):.3g}")


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def store_with_page(folder: Path, result: Json) -> Path:
    """Writes JSON and Markdown; returns the JSON's path."""
    path = store(folder, result, result["device"]["name"])
    path.with_suffix(".md").write_text("\n".join(render(result)) + "\n", encoding="utf-8")
    return path


def render(result: Json) -> Iterator[str]:
    """The whole page."""
    device, machine, setup = result["device"], result["machine"], result["setup"]
    yield f"# Kernels on {device['name']}"
    yield ""
    where = "CUDA " + device["cuda"] if device["cuda"] else f"{device['threads']} threads of {machine['cores']} cores"
    yield (
        f"{result['when']}, {where}, {device['dtype']}, torch {machine['torch']}; medians of {setup['repeats']} "
        f"alternating runs, least and greatest in brackets; k = {setup['k']}."
    )
    yield ""
    if setup["quick"]:
        yield "These shapes say only that it runs."
        yield ""
    yield from _rates(result)
    yield ""
    yield from markdown(HEAD, [_cells(row) for row in result["rows"]], words=(0, 1, 2, 6))
    yield ""
    yield "Without a row:"
    yield ""
    yield from (f"* `{name}`: {reason}" for name, reason in result["without_row"].items())


def _rates(result: Json) -> Iterator[str]:
    measured = [row for row in result["rows"] if "us" in row]
    if measured:
        yield (
            f"Beside the rows: copy {_range(measured, 'copy_gb_s')} GB/s, read {_range(measured, 'read_gb_s')} GB/s, "
            f"product {_range(measured, 'product_gflop_s')} GFLOP/s; {other_programs(result['foreign_cpus'])}."
        )


def _range(rows: list[Json], name: str) -> str:
    medians = [row[name]["median"] for row in rows]
    return f"{min(medians):.0f} to {max(medians):.0f}"


def _cells(row: Json) -> tuple[str, ...]:
    name = (f"`{row['function']}`", row["device"], row["shape"])
    if "us" not in row:
        said = f"not measured: {row['not_measured']}".replace("|", "/")
        return (*name, said, "", "", row["against"], "", "")
    return (
        *name,
        median_of(row["us"], 1),
        median_of(row["floor_us"], 1),
        bracketed(row["share_of_floor"]),
        row["against"],
        median_of(row["against_us"], 1),
        bracketed(row["times_as_fast"]),
    )


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench kernels") -> int:
    """The table; 1 if a row failed."""
    options = _options(argv, prog)
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
        print(f"\nstored in {store_with_page(options.results, result)}", file=sys.stderr)
    return int(any(row.get("failed") for row in result["rows"]))


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
    on_gpu = place.name == "cuda"
    setup = {"repeats": options.repeats, "k": K, "quick": options.quick, "seed": options.seed}
    result = new_result(setup)
    return result | {
        "device": {
            "name": torch.cuda.get_device_name() if on_gpu else result["machine"]["cpu"],
            "dtype": str(place.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda if on_gpu else None,
        },
        "rows": [],
        "without_row": WITHOUT_ROW,
        "foreign_cpus": None,
    }


def _options(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found, help="default: a GPU where there is one")
    parser.add_argument("--repeats", type=int, default=LEAST_REPEATS + 1, help="alternating runs of each row, from 10")
    parser.add_argument("--only", default="", help="rows whose function's name holds this; stores nothing")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs, and of the order")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, two runs: does it work? Stores nothing")
    parser.add_argument("--output", type=Path, default=None, help="file to write the result to as well, as JSON")
    parser.add_argument("--results", type=Path, default=RESULTS / "kernels", help="folder of the stored results")
    options = parser.parse_args(argv)
    if options.quick:
        options.device, options.repeats = "cpu", 2
    elif options.repeats < LEAST_REPEATS:
        parser.error(f"--repeats must be at least {LEAST_REPEATS}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here")
    return options


if __name__ == "__main__":
    sys.exit(main())
