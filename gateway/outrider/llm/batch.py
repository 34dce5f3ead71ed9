"""Runs the requests of one call together, and tells of each as it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.generation import GenerationDelta, GenerationRequest, SpeculationOptions
from outrider.gateway.tokenizer import Tokenizer
from outrider.llm.metrics import Statistics
from outrider.llm.outputs import OutputBuilder
from outrider.wire.messages import ModelInfo


class Backend(Protocol):
    """What an LLM asks: its own engines, or a gateway."""

    @property
    def info(self) -> ModelInfo:
        """The target's model."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where only the gateway has one."""

    @property
    def num_draft_tokens(self) -> int:
        """k where a request says none."""

    @property
    def speculation(self) -> SpeculationOptions:
        """What every request says of speculation."""

    def encode(self, text: str) -> tuple[int, ...] | None:
        """A prompt's ids; None where the gateway makes them."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Called on the loop."""

    def cache_usage(self) -> float | None:
        """The share of the key-value cache in use, where it is known."""

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""

    def close(self) -> None:
        """Ends everything; from any thread."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a call."""

    request: GenerationRequest
    builder: OutputBuilder


async def run_jobs(backend: Backend, jobs: Sequence[Job], statistics: Statistics, put: Callable[[Job], None]) -> None:
    """Starts all jobs, the lowest priority number first; the first error ends them all."""
    statistics.num_unfinished += sum(job.request.n for job in jobs)
    ordered = sorted(jobs, key=lambda job: job.request.priority)
    tasks = [asyncio.create_task(_run(backend, job, statistics, put)) for job in ordered]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        statistics.num_unfinished -= sum(not c.finished() for job in jobs for c in job.builder.output.outputs)


async def _run(backend: Backend, job: Job, statistics: Statistics, put: Callable[[Job], None]) -> None:
    watch = statistics.watch()
    async with aclosing(backend.generate(job.request)) as deltas:
        async for delta in deltas:
            watch.add(delta)
            job.builder.add(delta)
    put(job)
