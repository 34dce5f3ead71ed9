"""What a gateway does under more load than can be served: goodput beside the peak, and how fast the rest is refused.

    python -m outrider.bench.overload [--seconds 10] [--repeats 3] [--active 8] [--waiting 16] [--max-tokens 64]
        [--json FILE]

The embedded pair behind a gateway that lets `active` sequences run and `waiting` wait. As many clients as may run, each
of which asks again at once, show the peak and its rate of requests; then requests arrive by a Poisson process at that
rate, or at twice that rate. Goodput is the tokens of the requests that were answered whole between the first arrival
and the last, over that time. Each load stands between two peaks, whose mean it is compared with, since machines drift.
Prints a table in Markdown: the medians over the repeats, of the greatest times the greatest."""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
from collections.abc import Sequence
from pathlib import Path

from outrider.bench.load.clients import GrpcClient
from outrider.bench.load.requests import BenchRequest, BenchServeSettings, Record, closed_loop, open_loop
from outrider.bench.machine import describe
from outrider.bench.processes import start_target, wait_for_draft
from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, dump, markdown, new_result, percentile
from outrider.cli.local_services import LOOPBACK, Services
from outrider.pairs import pair_path

START_S, LIMIT_S = 120.0, 120.0
TRIAL = 3  # requests of each client, to know how many fill the time
LOADS = (1.0, 2.0)  # of the peak's rate of requests
REFUSED = "running and waiting"  # in the message of what is not let in
HEAD = ("load", "requests/s", "answered/s", "tokens/s", "of the peak", "refused", "refusal ms", "first token ms")


def requests(num: int, max_tokens: int, seed: int) -> list[BenchRequest]:
    """Of equal length, each with a seed of its own."""
    return [
        BenchRequest(PROMPTS[index % len(PROMPTS)], False, max_tokens, True, 1.0, seed + index) for index in range(num)
    ]


def figures(name: str, records: Sequence[Record], offered: float | None = None, peak: float | None = None) -> Json:
    """What became of one run of a load. Times are in milliseconds, as median, 99th percentile and greatest. Raises
    SystemExit for requests that failed and were not refused."""
    done = [record for record in records if not record.error]
    refused = [record for record in records if REFUSED in record.error]
    others = {record.error for record in records if record.error} - {record.error for record in refused}
    if others or not done:
        raise SystemExit(f"{name}: {', '.join(sorted(others)) or 'nothing was answered'}")
    last = max(record.sent for record in records)  # later there is less to do from one moment to the next
    seconds = last - min(record.due for record in records)
    whole = [record for record in done if record.ended <= last]
    tokens_per_s = sum(record.num_tokens for record in whole) / seconds
    return {
        "load": name,
        "offered_per_s": offered,
        "answered_per_s": len(whole) / seconds,
        "tokens_per_s": tokens_per_s,
        "of_peak": None if peak is None else tokens_per_s / peak,
        "refused_share": len(refused) / len(records),
        "refusal_ms": times_ms([record.ended - record.sent for record in refused]),
        "first_token_ms": times_ms([record.ttft for record in done if record.ttft is not None]),
        "most_late_ms": 1e3 * max(record.sent - record.due for record in records),
    }


def middle(runs: Sequence[Json]) -> Json:
    """Of the runs of one load: the median of each figure, of the greatest times the greatest."""
    found = dict(runs[0])
    for name, value in found.items():
        values = [run[name] for run in runs if run[name] or run[name] == 0.0]  # no run needs to have refused any
        if isinstance(value, list) and values:
            found[name] = [*(statistics.median(column) for column in list(zip(*values, strict=True))[:-1])]
            found[name].append(max(times[-1] for times in values))
        elif isinstance(value, float):
            found[name] = statistics.median(values)
    return found


def times_ms(seconds: Sequence[float]) -> list[float]:
    """Median, 99th percentile and greatest; empty of nothing."""
    ordered = sorted(1e3 * value for value in seconds)
    return [percentile(ordered, percent) for percent in (50, 99, 100)] if ordered else []


def row(found: Json) -> list[str]:
    """The same as a row of the table."""

    def times(name: str) -> str:
        return " / ".join(f"{value:.1f}" for value in found[name]) or "-"

    offered, share = found["offered_per_s"], found["of_peak"]
    return [
        found["load"],
        "-" if offered is None else f"{offered:.2f}",
        f"{found['answered_per_s']:.2f}",
        f"{found['tokens_per_s']:.1f}",
        "-" if share is None else f"{share:.3f}",
        f"{found['refused_share']:.1%}",
        times("refusal_ms"),
        times("first_token_ms"),
    ]


async def measure(address: str, active: int, seconds: float, repeats: int, max_tokens: int) -> list[Json]:
    """The peak and every load, as medians of so many runs, each of about so many seconds."""
    client = GrpcClient(BenchServeSettings.model_validate({"gateway": address}))

    def ignore(record: Record) -> None:
        """Nobody watches."""

    async def peak(num: int, seed: int) -> Json:
        records = await closed_loop(client, requests(num, max_tokens, seed), active, LIMIT_S, ignore)
        return figures(f"peak: {active} clients", records)

    try:
        await wait_for_draft(address, START_S)
        gc.collect()
        gc.freeze()  # else a collection here, in this large process, would count as the gateway's time
        num = max(2 * active, round(seconds * (await peak(TRIAL * active, 0))["answered_per_s"]))
        peaks, runs = [await peak(num, 1000)], []
        for number, load in enumerate(LOADS * repeats):
            rate = load * peaks[-1]["answered_per_s"]
            asked = requests(max(2, round(seconds * rate)), max_tokens, 10_000 * (number + 1))
            records = await open_loop(client, asked, rate, 7 + number, LIMIT_S, ignore)
            peaks.append(await peak(num, 1000 * (number + 2)))
            beside = statistics.mean(one["tokens_per_s"] for one in peaks[-2:])
            runs.append(figures(f"{load:g}x", records, rate, beside))
        return [middle(peaks), *(middle(runs[place :: len(LOADS)]) for place in range(len(LOADS)))]
    finally:
        await client.close()


def main() -> None:
    """The table, and the file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run of a load")
    parser.add_argument("--repeats", type=int, default=3, help="of each load")
    parser.add_argument("--active", type=int, default=8, help="sequences that run")
    parser.add_argument("--waiting", type=int, default=16, help="sequences that wait")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--json", type=Path, default=None, help="also as JSON, to this file")
    options = parser.parse_args()
    pair = pair_path()
    with Services() as services:
        target = start_target(services, pair.target)
        draft = services.start("draft", ["draft", "--model", str(pair.draft), "--listen", LOOPBACK, "--grace-s", "0"])
        addresses = [services.wait(service, START_S) for service in (target, draft)]
        gateway = services.start(
            "gateway",
            [
                "gateway", "--target", addresses[0], "--draft", addresses[1], "--tokenizer", str(pair.target),
                "--listen", LOOPBACK, "--grace-s", "0", "--caller-share", "1",
                "--max-active", str(options.active), "--max-waiting", str(options.waiting),
            ],
        )  # fmt: skip
        address = services.wait(gateway, START_S)
        found = asyncio.run(measure(address, options.active, options.seconds, options.repeats, options.max_tokens))
    print("\n".join(markdown(HEAD, [row(one) for one in found])))
    print("\nTimes are median / 99th percentile / greatest of all.")
    if options.json is not None:
        setup = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(dump(new_result(describe(), setup) | {"loads": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
