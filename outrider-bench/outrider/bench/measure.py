"""One run of one way of decoding, and the ways: through our gateway, or through a peer's worker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.bench.harness import BenchWorker
from outrider.bench.results import note
from outrider.client import Client, SpeculationStats
from outrider.rpc.words.sampling_params import AcceptanceRule

REQUEST_S = 600.0


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
    """Through a process that answers questions (see worker)."""

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
