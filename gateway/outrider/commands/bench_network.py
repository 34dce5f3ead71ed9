"""`outrider bench network`: what the way between the services costs, over delays, modes and costs of the draft."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from outrider.commands.arguments import parse
from outrider.commands.awake import CoresAwake
from outrider.commands.bench_machine import describe, share_cores
from outrider.commands.bench_network_aims import judge
from outrider.commands.bench_network_block import LOOPBACK, Block, measure_block
from outrider.commands.bench_network_fleet import NetworkFleet, Setup, start_network_fleet
from outrider.commands.bench_network_kill import measure_kills
from outrider.commands.bench_network_link import Network
from outrider.commands.bench_network_plot import draw
from outrider.commands.bench_network_run import SERVICES
from outrider.commands.bench_network_settings import NetworkSettings
from outrider.commands.bench_network_table import render
from outrider.commands.bench_prompts import PROMPTS, read_prompts
from outrider.commands.bench_result import Json, title
from outrider.commands.bench_store import dump, store
from outrider.commands.bench_worker import WorkerFailed
from outrider.commands.complaints import load_tokenizer
from outrider.commands.fleet import Folders
from outrider.commands.processes import ServiceFailed
from outrider.pairs import pair_path
from outrider.wire.errors import OutriderError
from outrider.wire.hub import locate

DESCRIPTION = (
    "Measure what the network between the services costs: time per token over delays, jitter and stalls between them, "
    "for each mode, beside plain decoding, co-located speculation and the closed forms."
)
MAX_TOKENS = 900  # of the completions in which a draft is killed
FAILURES = (ServiceFailed, WorkerFailed, OutriderError, OSError, ValueError)


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench network") -> int:
    """Measures, prints and stores; 1 if a process does not start or dies."""
    settings = parse(NetworkSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION).effective()
    logging.basicConfig(level=logging.ERROR)  # drafts that are killed are no news
    try:
        result = asyncio.run(_run(settings))
        print("\n".join(render(result)))
        if settings.output is not None:
            settings.output.write_text(dump(result), encoding="utf-8")
        if settings.store:
            print(f"\nstored in {store(settings.results, result, draw)}")
    except FAILURES as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


def blocks_of(settings: NetworkSettings) -> Iterator[Block]:
    """Every block; the one under load has a draft at its own cost, and no network."""
    networks = tuple(map(Network.parse, settings.networks))
    k, length = settings.num_draft_tokens, settings.max_tokens
    for streams in settings.streams:
        for temperature in settings.temperatures:
            for cost in settings.costs:
                yield Block(temperature, streams, cost, settings.modes, networks, k, length)
    if settings.load_streams:
        yield Block(settings.temperatures[0], settings.load_streams, 0.0, SERVICES, (LOOPBACK,), k, length)


async def _run(settings: NetworkSettings) -> Json:
    cores = share_cores()
    folders, pair = _folders(settings)
    prompts = read_prompts(load_tokenizer(folders.target, "--target"), None, len(PROMPTS))
    setup = Setup(folders, cores, settings.expand, settings.num_draft_tokens, settings.start_timeout)
    result: Json = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": (machine := asdict(describe())) | {"flags": list(machine["flags"])},
        "setup": {
            "pair": pair,
            "k": settings.num_draft_tokens,
            "max_tokens": settings.max_tokens,
            "repeats": settings.repeats,
            "seed": settings.seed,
            "cores_awake": settings.keep_awake,
        },
        "blocks": [],
        "kills": None,
    }
    with CoresAwake(settings.keep_awake):
        _note("starting the services ...")
        async with start_network_fleet(setup, settings.modes, map(Network.parse, settings.networks)) as fleet:
            await _measure(settings, fleet, prompts, result)
    result["aims"] = list(judge(result))
    return result


async def _measure(
    settings: NetworkSettings, fleet: NetworkFleet, prompts: Sequence[Sequence[int]], result: Json
) -> None:
    for block in blocks_of(settings):
        _note(f"{title({'batch': block.streams, 'temperature': block.temperature})}, draft cost {block.cost:g}")
        result["blocks"].append(await measure_block(fleet, block, prompts, settings.repeats, settings.seed, _note))
    if settings.kills:
        _note("drafts killed at random moments")
        length = min(2 * settings.max_tokens, MAX_TOKENS)
        result["kills"] = await measure_kills(fleet, prompts, settings.kills, length, settings.seed, _note)


def _folders(settings: NetworkSettings) -> tuple[Folders, str]:
    """The checkpoints, and what to call them."""
    of = "the expansion of " if settings.expand else ""
    if settings.target is not None and settings.draft is not None:
        folders = Folders(locate(settings.target), locate(settings.draft))
        return folders, f"{of}{settings.target.name} with {settings.draft.name}"
    pair = pair_path(settings.pair)
    return Folders(pair.target, pair.draft), f"{of}the embedded pair {settings.pair}"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
