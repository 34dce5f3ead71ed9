"""What a long prompt and many decoding streams do to each other in a target:

    python bench/outrider/bench/prefill.py [--streams 128] [--draft-tokens 4] [--max-rows 512] [--json FILE]

The target's engine with the embedded pair's large model, in this process. Streams of random ids decode with drafts that
hold with probability 0.7 and are there at once; then one prompt arrives, as a step begins. Its time to first token is
compared with that in an idle engine, and the gaps between the streams' commits until then with those before it. Prints
a table in Markdown."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from outrider.bench.machine import describe
from outrider.bench.results import Json, bracketed, dump, markdown, percentile, spread
from outrider.engine.model_runner import build_runner
from outrider.pairs import pair_path
from outrider.rpc.messages import Close, Commit, Credit, DraftTokens, Open, TargetCommand, TargetEvent
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams
from outrider.rpc.servicer import Deliver, Detach
from outrider.target_service.boot import limits_of, load, new_engine, runner_options
from outrider.target_service.engine import TargetEngine
from outrider.target_service.settings import TargetSettings

SEED = 20
STREAM_PROMPT, REFERENCE = 32, 160  # tokens of each stream's prompt, and of the text that its drafts come from
HIT = 0.7  # chance that a drafted token is the reference's
SETTLED = 12  # tokens of every stream before anything is measured
PATIENCE_MS = 60_000
PROMPT_ID = 1 << 16  # sequence ids of prompts; streams count from 1


@dataclass
class Driver:
    """One engine, and when it said what."""

    engine: TargetEngine
    num_draft_tokens: int
    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    prompts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)  # committed after each prompt
    times: dict[int, list[float]] = field(default_factory=dict)  # of each stream's commits
    references: dict[int, list[int]] = field(default_factory=dict)
    num_prompts: int = 0
    drafted: list[DraftTokens | Credit] = field(default_factory=list)  # for the next step

    def ids(self, count: int) -> tuple[int, ...]:
        """A text of its own, which no prefix cache knows."""
        return tuple(self.rng.randrange(1, self.vocab_size) for _ in range(count))

    def step(self) -> None:
        """One step of the engine; the drafts of what it commits are there before the next."""
        self.engine.step(time.monotonic())
        drafted, self.drafted = self.drafted, []
        for message in drafted:
            self.send(message)

    def send(self, message: TargetCommand) -> None:
        """Hands the engine a message."""
        self.engine.handle(Deliver(1, [message], self._on_event))

    def open_streams(self, num_streams: int) -> None:
        """All streams, from the start; with references they have drafts."""
        self.engine.handle(Detach(1))
        self.drafted.clear()
        for index in range(1, num_streams + 1):
            prompt = self.prompts.setdefault(index, self.ids(STREAM_PROMPT))
            self.texts[index], self.times[index] = [], []
            self._open(index, prompt, REFERENCE)
            drafts = index in self.references and self.num_draft_tokens > 0
            self.send(Credit(index, STREAM_PROMPT + 1 if drafts else 1 << 20, 0))

    def first_token_s(self, num_ids: int, arrives_in_step: bool) -> float:
        """Seconds from a prompt's arrival to its first token."""
        self.num_prompts += 1
        number, prompt, asked = PROMPT_ID + self.num_prompts, self.ids(num_ids), time.monotonic()
        if arrives_in_step:
            self.step()
        self.texts[number], self.times[number] = [], []
        self._open(number, prompt, 4)
        self.send(Credit(number, num_ids + 1, 0))
        while not self.times[number]:
            self.step()
        self.send(Close(number))
        return self.times[number][0] - asked

    def gaps_s(self, since: float, until: float) -> list[float]:
        """Seconds between commits of each stream, of those in a stretch of time."""
        return [
            end - start
            for number, times in self.times.items()
            if number < PROMPT_ID
            for start, end in itertools.pairwise(times)
            if since <= end <= until
        ]

    def _open(self, number: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.send(Open(number, prompt, sampling, acceptance=AcceptanceRule.COUPLED))

    def _on_event(self, event: TargetEvent) -> None:
        if not isinstance(event, Commit):
            return
        number = event.sequence_id
        self.times[number].append(time.monotonic())
        self.texts[number] += event.ids
        if self.num_draft_tokens and number in self.references and event.finish_reason is None:
            self._draft(number)

    def _draft(self, number: int) -> None:
        done, k = len(self.texts[number]), self.num_draft_tokens
        right = self.references[number][done : done + k]
        ids = tuple(token if self.rng.random() < HIT else self.rng.randrange(1, self.vocab_size) for token in right)
        piece = DraftTokens(number, done, STREAM_PROMPT + done, ids)
        self.drafted += [piece, Credit(number, STREAM_PROMPT + done + k + 1, k, PATIENCE_MS)]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128, help="decoding streams (default: 128)")
    parser.add_argument("--draft-tokens", type=int, default=4, help="drafted tokens a round; 0: plain (default: 4)")
    parser.add_argument("--max-rows", type=int, default=512, help="rows of one step (default: 512)")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="tokens of the prompt (default: 1000)")
    parser.add_argument("--steps", type=int, default=20, help="steps of the streams alone (default: 20)")
    parser.add_argument("--repeats", type=int, default=3, help="how often all is measured (default: 3)")
    parser.add_argument("--threads", type=int, default=describe().cores, help="threads (default: all cores)")
    parser.add_argument("--json", type=Path, help="where to store the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs = measure(options)
    result: Json = {"machine": asdict(describe()), "options": _plain(options), "runs": runs}
    print(table(runs))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(dump(result), encoding="utf-8")


def measure(options: argparse.Namespace) -> list[Json]:
    """Every repeat: the prompt alone, the streams alone, both."""
    driver = driver_of(options)
    driver.open_streams(options.streams)  # plain: what drafts will be taken from
    while any(len(driver.texts[index]) < REFERENCE for index in range(1, options.streams + 1)):
        driver.step()
    driver.references = {index: list(driver.texts[index]) for index in range(1, options.streams + 1)}
    return [one_run(driver, options) for _ in range(options.repeats)]


def driver_of(options: argparse.Namespace) -> Driver:
    """The engine as a service has it."""
    settings = TargetSettings.model_validate({"model": pair_path().target, "max_rows": options.max_rows})
    loaded = load(settings)
    runner = build_runner(loaded.model, runner_options(settings))
    limits = limits_of(settings, loaded, runner)
    engine = new_engine(settings, runner, limits)
    engine.profile()
    return Driver(engine, options.draft_tokens, limits.vocab_size)


def one_run(driver: Driver, options: argparse.Namespace) -> Json:
    """Times in milliseconds."""
    driver.engine.handle(Detach(1))
    alone = driver.first_token_s(options.prompt_tokens, arrives_in_step=False)
    driver.open_streams(options.streams)
    while min(len(driver.texts[index]) for index in range(1, options.streams + 1)) < SETTLED:
        driver.step()
    began = time.monotonic()
    for _ in range(options.steps):
        driver.step()
    asked = time.monotonic()
    beside = driver.first_token_s(options.prompt_tokens, arrives_in_step=True)
    before, meanwhile = driver.gaps_s(began, asked), driver.gaps_s(asked, asked + beside)
    return {
        "ttft_alone_ms": 1e3 * alone, "ttft_beside_ms": 1e3 * beside, "ttft_ratio": beside / alone,
        "p99_before_ms": 1e3 * p99(before), "p99_meanwhile_ms": 1e3 * p99(meanwhile),
        "p99_ratio": p99(meanwhile) / p99(before),
    }  # fmt: skip


def p99(values: list[float]) -> float:
    """The 99th percentile; infinite where no stream had a commit."""
    return percentile(sorted(values), 99) if values else float("inf")


def table(runs: list[Json]) -> str:
    """Medians, with the least and the greatest in brackets."""

    def cell(name: str, digits: int) -> str:
        return bracketed(spread([run[name] for run in runs]), digits)

    rows = [
        ("first token, ms", cell("ttft_alone_ms", 0), cell("ttft_beside_ms", 0), cell("ttft_ratio", 2), "at most 3"),
        ("p99 between commits, ms", cell("p99_before_ms", 0), cell("p99_meanwhile_ms", 0), cell("p99_ratio", 2),
         "at most 2"),
    ]  # fmt: skip
    return "\n".join(markdown(("", "alone", "together", "ratio", "aim"), rows))


def _plain(options: argparse.Namespace) -> Json:
    return {name: value for name, value in vars(options).items() if name != "json"}


if __name__ == "__main__":
    main()
