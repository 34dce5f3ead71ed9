"""`outrider bench gateway`: what a round costs a gateway process, and how many streams one or several can carry.

The gateway is as `outrider gateway` starts it, with metrics and as many processes as wanted; its targets and drafts
compute nothing but counts, at a given pace, and clients in a process of their own read every stream (gateway_peers).
What is said of the gateway it says itself: processor time, rounds and how late its loops wake are read from its
metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from outrider.bench.harness import (
    RESULTS,
    RESULTS_TEXT,
    BenchWorker,
    BenchWorkerFailed,
    PairSettings,
    report_failures,
    scrape,
    start_service,
)
from outrider.bench.results import ForeignLoad, Json, align, median_of, new_result, note, number, spread
from outrider.cli.arguments import parse, split_ids
from outrider.cli.local_services import LOOPBACK, Services, wait_for_draft

Buckets = tuple[tuple[float, float], ...]  # upper bound in seconds, and how many lay below
GatewayMode = Literal["plain", "sequential", "chains", "branches", "auto"]
METRICS = re.compile(r"^gateway metrics on (\S+)$", re.MULTILINE)
LAG = "outrider_loop_lag_seconds_bucket"
KEPT_PACE, MOST_LAG_MS = 0.97, 20.0  # what a gateway must do to carry so many streams
DESCRIPTION = (
    "Measure what a round costs a gateway process, by mode and number of streams: its processor time, and how late "
    "its event loop wakes. Targets and drafts compute nothing but counts, so no core is needed for models."
)
COLUMNS = {  # of a cell: their digits, and what the table calls them
    "us_per_round": (0, "us a round"),
    "rounds_per_s": (1, "rounds/s"),
    "busy": (2, "busy"),
    "lag_p50_ms": (2, "lag p50, ms"),
    "lag_p99_ms": (1, "p99, ms"),
    "foreign_cpus": (2, "others"),
}


class GatewayBenchSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_gateway"

    modes: Annotated[tuple[GatewayMode, ...], BeforeValidator(split_ids)] = Field(
        ("plain", "sequential", "chains", "branches", "auto"),
        min_length=1,
        description="plain, sequential, chains, branches, auto",
    )
    streams: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], BeforeValidator(split_ids)] = Field(
        (1, 16, 64, 100, 200, 300), min_length=1, description="numbers of streams at once, as in 1,100"
    )
    rounds_per_s: float = Field(25.0, gt=0, le=1000, description="rounds a second of each stream, as the targets step")
    streams_per_target: int = Field(
        100, ge=1, description="streams of one target and one draft; more have more of them"
    )
    processes: int = Field(1, ge=1, le=64, description="gateway processes behind the one address")
    connections: int = Field(4, ge=1, le=1024, description="connections of the clients, shared out among the processes")
    seconds: float = Field(8.0, gt=0, description="for which each cell is measured")
    warmup: float = Field(2.0, ge=0, description="seconds before that, with all streams open")
    repeats: int = Field(3, ge=1, le=100, description="runs of each cell, in turn")
    trace: bool = Field(False, description="record every request's trace, to a file that is thrown away")
    results: Path = Field(RESULTS / "gateway", description=RESULTS_TEXT)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a gateway said of itself at one moment."""

    at: float
    cpu_s: Mapping[str, float]  # by process
    num_rounds: float
    lag_buckets: Mapping[str, Buckets]  # by process

    @classmethod
    def of(cls, url: str) -> Reading:
        """Reads its metrics."""
        at, num_rounds = time.monotonic(), 0.0
        cpu_s: dict[str, float] = {}
        buckets: dict[str, list[tuple[float, float]]] = {}
        for sample in scrape(url):
            process = sample.labels.get("process", "")  # none where there is one alone
            if sample.name == "process_cpu_seconds_total":
                cpu_s[process] = sample.value
            elif sample.name == "outrider_rounds_total":
                num_rounds += sample.value
            elif sample.name == LAG:
                buckets.setdefault(process, []).append((float(sample.labels["le"]), sample.value))
        return cls(at, cpu_s, num_rounds, {process: tuple(sorted(found)) for process, found in buckets.items()})


def lag_ms(before: Buckets, after: Buckets, percent: float) -> float | None:
    """A percentile of how late a loop woke between two readings, in proportion within a bucket, as Prometheus'
    histogram_quantile; past the last bucket its bound."""
    counts = [(bound, late - early) for (bound, early), (_, late) in zip(before, after, strict=True)]
    wanted = counts[-1][1] * percent / 100 if counts else 0.0
    if not wanted:
        return None
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *counts]):
        if count >= wanted:
            return 1e3 * (low if high == float("inf") else low + (high - low) * (wanted - below) / (count - below))
    return None


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench gateway") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(GatewayBenchSettings, argv, prog, DESCRIPTION)

    def work() -> None:
        result = measure(settings)
        settings.finish(result, render(result))

    return report_failures(prog, work)


def measure(settings: GatewayBenchSettings) -> Json:
    """Every cell, in turn in every repeat; a gateway of its own for each number of streams."""
    folders, pair = settings.checkpoints()
    setup = {
        "pair": pair, "k": settings.num_draft_tokens, "rounds_per_s": settings.rounds_per_s,
        "streams_per_target": settings.streams_per_target, "connections": settings.connections,
        "processes": settings.processes, "seconds": settings.seconds, "repeats": settings.repeats,
        "traced": settings.trace,
    }  # fmt: skip
    cells: dict[tuple[str, int], list[Json]] = {}
    with BenchWorker.of_module("clients", "gateway_peers", "clients") as clients:
        clients.wait(settings.start_timeout)
        for repeat, streams in product(range(settings.repeats), settings.streams):
            note(f"repeat {repeat + 1} of {settings.repeats}: {streams} streams")
            with ExitStack() as stack:
                address, metrics = start_gateway(stack, settings, folders.target, streams)
                for mode in settings.modes:
                    run = measure_cell(settings, clients, address, metrics, mode, streams)
                    cells.setdefault((mode, streams), []).append(run)
                clients.ask({})  # ends the streams
    return new_result(setup) | {"cells": [_cell(settings, *cell, runs) for cell, runs in cells.items()]}


def start_gateway(stack: ExitStack, settings: GatewayBenchSettings, folder: Path, streams: int) -> tuple[str, str]:
    """Targets, drafts and a gateway; its address, and its metrics'."""
    num_pairs = -(-streams // settings.streams_per_target)
    peers = BenchWorker.of_module("peers", "gateway_peers", "services", folder, num_pairs, settings.rounds_per_s)
    found = stack.enter_context(peers).wait(settings.start_timeout)
    services = stack.enter_context(Services())
    arguments = [
        "--target", ",".join(found["targets"]), "--draft", ",".join(found["drafts"]), "--tokenizer", folder,
        "--num-draft-tokens", settings.num_draft_tokens, "--metrics", LOOPBACK, "--processes", settings.processes,
        "--max-active", streams, "--max-admitted-tokens", 1 << 40, "--caller-share", 1,
    ]  # fmt: skip
    if settings.trace:
        arguments += ["--trace-file", "/dev/null", "--trace-rounds", 1 << 30]
    gateway = start_service(services, "gateway", *arguments)
    address = services.wait(gateway, settings.start_timeout)
    asyncio.run(wait_for_draft(address, settings.start_timeout))
    return address, f"http://{gateway.find(METRICS)}/metrics"


def measure_cell(
    settings: GatewayBenchSettings, clients: BenchWorker, address: str, url: str, mode: str, streams: int
) -> Json:
    """Opens the streams, and measures for a while what the gateway does for them."""
    asked = {"address": address, "connections": settings.connections, "streams": streams, "mode": mode}
    clients.ask(asked | {"k": settings.num_draft_tokens})
    time.sleep(settings.warmup)
    foreign = ForeignLoad()
    before, earlier = Reading.of(url), clients.ask({"count": True})["messages"]
    time.sleep(settings.seconds)
    after, later = Reading.of(url), clients.ask({"count": True})["messages"]
    if later == earlier:
        raise BenchWorkerFailed(f"{mode}, {streams} streams: nothing came from the gateway")
    num_rounds, seconds = after.num_rounds - before.num_rounds, after.at - before.at
    cpu_s = [after.cpu_s[process] - before.cpu_s[process] for process in sorted(before.cpu_s)]
    return {
        "us_per_round": 1e6 * sum(cpu_s) / max(1.0, num_rounds),
        "rounds_per_s": num_rounds / seconds / streams,
        "busy": sum(cpu_s) / seconds,
        "busy_by_process": [one / seconds for one in cpu_s],
        "lag_p50_ms": _worst_lag_ms(before, after, 50),
        "lag_p99_ms": _worst_lag_ms(before, after, 99),
        "foreign_cpus": foreign.cpus(),
    }


def _worst_lag_ms(before: Reading, after: Reading, percent: float) -> float | None:
    """Of the process whose loop wakes the latest."""
    known = [lag_ms(before.lag_buckets[each], after.lag_buckets[each], percent) for each in before.lag_buckets]
    return max((lag for lag in known if lag is not None), default=None)


def _cell(settings: GatewayBenchSettings, mode: str, streams: int, runs: Sequence[Json]) -> Json:
    cell: Json = {"mode": mode, "streams": streams} | {name: spread([run[name] for run in runs]) for name in COLUMNS}
    cell["busy_by_process"] = [run["busy_by_process"] for run in runs]
    pace, lag = cell["rounds_per_s"], cell["lag_p99_ms"]
    on_pace = pace is not None and pace["median"] >= KEPT_PACE * settings.rounds_per_s
    cell["carried"] = on_pace and lag is not None and lag["median"] < MOST_LAG_MS
    us_per_round = cell["us_per_round"]["median"]  # 0: less than the system's clock of processor time shows
    cell["streams_a_core"] = 1e6 / (us_per_round * settings.rounds_per_s) if us_per_round else None
    return cell


def render(result: Json) -> Iterator[str]:
    """What it says, as text."""
    setup, machine = result["setup"], result["machine"]
    traced = ", every request traced" if setup["traced"] else ""
    pace = f"{setup['rounds_per_s']:g} rounds a second"
    processes = f", {setup['processes']} gateway processes" if setup["processes"] > 1 else ""
    yield f"{machine['cpu']}, {machine['cores']} cores; k={setup['k']}, {pace}{processes}{traced}"
    head = ("mode", "streams", *(title for _, title in COLUMNS.values()), "streams a core", "carried")
    rows = [
        (
            cell["mode"],
            str(cell["streams"]),
            *(median_of(cell[name], digits) for name, (digits, _) in COLUMNS.items()),
            number(cell["streams_a_core"], 0),
            "yes" if cell["carried"] else "no",
        )
        for cell in result["cells"]
    ]
    yield from align([head, *rows])
    yield "busy: processors the gateway took; others: processors that programs beside the bench took."
    if setup["processes"] > 1:
        yield "lag: of the process whose loop wakes the latest."
    yield f"carried: {KEPT_PACE:.0%} of the pace, and a 99th percentile of the lag below {MOST_LAG_MS:g} ms."
