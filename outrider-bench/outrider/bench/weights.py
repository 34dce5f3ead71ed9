"""`outrider bench weights`: a GGUF file here and under llama.cpp, the same file, ids and threads, both in the process
that asks; and the file in other kinds, as llama.cpp's own quantiser writes them.

In every repeat each way is measured once, in random order; whoever is not measured stands still."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from outrider.bench.harness import PEER_START_S, Batches, BenchWorker, PairSettings, Temperatures, report_failures
from outrider.bench.pair import BenchBackend, Cell, Run, WorkerBackend, alternate
from outrider.bench.prompts import read_prompts, read_texts
from outrider.bench.results import ForeignLoad, Json, align, bracketed, new_result, note, spread, title, where
from outrider.cli.arguments import load_tokenizer, parse, split_ids
from outrider.rpc.hub import locate
from outrider.rpc.settings import usable_cores

GgufKind = Literal["F32", "Q8_0", "Q4_0", "Q4_K_S", "Q4_K_M"]
Way = Literal["plain", "suffix", "self:int4", "self:int8", "draft"]
AS_IT_IS = "as it is"
PLAIN = "outrider plain"
QUICK = {"batches": (1,), "temperatures": (0.0,), "repeats": 1, "max_tokens": 16, "store": False}
DESCRIPTION = (
    "Measure a GGUF file here and under llama.cpp (by llama-cpp-python, batches by llama_decode), plain and with "
    "drafts. Without --gguf the file is the expansion of the embedded pair's target."
)


class WeightsSettings(PairSettings):
    """Which files are measured."""

    section: ClassVar[str] = "bench_weights"

    gguf: Path | None = Field(None, description="a GGUF file (default: the expansion of the embedded pair's target)")
    kinds: Annotated[tuple[GgufKind, ...], BeforeValidator(split_ids)] = Field(
        (), description="kinds that llama.cpp makes of it, as in Q8_0,Q4_K_M (default: as it is; of the expansion all)"
    )
    llama_python: Path = Field(description="python of a virtual environment with llama-cpp-python and gguf")
    ways: Annotated[tuple[Way, ...], BeforeValidator(split_ids)] = Field(
        (), description="ours (default: plain, draft or of a file self:int4, and suffix where no prompt comes twice)"
    )
    batches: Batches = Field((1, 4, 8), min_length=1, description="numbers of streams at once, as in 1,4")
    temperatures: Temperatures = Field((0.0, 1.0), min_length=1, description="temperatures, as in 0,1")
    max_tokens: int = Field(128, ge=8, le=900, description="tokens of every completion")
    repeats: int = Field(5, ge=1, le=100, description="runs of each way of decoding, in random order")
    prompts: Path | None = Field(
        None,
        description="texts: at least as many as the largest batch; of ways that remember, for every repeat and one",
    )
    quick: bool = Field(False, description="does it run? One stream, one repeat; stores nothing")

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.gguf is not None and "draft" in self.ways and self.draft is None:
            raise ValueError("ways names draft, and of a file of your own there is none; allowed: --draft DIR with it")
        if "suffix" in self.ways and (num := len(read_texts(self.prompts))) < self.num_fresh:
            raise ValueError(
                f"prompts: {num} texts, with ways that remember answers; allowed: {self.num_fresh} or more"
            )
        return self

    def effective(self) -> WeightsSettings:
        """With what --quick stands for, and the ways that the file has."""
        own: tuple[Way, ...] = ("plain", "draft" if self.has_draft else "self:int4")
        if len(read_texts(self.prompts)) >= self.num_fresh:
            own = (*own, "suffix")
        kinds: tuple[GgufKind, ...] = () if self.gguf else ("Q8_0", "Q4_0", "Q4_K_M")
        filled = self.filled(QUICK) if self.quick else self
        return filled.model_copy(update={"ways": self.ways or own, "kinds": self.kinds or kinds})

    @property
    def num_fresh(self) -> int:
        """Prompts of which none comes twice to one way and cell."""
        return max(self.batches) * (self.repeats + 1)

    @property
    def has_draft(self) -> bool:
        """Whether a draft model goes with the file."""
        return self.gguf is None or self.draft is not None


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench weights") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(WeightsSettings, argv, prog, DESCRIPTION).effective()

    def work() -> None:
        result = run(settings)
        settings.finish(result, render(result))

    return report_failures(prog, work)


def run(settings: WeightsSettings) -> Json:
    """Every cell of every file."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="outrider-weights-")))
        folders, pair = settings.expanded(settings.gguf is None, stack)
        target = folders.target if settings.gguf is None else settings.gguf
        tokenizer = load_tokenizer(locate(target), "--gguf")
        num = min(settings.num_fresh, len(read_texts(settings.prompts)))
        prompts = read_prompts(tokenizer, settings.prompts, max(num, *settings.batches))[:num]
        setup = {
            "pair": pair if settings.gguf is None else settings.gguf.name, "k": settings.num_draft_tokens,
            "max_tokens": settings.max_tokens, "prompt_tokens": len(prompts[0]), "repeats": settings.repeats,
            "seed": settings.seed,
        }  # fmt: skip
        result = new_result(setup) | {"blocks": []}
        for kind in settings.kinds or (AS_IT_IS,):
            path = target if kind == AS_IT_IS else quantized(settings, target, folder / f"{kind}.gguf", kind)
            with ExitStack() as workers:
                backends = list(start_ways(workers, settings, path, folders.draft))
                for cell in [Cell(batch, each) for batch in settings.batches for each in settings.temperatures]:
                    note(title({"weights": kind} | asdict(cell)))
                    fitting = [backend for backend in backends if backend.fits(cell)]
                    result["blocks"].append({"weights": kind} | measure(settings, cell, fitting, prompts))
    return result


def quantized(settings: WeightsSettings, source: Path, path: Path, kind: str) -> Path:
    """The file in another kind, written by llama.cpp. Raises ValueError with what it said."""
    note(f"{kind}: llama.cpp writes the file ...")
    script = Path(__file__).with_name("peers_llama.py")
    command = [str(settings.llama_python), str(script), kind, str(source), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"llama.cpp wrote no {kind}: {done.stderr.strip()[-400:]}")
    return path


def start_ways(stack: ExitStack, settings: WeightsSettings, path: Path, draft: Path) -> Iterator[BenchBackend]:
    """Theirs plain and, with a draft model, speculative; ours."""
    k, script = str(settings.num_draft_tokens), Path(__file__).with_name("peers.py")
    for mode in ("plain", "draft") if settings.has_draft else ("plain",):
        command = [
            str(settings.llama_python), str(script), "llama.cpp", mode, str(path), str(draft), str(usable_cores()), k
        ]  # fmt: skip
        worker = stack.enter_context(BenchWorker("llama.cpp", command, pauses=True))
        worker.wait(PEER_START_S)
        yield WorkerBackend(f"llama.cpp {mode}", worker, mode, worker.ready["max_batch"])
    for way in settings.ways:
        command = [sys.executable, "-m", "outrider.bench.weights_worker", way, str(path), str(draft), k]
        worker = stack.enter_context(BenchWorker(way, command, pauses=True))
        worker.wait(PEER_START_S)
        yield WorkerBackend(f"outrider {way}", worker, way)


def measure(
    settings: WeightsSettings, cell: Cell, backends: Sequence[BenchBackend], prompts: Sequence[Sequence[int]]
) -> Json:
    """All repeats of a cell, each on prompts of its own where there are so many; ratios repeat by repeat."""
    foreign, calls = ForeignLoad(), Counter[str]()

    def decode(backend: BenchBackend, seed: int) -> Run:
        first = calls[backend.name] * cell.batch
        calls[backend.name] += 1
        own = [prompts[at % len(prompts)] for at in range(first, first + cell.batch)]
        return backend.decode(cell, own, settings.max_tokens, seed)

    runs = alternate(backends, decode, settings.repeats, settings.seed)
    speeds = {name: [each.tokens_per_s for each in own] for name, own in runs.items()}
    ratios = {
        f"{mine} / {other}": spread([ours / theirs for ours, theirs in zip(speeds[mine], speeds[other], strict=True)])
        for mine in speeds
        for other in speeds
        if mine.startswith("outrider") and mine != other and (other == PLAIN or not other.startswith("outrider"))
    }
    ways = {name: {"tokens_per_s": spread(own)} for name, own in speeds.items()}
    return asdict(cell) | {"foreign_cpus": foreign.cpus(), "ways": ways, "ratios": ratios}


def render(result: Json) -> Iterator[str]:
    """All blocks; numbers are medians, with least and greatest in brackets."""
    yield where(result)
    for block in result["blocks"]:
        yield ""
        yield f"{block['weights']}, {title(block)}"
        yield from align([(name, bracketed(way["tokens_per_s"], 1)) for name, way in block["ways"].items()])
        yield from align([(name, bracketed(ratio, 2)) for name, ratio in block["ratios"].items()])
