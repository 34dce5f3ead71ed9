"""Measures a case: kernel and comparison in turn, and in every repeat the device's own copy, read and product."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from kernels_case import Place, Work
from torch import Tensor

from outrider.commands.bench_result import Json, spread

WARM_UP = 3  # calls that count for nothing: the first one compiles
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the greatest value
SIZES = {"cpu": (64 << 20, 1536), "cuda": (128 << 20, 8192)}  # float32 numbers, which no cache holds; rows of a square
QUICK_SIZES = (1 << 18, 128)


class Differs(ValueError):
    """The kernel and what it is compared with disagree: no times are worth telling."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device reached in one repeat."""

    copy_gb_s: float  # read and written bytes both count
    read_gb_s: float  # above the copy's where a processor reads what it is about to write
    product_gflop_s: float

    def floor_us(self, work: Work) -> float:
        """The time below which nothing is possible at these rates."""
        return max(self.memory_us(work), work.flops / self.product_gflop_s / 1e3)

    def memory_us(self, work: Work) -> float:
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
def measure(place: Place, probe: Probe, make: Callable[[], Work], repeats: int, seed: int) -> Json:
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
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()

    def read() -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    return read


def _compare(work: Work, tolerance: float) -> None:
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
