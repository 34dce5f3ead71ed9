"""`outrider bench host`: what services do beside the device, in processor time: a target for a step, by the sequences
in it, and a gateway for a round.

Processor time is no clock: others on the machine cost it little. What machines differ in, a loop of plain Python says,
which is run in turn with what is measured: a figure over the loop's holds anywhere. The target is the production
engine over a device that takes no time (host_target), the gateway a process as `outrider gateway` starts it (bench
gateway). How long a device waits for the host between two steps of plain decoding says a target over one that sleeps:
by the clock, so on a quiet machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from outrider.bench.gateway import GatewayBenchSettings, measure_cell, start_gateway
from outrider.bench.harness import RESULTS, RESULTS_TEXT, BenchWorker, PairSettings, report_failures
from outrider.bench.results import Json, align, median_of, new_result, note, number, spread
from outrider.cli.arguments import parse, split_ids
from outrider.planner.policy import Policy

DESCRIPTION = (
    "Measure what target and gateway cost in processor time beside the device: microseconds a sequence and step, and "
    "a round, and the same over a loop of plain Python, which holds on other machines, too."
)
WARM_UP = 4  # steps that count for nothing
STEP_S = 0.005  # of the device that sleeps
LOOP_US = 5.0  # of the loop, where figures "at reference" hold: a scale, no machine's
Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], BeforeValidator(split_ids)]


class HostBenchSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_host"

    sequences: Counts = Field((1, 8, 32, 64), min_length=1, description="sequences in a target's step, as in 1,32")
    streams: Counts = Field((1, 32), min_length=1, description="streams of a gateway, as in 1,32")
    steps: int = Field(60, ge=1, le=300, description="steps of a target in each repeat")
    seconds: float = Field(4.0, gt=0, description="for which a gateway is measured in each repeat")
    repeats: int = Field(3, ge=1, le=100, description="of every cell, in turn")
    results: Path = Field(RESULTS / "host", description=RESULTS_TEXT)


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench host") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(HostBenchSettings, argv, prog, DESCRIPTION)

    def work() -> None:
        result = measure(settings)
        settings.finish(result, render(result))

    return report_failures(prog, work)


def measure(settings: HostBenchSettings) -> Json:
    """Every cell, in turn in every repeat, each beside the loop."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    idle: dict[int, list[float]] = {}
    for repeat in range(settings.repeats):
        note(f"repeat {repeat + 1} of {settings.repeats}")
        for cell, us in (*_target_cells(settings), *_gateway_cells(settings)):
            found.setdefault(cell, []).append((us, loop_us()))
        for count in settings.sequences:
            idle.setdefault(count, []).append(_idle_us(count, settings.steps))
    cells = [
        {
            "service": service,
            "mode": mode,
            "sequences": count,
            "us": spread([us for us, _ in runs]),
            "us_at_reference": spread([LOOP_US * us / loop for us, loop in runs]),
        }
        for (service, mode, count), runs in found.items()
    ]
    setup = {"k": settings.num_draft_tokens, "steps": settings.steps, "seconds": settings.seconds}
    gaps = [{"sequences": count, "us": spread(runs)} for count, runs in idle.items()]
    return new_result(setup | {"repeats": settings.repeats}) | {"cells": cells, "idle": gaps}


def _target_cells(settings: HostBenchSettings) -> Iterator[tuple[tuple[str, str, int], float]]:
    from outrider.bench.host_target import HostTarget  # loads torch

    for count in settings.sequences:
        for mode, k in (("plain", 0), ("in turn", settings.num_draft_tokens)):
            target = HostTarget(count, k)
            rounds = [target.round() for _ in range(WARM_UP + settings.steps)][WARM_UP:]
            if any(num_held != count for _, num_held in rounds):
                raise ValueError(f"{mode}, {count} sequences: a step did not hold all of them")
            yield ("target", mode, count), 1e6 * median(seconds for seconds, _ in rounds) / count


def _idle_us(count: int, steps: int) -> float:
    """How long the device has nothing to do before a step of so many sequences, whose credit reaches as far as a
    gateway's does; the median."""
    from outrider.bench.host_target import HostTarget, SleepingDevice  # loads torch

    device = SleepingDevice(STEP_S)
    target = HostTarget(count, 0, device, Policy(0).plain_ahead)
    first = len(device.idle_s) + WARM_UP
    for _ in range(WARM_UP + steps):
        target.round()
    return 1e6 * median(device.idle_s[first:])


def _gateway_cells(settings: HostBenchSettings) -> Iterator[tuple[tuple[str, str, int], float]]:
    of_gateway = GatewayBenchSettings(
        target=settings.target,
        draft=settings.draft,
        pair=settings.pair,
        num_draft_tokens=settings.num_draft_tokens,
        seconds=settings.seconds,
        start_timeout=settings.start_timeout,
    )
    folders, _ = settings.checkpoints()
    with BenchWorker.of_module("clients", "gateway_peers", "clients") as clients:
        clients.wait(settings.start_timeout)
        for streams in settings.streams:
            with ExitStack() as stack:
                address, metrics = start_gateway(stack, of_gateway, folders.target, streams)
                for mode, name in (("plain", "plain"), ("sequential", "in turn")):
                    cell = measure_cell(of_gateway, clients, address, metrics, mode, streams)
                    yield ("gateway", name, streams), cell["us_per_round"]
                clients.ask({})  # ends the streams


def loop_us(num_loops: int = 400) -> float:
    """Processor time of a loop of calls, attributes, dictionaries and tuples, as services' own code has them; the least
    of some."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for place in range(num_loops):
            _loop(place)
        best = min(best, time.thread_time() - began)
    return 1e6 * best / num_loops


class _Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, value: int) -> None:
        self.total += value


def _loop(number: int) -> tuple[int, int]:
    counter, seen = _Counter(), dict[int, tuple[int, int]]()
    for place in range(32):
        seen[place & 7] = (place, number)
        counter.add(len(seen[place & 7]))
    return counter.total, len(seen)


def render(result: Json) -> Iterator[str]:
    """What it says, as text."""
    setup, machine = result["setup"], result["machine"]
    yield f"{machine['cpu']}, {machine['cores']} cores; k={setup['k']}"
    rows = [
        (cell["service"], cell["mode"], str(cell["sequences"]), median_of(cell["us"], 0), _at_reference(cell))
        for cell in result["cells"]
    ]
    idle = [("device", "idle", str(gap["sequences"]), median_of(gap["us"], 0), "") for gap in result["idle"]]
    yield from align([("service", "mode", "sequences", "us", "at reference"), *rows, *idle])
    yield "us: processor time, of a target a sequence and step, of a gateway a round."
    yield f"device, idle: by the clock, before a plain step of one that takes {1e3 * STEP_S:g} ms for each."
    yield f"at reference: where a loop of plain Python takes {LOOP_US:g} us."


def _at_reference(cell: Json) -> str:
    return number(cell["us_at_reference"]["median"], 0)
