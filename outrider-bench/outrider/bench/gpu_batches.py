"""`make gpu ARGS="--only batches"`: what many streams make of speculation on a GPU, tokens a second over plain decoding
in the same repeat. The hold for the cohort, the captured passes of a head, a fresh gateway and a penalty are switched
on the same models, burst by burst: what the machine does meanwhile hits all alike.

Of each burst: how many streams a step of the target held, the tokens that a stream had of a step, the share of the
time for which the device computed the target's steps, and the process's own time (loop, target and draft) a token."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.bench.gpu import LARGE, SHARE, finish, ways
from outrider.bench.kernels_cases import K
from outrider.bench.prompts import PROMPTS
from outrider.bench.results import Json, bracketed, markdown, median_of, new_result, spread
from outrider.llm import LLM, SamplingParams
from outrider.pairs import pair_path
from outrider.pairs.expansion import write_expanded
from outrider.target_service.engine import TargetEngine
from outrider.target_service.heads.drafter import HeadDrafter
from outrider.target_service.outputs import ComputedStep
from outrider.target_service.parts import EnginePart

STREAMS, HEAD_STREAMS = (8, 32, 64), (4, 32)
NUM_TOKENS, FIRST_TOKENS = 128, 64  # of a completion; of one that a fresh gateway decodes
PENALTY = 1.3
COLUMNS = {"streams_a_step": 1, "tokens_a_step": 2, "device": 2, "cpu_us_a_token": 0}  # and their digits


class StepWatch(EnginePart):
    """Counts a target's steps."""

    def __init__(self) -> None:
        self.num_steps = self.num_sequences = self.device_us = 0

    def finished(self, step: ComputedStep) -> None:
        """Adds one."""
        self.num_steps += 1
        self.num_sequences += step.timings.num_sequences
        self.device_us += step.timings.verify_us + step.timings.sample_us


@dataclass(frozen=True, slots=True)
class SwitchedWay:
    """How a burst is decoded: by which LLM, with what switched meanwhile."""

    llm: LLM
    switched: Callable[[TargetEngine], Any] = lambda engine: nullcontext()
    is_fresh: bool = False  # nothing was learned before
    num_penalised: int = 0
    watch: StepWatch = field(default_factory=StepWatch)

    @property
    def engine(self) -> TargetEngine:
        """The target's."""
        backend: Any = self.llm._backend
        engine: TargetEngine = backend.target.engine
        return engine

    def burst(self, streams: int, temperature: float) -> Json:
        """So many streams that begin together."""
        num_tokens = FIRST_TOKENS if self.is_fresh else NUM_TOKENS
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(streams)]
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=num_tokens, ignore_eos=True,
                repetition_penalty=PENALTY if index < self.num_penalised else 1.0,
            )
            for index in range(streams)
        ]  # fmt: skip
        if self.is_fresh:
            backend: Any = self.llm._backend
            backend.engine.learned = None
        before = self.watch.num_steps, self.watch.num_sequences, self.watch.device_us
        self.engine.parts.append(self.watch)
        try:
            with self.switched(self.engine):
                began, began_cpu = time.perf_counter(), time.process_time()
                self.llm.generate(prompts, params, use_tqdm=False)
                seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        finally:
            self.engine.parts.remove(self.watch)
        after = self.watch.num_steps, self.watch.num_sequences, self.watch.device_us
        num_steps, num_sequences, device_us = (late - early for early, late in zip(before, after, strict=True))
        tokens = streams * num_tokens
        return {
            "tokens_s": tokens / seconds,
            "streams_a_step": num_sequences / max(1, num_steps),
            "tokens_a_step": tokens / max(1, num_sequences),
            "device": 1e-6 * device_us / seconds,
            "cpu_us_a_token": 1e6 * cpu_s / tokens,
        }


@contextmanager
def without_hold(engine: TargetEngine) -> Iterator[None]:
    """A step waits for nobody."""
    hold = engine._cohort.hold
    engine._cohort.hold = lambda *_: 0.0  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._cohort.hold = hold  # type: ignore[method-assign]


@contextmanager
def launched_heads(engine: TargetEngine) -> Iterator[None]:
    """Every pass of a head is launched by itself."""
    heads = [(part, part.captured) for part in engine.parts if isinstance(part, HeadDrafter)]
    for part, _ in heads:
        part.captured = None
    try:
        yield
    finally:
        for part, captured in heads:
            part.captured = captured


def ways_of(llms: Mapping[str, LLM]) -> dict[str, SwitchedWay]:
    """Of three LLMs over one target: plain, in turn, and `auto`."""
    plain, in_turn, auto = llms["plain"], llms["in turn"], llms["auto"]
    return {
        "plain": SwitchedWay(plain),
        "plain, one penalised": SwitchedWay(plain, num_penalised=1),
        "in turn": SwitchedWay(in_turn),
        "in turn, no hold": SwitchedWay(in_turn, without_hold),
        "in turn, one penalised": SwitchedWay(in_turn, num_penalised=1),
        "auto": SwitchedWay(auto),
        "auto, fresh": SwitchedWay(auto, is_fresh=True),
    }


def ways_of_head(llms: Mapping[str, LLM]) -> dict[str, SwitchedWay]:
    """Of a plain one, and one with a head."""
    head = llms["head"]
    return {
        "plain": SwitchedWay(llms["plain"]),
        "EAGLE-3": SwitchedWay(head),
        "EAGLE-3, launched": SwitchedWay(head, launched_heads),
    }


def measure(named: Mapping[str, SwitchedWay], streams: int, temperature: float, repeats: int) -> Json:
    """A row: each way in turn in every repeat, over the first one. The first repeat compiles."""
    found: dict[str, list[Json]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for name, way in named.items():
            burst = way.burst(streams, temperature)
            if repeat:
                found[name].append(burst)
    plain = [burst["tokens_s"] for burst in next(iter(found.values()))]
    by_way = {
        name: {column: spread([burst[column] for burst in bursts]) for column in ("tokens_s", *COLUMNS)}
        | {"times": spread([burst["tokens_s"] / rate for burst, rate in zip(bursts, plain, strict=True)])}
        for name, bursts in found.items()
    }
    return {"streams": streams, "temperature": temperature, "ways": by_way}


def render(rows: Sequence[Json]) -> Iterator[str]:
    """The table."""
    table = [
        (
            str(row["streams"]), f"{row['temperature']:g}", name,
            median_of(way["tokens_s"], 0), bracketed(way["times"]),
            *(median_of(way[column], digits) for column, digits in COLUMNS.items()),
        )
        for row in rows
        for name, way in row["ways"].items()
    ]  # fmt: skip
    head = ("streams", "temperature", "way", "tokens/s", "times plain", *(name.replace("_", " ") for name in COLUMNS))
    yield from markdown(head, table, words=(2,))


def main() -> int:
    """2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    if not torch.cuda.is_available():
        print("there is no GPU here, and nothing was measured", file=sys.stderr)
        return 2
    rows = [*_large(repeats), *_head(repeats)]
    setup = {"repeats": repeats, "k": K, "tokens": NUM_TOKENS, "target": LARGE}
    finish(
        new_result(setup) | {"device": {"name": torch.cuda.get_device_name()}, "rows": rows}, "batches", render(rows)
    )
    return 0


def _large(repeats: int) -> list[Json]:
    """A target of an 8B model's layers and widths, and the embedded draft."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "target"
        write_expanded(Path(pair_path().target), folder, noise_device="cuda", **LARGE)
        common: Json = {"model": str(folder), "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": max(STREAMS)}
        llms = _started(stack, common, ways())
        return [measure(ways_of(llms), streams, 0.0, repeats) for streams in STREAMS]


def _head(repeats: int) -> list[Json]:
    """The embedded target, with and without its EAGLE-3 head."""
    head = {"method": "eagle3", "model": str(pair_path().head_by("eagle3")), "num_speculative_tokens": K}
    with ExitStack() as stack:
        common: Json = {"model": str(pair_path().target), "max_model_len": 512, "max_num_seqs": max(HEAD_STREAMS)}
        llms = _started(stack, common, {"plain": {}, "head": {"speculative_config": head}})
        return [measure(ways_of_head(llms), streams, 0.0, repeats) for streams in HEAD_STREAMS]


def _started(stack: ExitStack, common: Json, options: Mapping[str, Json]) -> dict[str, LLM]:
    """One LLM each, which share the device's memory."""
    return {
        name: stack.enter_context(LLM(**common, gpu_memory_utilization=SHARE * number / len(options), **own))
        for number, (name, own) in enumerate(options.items(), start=1)
    }


if __name__ == "__main__":
    sys.exit(main())
