"""Real targets in this process, behind one gateway's peers: full ones, one that dies, and one model after another.
Every completion is the greedy one of the model that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.engines import hf_greedy
from support.fakes import read_slowly, until
from support.models import save_tiny, tiny_hf_model

from outrider.gateway.peers.remote import RemoteTargets
from outrider.rpc.errors import ResourceExhausted
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.target_service.boot import TargetService, build, load
from outrider.target_service.settings import TargetSettings

PROMPT = tuple(range(3, 30))
LONG, SHORT = 120, 12
SHAPES = {"old": {}, "new": {"num_hidden_layers": 1}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny(tmp_path_factory.mktemp(name), **shape) for name, shape in SHAPES.items()}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    return {name: hf_greedy(tiny_hf_model(**shape), PROMPT, LONG) for name, shape in SHAPES.items()}  # type: ignore[arg-type]


@asynccontextmanager
async def target(folder: Path, listen: str = "127.0.0.1:0") -> AsyncIterator[TargetService]:
    """A target that holds one sequence at a time."""
    settings = TargetSettings(
        model=folder, listen=listen, num_blocks=32, threads=1, batch_invariant=True, max_sequences=1, name=folder.name
    )
    running = build(settings, load(settings))
    await running.server.start()
    try:
        yield running
    finally:
        await running.stop()


async def test_targets_that_are_full_die_and_change(folders: dict[str, Path], greedy: dict[str, list[int]]) -> None:
    async with AsyncExitStack() as first, AsyncExitStack() as second, AsyncExitStack() as targets_stack:
        stacks = [first, second]
        services = [await stack.enter_async_context(target(folders["old"])) for stack in stacks]
        places = [service.server.address for service in services]
        targets = await targets_stack.enter_async_context(RemoteTargets(places))
        await until(lambda: all(replica.usable for replica in targets.replicas))
        old = targets.info.model

        read_on = asyncio.Event()  # until then a client leaves unread what has come

        async def collect(count: int) -> list[int]:
            sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            request = Open(0, PROMPT, sampling, model_digest=targets.info.model.digest)
            return await read_slowly(targets, request, read_on)

        running = [asyncio.create_task(collect(LONG)) for _ in range(2)]
        await until(lambda: all(replica.num_sequences == 1 for replica in targets.replicas))
        with pytest.raises(ResourceExhausted, match="1 sequences are open") as refused:
            await collect(SHORT)
        assert refused.value.retry_after_ms == 1000

        await first.aclose()  # its sequence waits for room at the other
        await first.enter_async_context(target(folders["new"], places[0]))
        read_on.set()
        assert await asyncio.gather(*running) == [greedy["old"]] * 2
        await until(lambda: all(replica.usable for replica in targets.replicas))
        assert targets.info.model == old  # half is not more than half
        assert await collect(SHORT) == greedy["old"][:SHORT]

        await second.aclose()
        await until(lambda: targets.info.model.digest != old.digest)
        assert await collect(SHORT) == greedy["new"][:SHORT] != greedy["old"][:SHORT]
