"""`outrider bench serve`: loads a server and says what its clients saw."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outrider.bench.command import report_failures
from outrider.bench.figures import MISSING, can_draw, draw_load, write_figure
from outrider.bench.load.clients import GrpcClient, HttpClient
from outrider.bench.load.report import render, summarise, times_ms
from outrider.bench.load.requests import (
    BenchRequest,
    BenchServeSettings,
    Record,
    Tick,
    closed_loop,
    measure,
    open_loop,
)
from outrider.bench.prompts import choose, read_texts
from outrider.bench.results import dump
from outrider.cli.arguments import of_gateway, parse

DESCRIPTION = (
    "Load a server, an OpenAI-compatible one with --base-url or a gateway over gRPC with --gateway, and measure what "
    "its clients see: time to first token, inter-token latency, end-to-end latency, throughput, acceptance, and with "
    "--slo-ttft-ms or --slo-itl-ms goodput, the requests a second that meet them. With --rate requests arrive by a "
    "Poisson process (an open loop: times count from the arrival), with --concurrency each of so many clients sends "
    "one after another (a closed loop). A delivery may bring several tokens: inter-token latency is the time between "
    "deliveries, time per output token is spread over their tokens."
)
SHORT = {"--json": "--json-file"}


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench serve") -> int:
    """Loads, prints and writes; 1 if the server cannot be used, or no request succeeds."""
    arguments = _spell_out(sys.argv[1:] if argv is None else argv)
    settings = parse(BenchServeSettings, arguments, prog, DESCRIPTION)

    def work() -> int:
        if settings.plot is not None and not can_draw():
            raise ValueError(f"--plot: {MISSING}")
        for path in filter(None, (settings.json_file, settings.plot)):
            path.touch()  # to know before the load, not after it
        server, records = asyncio.run(_run(settings))
        return _finish(settings, server, records)

    return report_failures(prog, work, lambda error: of_gateway(error, settings.gateway))


async def _run(settings: BenchServeSettings) -> tuple[str, list[Record]]:
    """What was loaded, and what was seen."""
    texts = read_texts(settings.prompts)
    load_client = HttpClient(settings) if settings.base_url else GrpcClient(settings)
    try:
        name = await load_client.describe()
        requests = [
            _ask(settings, index, text) for index, text in enumerate(choose(texts, settings.requests, settings.seed))
        ]
        for index in range(settings.warmup):
            record = await measure(
                load_client, requests[index % len(requests)], Record(index, 0.0), settings.timeout, _ignore
            )
            if record.error:
                raise ValueError(f"a request to warm up failed: {record.error}")
        with _progress(settings) as tick:
            if settings.rate is not None:
                return name, await open_loop(
                    load_client, requests, settings.rate, settings.seed, settings.timeout, tick
                )
            return name, await closed_loop(load_client, requests, settings.num_at_once, settings.timeout, tick)
    finally:
        await load_client.close()


def _finish(settings: BenchServeSettings, server: str, records: Sequence[Record]) -> int:
    """Prints, and writes what is to be written."""
    result = summarise(settings, server, records)
    print("\n".join(render(result)))
    if settings.json_file is not None:
        settings.json_file.write_text(dump(result), encoding="utf-8")
    if settings.plot is not None:
        done = [record for record in records if not record.error]
        write_figure(settings.plot, lambda: draw_load(result, times_ms(done)))
    return 0 if result["completed"] else 1


def _ask(settings: BenchServeSettings, index: int, text: str) -> BenchRequest:
    return BenchRequest(
        prompt=text,
        chat=settings.chat,
        max_tokens=settings.max_tokens,
        ignore_eos=settings.ignore_eos,
        temperature=settings.temperature,
        seed=settings.seed + index,
    )


@contextmanager
def _progress(settings: BenchServeSettings) -> Iterator[Tick]:
    """A bar on a terminal's standard error, else one line there."""
    if not sys.stderr.isatty():
        print(f"{settings.requests} requests to {settings.place}, {settings.loop} ...", file=sys.stderr, flush=True)
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        task = progress.add_task(settings.loop, total=settings.requests)
        yield lambda record: progress.advance(task)


def _ignore(record: Record) -> None:
    """Nobody watches."""


def _spell_out(argv: Sequence[str]) -> list[str]:
    """--json is short for --json-file: a field of that name would hide pydantic's own."""
    short, whole = "--json", "--json-file"
    return [whole + arg[len(short) :] if arg == short or arg.startswith(f"{short}=") else arg for arg in argv]


if __name__ == "__main__":
    sys.exit(main())
