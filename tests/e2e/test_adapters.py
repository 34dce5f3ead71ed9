"""Adapters through the three services: real targets and a real draft behind a gateway. What comes is what plain
decoding with the adapter says, whatever drafts, dies or is unloaded meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.adapters import merged, save_adapter
from support.engines import hf_greedy
from support.fakes import until
from support.models import save_tiny, tiny_hf_model, tiny_state, train_byte_level

from outrider.draft_service.boot import start as start_draft
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets, load_adapter, unload_adapter
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.channel import connect
from outrider.rpc.errors import NotFound
from outrider.rpc.words.answer import GenerationDelta, SpeculationStats
from outrider.rpc.words.request import GenerationRequest, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.boot import TargetService, build, load
from outrider.target_service.settings import TargetSettings

VOCAB = 300
TINY: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": None}
PROMPT = tuple(range(3, 40))
SHORT, LONG = 64, 400  # a slow reader is granted less than the latter
K = 4


@dataclass(frozen=True)
class Models:
    """A checkpoint that serves as target and draft alike, so that drafts hold; adapters of it by name, and what greedy
    decoding says with each ("": without)."""

    folder: Path
    adapters: dict[str, Path]
    greedy: dict[str, list[int]]
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder, hf = save_tiny(tmp_path_factory.mktemp("model"), **TINY), tiny_hf_model(**TINY)
    train_byte_level(VOCAB).save(str(folder / "tokenizer.json"))
    adapters, greedy, state = {}, {"": hf_greedy(hf, PROMPT, SHORT)}, tiny_state(hf)
    for seed, name in enumerate(("sql", "law", "other sql")):
        adapters[name] = save_adapter(tmp_path_factory.mktemp("adapters") / f"{seed}", state, seed=seed)
        whole = tiny_hf_model(**TINY)
        whole.load_state_dict(merged(state, adapters[name]), strict=False)
        greedy[name] = hf_greedy(whole, PROMPT, SHORT)
    assert len(set(map(tuple, greedy.values()))) == 4
    return Models(folder, adapters, greedy, Tokenizer.load(folder))


@asynccontextmanager
async def target(models: Models, listen: str = "127.0.0.1:0", **adapters: str) -> AsyncIterator[TargetService]:
    """One that has adapters by these names; adapters may come and go."""
    settings = TargetSettings(
        model=models.folder, listen=listen, num_blocks=160, threads=1, batch_invariant=True,
        adapter=[f"{name}={models.adapters[one]}" for name, one in adapters.items()], allow_adapter_changes=True,
        max_adapters=2,
    )  # fmt: skip
    running = build(settings, load(settings))
    await running.server.start()
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def draft(models: Models, **adapters: str) -> AsyncIterator[RemoteDrafts]:
    flags = [f"{name}={models.adapters[one]}" for name, one in adapters.items()]
    settings = DraftSettings(model=models.folder, listen="127.0.0.1:0", num_blocks=160, threads=1, draft_adapter=flags)
    service = await start_draft(settings)
    await service.server.start()
    try:
        async with RemoteDrafts([service.server.address]) as drafts:
            await drafts.wait_usable()
            yield drafts
    finally:
        await service.stop()


@asynccontextmanager
async def targets_at(*services: TargetService) -> AsyncIterator[RemoteTargets]:
    async with RemoteTargets([service.server.address for service in services]) as targets:
        await until(lambda: all(replica.usable for replica in targets.replicas))
        yield targets


def asking(adapter: str, temperature: float = 0.0, num_tokens: int = SHORT, **speculation: Any) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=7)
    options = SpeculationOptions(acceptance=AcceptanceRule.COUPLED, **speculation)
    return GenerationRequest(token_ids=PROMPT, sampling=sampling, adapter=adapter, speculation=options)


async def answer(engine: GenerationEngine, asked: GenerationRequest) -> list[GenerationDelta]:
    return [delta async for delta in engine.generate(asked)]


def ids_of(deltas: Sequence[GenerationDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def tally_of(deltas: Sequence[GenerationDelta]) -> SpeculationStats:
    tally = deltas[-1].speculation
    assert tally is not None
    return tally


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
async def test_drafts_change_no_token(models: Models, temperature: float) -> None:
    """Of requests with several adapters and none, at once; more adapters than one step takes. A draft that has an
    adapter of its own is right as often as for the model alone."""
    names = ("", "sql", "law", "other sql")
    config = EngineConfig(num_draft_tokens=K, draft_patience_ms=60_000)
    async with (
        target(models, **{name: name for name in names[1:]}) as service,
        targets_at(service) as targets,
        draft(models, law="law") as drafts,
    ):
        plain = GenerationEngine(models.tokenizer, targets, None, config)
        wanted = [ids_of(await answer(plain, asking(name, temperature))) for name in names]
        assert len(set(map(tuple, wanted))) == 4
        if not temperature:
            assert wanted == [models.greedy[name] for name in names]
        engine = GenerationEngine(models.tokenizer, targets, drafts, config)
        for mode in ("sequential", "chains", "branches"):
            asked = [asking(name, temperature, mode=mode) for name in names]
            answers = await asyncio.gather(*(answer(engine, one) for one in asked))
            assert list(map(ids_of, answers)) == wanted, mode
            shares = [tally_of(deltas).num_accepted_tokens / tally_of(deltas).num_draft_tokens for deltas in answers]
            if mode == "sequential":
                assert shares[0] > 0.95 and shares[2] > 0.95 and max(shares[1], shares[3]) < 0.7, shares
            digests = [deltas[0].model_digest for deltas in answers]
            assert digests == [targets.info.digest_of(name) for name in names] and len(set(digests)) == 4


async def test_no_prefix_is_shared_between_adapters(models: Models) -> None:
    async with target(models, sql="sql", law="law") as service, targets_at(service) as targets:
        engine, cached = GenerationEngine(models.tokenizer, targets), []
        for name in ("sql", "", "law", "sql", "", "law"):
            usage = (await answer(engine, asking(name, num_tokens=2)))[-1].usage
            assert usage is not None
            cached.append(usage.cached_tokens)
    assert cached == [0, 0, 0, 32, 32, 32]


class Slow:
    """A reader that has taken some tokens, and reads on when it is told."""

    def __init__(self, engine: GenerationEngine, asked: GenerationRequest) -> None:
        self.deltas: list[GenerationDelta] = []
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine, asked))

    async def _read(self, engine: GenerationEngine, asked: GenerationRequest) -> None:
        async for delta in engine.generate(asked):
            self.deltas.append(delta)
            if len(ids_of(self.deltas)) > 8:
                await self._go.wait()

    async def begun(self) -> None:
        await until(lambda: len(ids_of(self.deltas)) > 8 or self.task.done())

    async def rest(self) -> list[int]:
        self._go.set()
        await asyncio.wait_for(self.task, 120)
        return ids_of(self.deltas)


async def test_a_target_that_dies_is_replaced_by_one_of_the_same_content(models: Models) -> None:
    """By none that has other weights by the name, nor by one without; one that loads them later will do."""
    async with AsyncExitStack() as stack, AsyncExitStack() as first:
        dying = await first.enter_async_context(target(models, sql="sql"))
        places = [await stack.enter_async_context(target(models, **has)) for has in ({"sql": "other sql"}, {})]
        targets = await stack.enter_async_context(targets_at(dying, *places))
        engine = GenerationEngine(models.tokenizer, targets)
        assert targets.info.digest_of("sql") == targets.replicas[0].info.digest_of("sql")  # type: ignore[union-attr]
        streams = [Slow(engine, asking("sql", temperature, LONG)) for temperature in (0.0, 1.0)]
        plain = [ids_of(await answer(engine, asking("sql", temperature, LONG))) for temperature in (0.0, 1.0)]
        for stream in streams:
            await stream.begun()
        assert targets.replicas[0].num_sequences == 2, "neither is at its end"
        await first.aclose()
        await until(lambda: not targets.replicas[0].usable)
        await until(lambda: targets.info.digest_of("sql") == targets.replicas[1].info.digest_of("sql"))  # type: ignore[union-attr]
        assert ids_of(await answer(engine, asking("sql"))) == models.greedy["other sql"], "what is new gets the other"
        assert [replica.num_sequences for replica in targets.replicas[1:]] == [0, 0]
        async with connect(places[1].server.address) as channel:
            loaded = await load_adapter(channel, "sql", str(models.adapters["sql"]))
        assert [await stream.rest() for stream in streams] == plain and plain[0][:SHORT] == models.greedy["sql"]
        assert {delta.model_digest for delta in streams[0].deltas if delta.model_digest} == {loaded.digest}


async def test_an_adapter_is_unloaded_under_load(models: Models) -> None:
    """What runs goes on with it; what is new is refused by name, and gets other weights once they have the name."""
    async with (
        target(models, sql="sql", law="law") as service,
        targets_at(service) as targets,
        draft(models) as drafts,
        connect(service.server.address) as channel,
    ):
        engine = GenerationEngine(models.tokenizer, targets, drafts, EngineConfig(num_draft_tokens=K))
        asked = [asking(name, 0.0, LONG) for name in ("sql", "sql", "law", "")]
        plain = GenerationEngine(models.tokenizer, targets)
        wanted = [ids_of(await answer(plain, one)) for one in asked[1:]]
        streams = [Slow(engine, one) for one in asked]
        for stream in streams:
            await stream.begun()
        assert await unload_adapter(channel, "sql") == 2, "neither is at its end"
        await until(lambda: targets.info.digest_of("sql") is None)
        with pytest.raises(NotFound, match="adapter: is 'sql', which does not exist; served here: 'law'"):
            await answer(engine, asking("sql"))
        await load_adapter(channel, "sql", str(models.adapters["other sql"]))
        await until(lambda: targets.info.digest_of("sql") is not None)
        assert ids_of(await answer(engine, asking("sql"))) == models.greedy["other sql"]
        assert [await stream.rest() for stream in streams] == [wanted[0], *wanted]
        with pytest.raises(NotFound, match="name: is 'none'; allowed: law, sql"):
            await unload_adapter(channel, "none")
