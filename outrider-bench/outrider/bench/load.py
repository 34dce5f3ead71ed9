"""`outrider bench serve`: what speculation did while somebody else's tool loaded a server.

Loads, latencies and throughput are measured by tools that are made for it (`vllm bench serve`, guidellm). What these do
not show is said here, of all the gateway's requests between two readings of its metrics: what was drafted and accepted,
by position, the tokens a round, and the share of rounds without a draft."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from outrider.bench.harness import report_failures, scrape
from outrider.bench.results import Json, dump, shares
from outrider.cli.arguments import parse
from outrider.rpc.settings import ServiceSettings

DESCRIPTION = (
    "Run the command behind -- (vllm bench serve, guidellm or any other that loads the server), and say what the "
    "gateway drafted and accepted meanwhile, by its metrics. Its exit status is the command's."
)
SPEC = "outrider_spec_decode_num_"
SUMS = {  # by the gateway's metrics
    f"{SPEC}drafts_total": "drafts",
    f"{SPEC}draft_tokens_total": "draft_tokens",
    f"{SPEC}accepted_tokens_total": "accepted_tokens",
    "outrider_generation_tokens_total": "tokens",
}
BY_POSITION = {f"{SPEC}accepted_tokens_per_pos_total": "accepted", f"{SPEC}tested_tokens_per_pos_total": "tested"}


Counts = Mapping[tuple[str, str], float]


class LoadSettings(ServiceSettings):
    """Whose metrics are read."""

    section: ClassVar[str] = "bench_serve"

    metrics: str = Field(description="where the gateway's metrics are, as 127.0.0.1:9100 (outrider gateway --metrics)")
    output: Path | None = Field(None, description="file to write the result to, as JSON")


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench serve") -> int:
    """Runs the load and prints; 1 if the gateway does not answer."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    settings, command = parse(LoadSettings, arguments[:end], prog, DESCRIPTION), arguments[end + 1 :]

    def work() -> int:
        if not command:
            raise ValueError("give the command of a load behind --, as -- vllm bench serve --base-url ...")
        url = f"http://{settings.metrics}/metrics"
        before, began = read(url), time.monotonic()
        status = subprocess.run(command, check=False).returncode
        result = described(before, read(url), time.monotonic() - began)
        print("\n".join(render(result)))
        if settings.output is not None:
            settings.output.write_text(dump(result), encoding="utf-8")
        return status

    return report_failures(prog, work)


def read(url: str) -> Counts:
    """What the gateway has counted so far: by what it is, and mode or position."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for sample in scrape(url):
        if name := SUMS.get(sample.name) or BY_POSITION.get(sample.name):
            found[name, sample.labels.get("position", "")] += int(sample.value)
        elif sample.name == "outrider_rounds_total":
            found["rounds", sample.labels["mode"]] += int(sample.value)
    return found


def described(before: Counts, after: Counts, seconds: float) -> Json:
    """What came in between."""
    rose = {key: round(value - before.get(key, 0)) for key, value in after.items()}
    result: Json = {"seconds": round(seconds, 3)} | {name: rose.get((name, ""), 0) for name in SUMS.values()}
    result["rounds"] = {mode: count for (name, mode), count in rose.items() if name == "rounds" and count}
    places = sorted(int(place) for name, place in rose if name == "tested")
    for name in BY_POSITION.values():
        result[name] = [rose[name, str(place)] for place in places if rose["tested", str(place)]]
    return result


def render(result: Json) -> Iterator[str]:
    """The result as lines."""
    rounds = sum(result["rounds"].values())
    yield f"speculation in {result['seconds']:.1f} s: {result['tokens']} tokens in {rounds} rounds"
    if not rounds:
        return
    yield f"  rounds       {', '.join(f'{mode} {count / rounds:.0%}' for mode, count in result['rounds'].items())}"
    drafted, accepted = result["draft_tokens"], result["accepted_tokens"]
    if not drafted:
        yield "  acceptance   nothing was drafted"
        return
    yield f"  acceptance   {accepted / drafted:.1%} ({accepted}/{drafted} drafted tokens)"
    yield f"  by position  {' '.join(f'{share:.2f}' for share in shares(result))}"
    yield f"  tokens/round {1 + accepted / result['drafts']:.2f} with a draft"
