"""One run of one way of decoding, and the ways: through our gateway, or through a peer's worker. Where a round's time
goes is measured by the gateway's own loop, driven in this process, so that every round is at hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from outrider.bench.processes import ServiceAddresses
from outrider.bench.worker import BenchWorker
from outrider.client import Client, SpeculationStats
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

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
            token_ids=ids,
            timeout=REQUEST_S,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            seed=seed,
            ignore_eos=True,
            speculate=self.num_draft_tokens > 0,
            num_draft_tokens=self.num_draft_tokens if self.num_draft_tokens and self.mode != "auto" else None,
            acceptance=self.acceptance,
            mode=self.mode,
        ):
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
        question = {
            "mode": self.mode,
            "prompts": [list(ids) for ids in prompts],
            "max_tokens": max_tokens,
            "temperature": cell.temperature,
            "seed": seed,
        }
        answer = self.worker.ask(question)
        return Run(answer["seconds"], answer["num_tokens"])


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


START_S = 30.0


async def measure_rounds(
    addresses: ServiceAddresses,
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    acceptance: AcceptanceRule,
    max_tokens: int,
    seeds: Sequence[int],
) -> dict[str, float]:
    """Medians of a round's parts, in milliseconds, and of the rows of its step: a batch for each seed. `gateway` is
    this process's computing time a round, and is taken from the wire's."""
    rounds: list[Round] = []
    computing_s = 0.0
    sampling = SamplingParams(temperature=cell.temperature, max_tokens=max_tokens, ignore_eos=True)
    for seed in seeds:
        opens = [
            Open(0, tuple(ids), sampling, acceptance=acceptance, seed=seed * 1000 + index)
            for index, ids in enumerate(prompts)
        ]
        found, seconds = await _drive(addresses, opens, policy)
        rounds += found
        computing_s += seconds
    return summarise(rounds, computing_s * 1e3 / max(1, len(rounds)))


def summarise(rounds: Sequence[Round], gateway_ms: float) -> dict[str, float]:
    """Medians over rounds with a draft that are not a stream's first (or over all of plain decoding)."""
    later = [closed for closed in rounds if closed.index > 0]
    counted = [closed for closed in later if closed.commit.num_drafted] or later
    if not counted:
        return {}
    microseconds = {
        "total": median(closed.total_us for closed in counted),
        "draft": median(closed.draft_us for closed in counted),
        "wire": median(closed.wire_us for closed in counted),
        "queue": median(closed.commit.timings.queue_us for closed in counted),
        "verify": median(closed.commit.timings.verify_us for closed in counted),
        "sample": median(closed.commit.timings.sample_us for closed in counted),
    }
    parts = {name: value / 1e3 for name, value in microseconds.items()}
    parts["gateway"] = gateway_ms
    parts["wire"] = max(0.0, parts["wire"] - gateway_ms)
    parts["rows"] = median(closed.commit.timings.num_rows for closed in counted)
    return parts


async def _drive(addresses: ServiceAddresses, opens: Sequence[Open], policy: Policy) -> tuple[list[Round], float]:
    """All rounds of all streams, and this process's computing time in seconds."""
    async with RemoteTargets([addresses.target]) as targets, RemoteDrafts([addresses.draft]) as drafts:
        async with asyncio.timeout(START_S):
            await asyncio.gather(targets.wait_usable(), drafts.wait_usable())
        started = time.process_time()
        streams = await asyncio.gather(*(_rounds(drafts, targets, request, policy) for request in opens))
        rounds = [closed for stream in streams for closed in stream]
        return rounds, time.process_time() - started


async def _rounds(drafts: RemoteDrafts, targets: RemoteTargets, request: Open, policy: Policy) -> list[Round]:
    return [item async for item in speculate(drafts, targets, request, policy) if isinstance(item, Round)]
