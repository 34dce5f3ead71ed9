"""What serves rows: an `LLM` in this process with its gateway's HTTP before it, whose target tells what it judged."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import httpx
from lossless.composition.checkpoints import Checkpoints
from lossless.composition.replay import Judged
from pytest import MonkeyPatch

from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.http.server import build_app
from outrider.llm import LLM
from outrider.target_service.outputs import ComputedStep

ROUNDINGS = {"16 bits": None, "8 bits": "int8", "4 bits": "int4"}  # of a checkpoint in bfloat16
ROWS = {"at once": 512, "in chunks": 24}  # of a step
BLOCKS = {"enough": 600, "too few": 32}
NAME = "tiny"
T = TypeVar("T")


@dataclass
class Server:
    """One of them. Everything is asked on the gateway's own loop."""

    llm: LLM
    judged: list[Judged]
    num_preempted: int = 0
    judges_again: ClassVar[bool] = True  # what was judged by rejection can be
    couples: ClassVar[bool] = True

    @property
    def backend(self) -> Any:
        return self.llm._backend

    @property
    def engine(self) -> Any:
        return self.backend.target.engine

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end."""
        return self.llm._runtime.run(work)

    def client(self) -> httpx.AsyncClient:
        app = build_app(self.backend.engine, options=HttpOptions())
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny", timeout=None)

    async def left_over(self) -> list[str]:
        """What is held though nothing runs; what ends a moment later is waited for."""
        found: list[str] = []
        for _ in range(200):
            found = list(self._held())
            if not found:
                break
            await asyncio.sleep(0.01)
        return found

    def _held(self) -> Iterator[str]:
        target, draft = self.backend.target, getattr(self.backend.draft, "service", None)
        pool = self.engine.cache.pool
        if self.backend.engine.admission.num_active:
            yield f"{self.backend.engine.admission.num_active} requests are admitted"
        if self.engine.scheduler.sequences or target._links:
            yield f"the target holds {len(self.engine.scheduler.sequences)} sequences, {len(target._links)} links"
        if pool.num_free != pool.num_blocks:
            yield f"{pool.num_blocks - pool.num_free} blocks of the target's are taken"
        if draft is not None and draft._links:
            yield f"the draft holds {len(draft._links)} sequences"


@contextmanager
def _kernels(which: str) -> Iterator[None]:
    """What is computed meanwhile, is so by the C kernels, or as where there are none."""
    with MonkeyPatch.context() as patch:
        if which == "PyTorch":
            patch.setattr("outrider.kernels.cpu.library._loaded", lambda: None)
        yield


@contextmanager
def serving(checkpoints: Checkpoints, server: Sequence[str]) -> Iterator[Server]:
    """Starts what `Row.server` says."""
    model, method, weights, kernels, prompt, blocks = server
    folders = checkpoints.of(model)
    with (
        _kernels(kernels),
        LLM(
            folders.target,
            speculative_config=folders.speculative_config(method),  # type: ignore[arg-type]
            served_model_name=NAME,
            enable_lora=True,
            max_loras=2,
            max_num_batched_tokens=ROWS[prompt],
            num_gpu_blocks_override=BLOCKS[blocks],
            max_model_len=480,
            batch_invariant=kernels == "PyTorch",
            threads=1,
            quantization=ROUNDINGS[weights],
        ) as llm,
    ):
        made = Server(llm, [])
        engine, backend = made.engine, made.backend
        llm._runtime.run(backend.target.load_adapter("one", folders.adapter))

        def keep(step: ComputedStep) -> None:
            made.judged.extend(Judged.of(verified) for verified in step.verified)
            made.num_preempted = engine.scheduler.num_preempted

        engine._on_step = keep
        yield made
