"""The ways of decoding that the network bench compares, each as one run of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from outrider.commands.bench_network_rounds import Digest, digest
from outrider.commands.bench_worker import Worker
from outrider.gateway.backends import Drafter, DrafterLink, Lost
from outrider.gateway.generation import GenerationRequest, SpeculationOptions
from outrider.gateway.rounds import Round
from outrider.gateway.service import GenerationEngine
from outrider.wire.messages import DraftEvent, DraftInfo, Open, Piece
from outrider.wire.sampling import SamplingParams

PLAIN, SEQUENTIAL, CHAINS, BRANCHES, AUTO = "plain", "sequential", "chains", "branches", "auto"
COLOCATED, COLOCATED_ALL = "colocated", "colocated-all"  # on the target's cores; on the draft's too
SERVICES = (PLAIN, SEQUENTIAL, CHAINS, BRANCHES, AUTO)
OnRound = Callable[[Round], None]


@dataclass(frozen=True, slots=True)
class Batch:
    """What is decoded in one run."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    num_draft_tokens: int


class Way(Protocol):
    """A way of decoding."""

    async def run(self, batch: Batch) -> Digest:
        """Decodes every prompt at once."""


@dataclass(frozen=True, slots=True)
class ServicesWay:
    """Through the gateway's engine and both services."""

    engine: GenerationEngine
    watcher: BranchWatcher
    mode: str

    async def run(self, batch: Batch) -> Digest:
        """All completions at once."""
        self.watcher.begun.clear()
        streams = await asyncio.gather(*(self.stream(batch, index) for index in range(len(batch.prompts))))
        ahead = self.mode not in (PLAIN, SEQUENTIAL)
        return digest(streams, [self.watcher.begun.get(seed, set()) for seed in batch.seeds] if ahead else ())

    async def stream(self, batch: Batch, index: int, on_round: OnRound = lambda closed: None) -> list[Round]:
        """One completion's rounds. `auto` chooses the number of drafted tokens, too."""
        k = None if self.mode == AUTO else batch.num_draft_tokens
        speculation = SpeculationOptions(num_draft_tokens=k, mode=self.mode)
        request = GenerationRequest(
            token_ids=batch.prompts[index],
            sampling=sampling_of(batch, index),
            speculation=SpeculationOptions(enabled=False) if self.mode == PLAIN else speculation,
        )
        rounds: list[Round] = []
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                if delta.round is not None:
                    rounds.append(delta.round)
                    on_round(delta.round)
        return rounds


@dataclass(frozen=True, slots=True)
class ColocatedWay:
    """In one process, in turn."""

    worker: Worker
    pass_ms: float

    async def run(self, batch: Batch) -> Digest:
        """One question, one answer."""
        question = {
            "prompts": batch.prompts,
            "seeds": batch.seeds,
            "sampling": {name: value for name, value in asdict(batch.sampling).items() if name in CROSSING},
            "k": batch.num_draft_tokens,
            "pass_ms": self.pass_ms,
        }
        return Digest(**await asyncio.to_thread(self.worker.ask, question))


CROSSING = ("temperature", "max_tokens", "ignore_eos")  # of the sampling parameters


def sampling_of(batch: Batch, index: int) -> SamplingParams:
    """A stream's own parameters."""
    fields: dict[str, Any] = {name: getattr(batch.sampling, name) for name in CROSSING}
    return SamplingParams(**fields, seed=batch.seeds[index])


@dataclass(slots=True)
class BranchWatcher:
    """A Drafter that notes which chains began as branches, by the seeds of the requests."""

    drafter: Drafter
    begun: dict[int, set[int]] = field(default_factory=dict)

    @property
    def info(self) -> DraftInfo | None:
        """The draft's own."""
        return self.drafter.info

    @property
    def round_trip_us(self) -> float:
        """The draft's own."""
        return self.drafter.round_trip_us

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Listens in."""
        begun = self.begun.setdefault(request.seed, set())

        def listen(event: DraftEvent | Lost) -> None:
            if isinstance(event, Piece) and event.parent is not None:
                begun.add(event.chain)
            on_event(event)

        return self.drafter.open(request, listen)


def batch_of(
    prompts: Sequence[Sequence[int]], streams: int, temperature: float, max_tokens: int, k: int, seed: int
) -> Batch:
    """Prompts are used again where there are more streams."""
    return Batch(
        prompts=tuple(tuple(prompts[index % len(prompts)]) for index in range(streams)),
        seeds=tuple(seed * 1000 + index for index in range(streams)),
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True),
        num_draft_tokens=k,
    )
