"""Draft and target in one process on one thread, one after the other: the classical co-located speculation that the
services are measured against. The engines and the sans-I/O core are those of the services; there is no event loop, no
queue and no socket in between, so nothing but the models' passes and their own Python takes time.

As a worker: `python -m outrider.bench.colocated TARGET DRAFT THREADS [expand]`, under stretched draft passes."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch

from outrider.bench.network.backends import summarise_rounds
from outrider.bench.network.draft import PassPacer
from outrider.bench.worker import Handler, serve_requests
from outrider.draft_service.admission import make_methods
from outrider.draft_service.boot import build_model_method
from outrider.draft_service.boot import runner_options as draft_options
from outrider.draft_service.engine import DraftEngine
from outrider.draft_service.settings import DraftSettings
from outrider.engine.loader import load_model
from outrider.engine.model_runner import build_runner
from outrider.gateway.speculation.core import (
    CloseDraft,
    Effect,
    Emit,
    Fail,
    OpenDraft,
    OpenTarget,
    SpeculationCore,
    ToDraft,
    ToTarget,
)
from outrider.planner.policy import Policy, Round
from outrider.rpc.messages import Close, Open, from_failure
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.target_service.boot import limits_of, load, new_engine
from outrider.target_service.boot import runner_options as target_options
from outrider.target_service.settings import TargetSettings

STREAM = 1
LONGEST_WAIT_S = 1.0  # a side that has nothing to do for longer will never have


class NoProgress(RuntimeError):
    """Neither side has anything to do, and sequences are open."""


class Colocated:
    """Both engines. Not safe for threads; each call decodes a batch from its first token to its last."""

    def __init__(self, target: TargetSettings, draft: DraftSettings) -> None:
        if draft.model is None:
            raise ValueError("a co-located draft is a model: give its folder")
        loaded = load(target)
        runner = build_runner(loaded.model, target_options(target))
        limits = limits_of(target, loaded, runner)
        self._target = new_engine(target, runner, limits)
        small = load_model(
            draft.model,
            dtype=draft.dtype,
            quantization=draft.quantization,
            device=draft.device,
            max_model_len=draft.max_model_len,
        )
        method = build_model_method(small, draft_options(draft).beside_another())
        self._draft = DraftEngine(make_methods([method]), draft.max_sequences, draft.max_rows)
        self._target_threads, self._draft_threads = target.threads, draft.threads
        _use_threads(self._target_threads)
        self._target.profile()
        self._pieces: list[Any] = []  # what the engines said, until it is applied
        self._commits: list[Any] = []
        self._last_id = 0
        self._cores: dict[int, SpeculationCore] = {}
        self._rounds: dict[int, list[Round]] = {}

    @classmethod
    def of(cls, target: Path, draft: Path, *, threads: int | None = None, **options: Any) -> Self:
        """Checkpoints with the services' defaults; `threads` are the target's, and `options` are TargetSettings. A
        draft's products are too small for more than one thread."""
        return cls(
            TargetSettings.model_validate({"model": target, "threads": threads, "prefix_cache": False, **options}),
            DraftSettings.model_validate({"model": draft, "threads": 1 if threads else None}),
        )

    def decode(self, requests: Sequence[Open], policy: Policy) -> list[list[Round]]:
        """Decodes all requests at once and returns each one's rounds. Raises OutriderError if one fails."""
        for request in requests:
            self._last_id += 1
            self._cores[self._last_id] = SpeculationCore(request, policy)
            self._rounds[self._last_id] = []
        for number, core in list(self._cores.items()):
            self._apply(number, core.start(time.monotonic()))
        try:
            while not all(core.finished for core in self._cores.values()):
                self._run_draft()
                self._run_target()
            return list(self._rounds.values())
        finally:
            self._end()

    def _run_draft(self) -> None:
        """Every pass that the credit allows; then its pieces go to the target."""
        _use_threads(self._draft_threads)
        while self._draft.step(time.monotonic()) == 0.0:
            continue
        pieces, self._pieces[:] = list(self._pieces), []
        for piece in pieces:
            if (core := self._cores.get(piece.sequence_id)) is not None:
                self._apply(piece.sequence_id, core.on_draft(piece))

    def _run_target(self) -> None:
        """One step; then its commits go to the draft."""
        _use_threads(self._target_threads)
        wait = self._target.step(time.monotonic())
        while not self._commits and wait == 0.0:  # random numbers drawn ahead, and no pass
            wait = self._target.step(time.monotonic())
        if not self._commits:
            if wait is None or wait > LONGEST_WAIT_S:
                raise NoProgress("neither the draft nor the target has anything to do")
            time.sleep(wait)
        commits, self._commits[:] = list(self._commits), []
        for event in commits:
            if (core := self._cores.get(event.sequence_id)) is not None:
                self._apply(event.sequence_id, core.on_target(event, time.monotonic()))

    def _apply(self, number: int, effects: Sequence[Effect]) -> None:
        """Applies one sequence's effects, and those that follow."""
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case OpenDraft(request, credits):
                    self._to_draft(number, (request, *credits))
                case ToDraft(messages):
                    self._to_draft(number, messages)
                case CloseDraft():
                    self._to_draft(number, (Close(number),))
                case OpenTarget(request, first):
                    self._to_target(number, (request, *first))
                case ToTarget(messages):
                    self._to_target(number, messages)
                case Emit(closed):
                    self._rounds[number].append(closed)
                    read = closed.commit.position + len(closed.commit.ids)
                    pending.extend(self._cores[number].on_read(read, time.monotonic()))
                case Fail(failure):
                    raise from_failure(failure)

    def _to_draft(self, number: int, messages: Sequence[Any]) -> None:
        renamed = [replace(message, sequence_id=number) for message in messages]
        self._draft.handle(Deliver(STREAM, renamed, self._pieces.append))

    def _to_target(self, number: int, messages: Sequence[Any]) -> None:
        renamed = [replace(message, sequence_id=number) for message in messages]
        self._target.handle(Deliver(STREAM, renamed, self._commits.append))

    def _end(self) -> None:
        """Leaves nothing open, also after an error."""
        for number in self._cores:
            self._to_target(number, (Close(number),))
            self._to_draft(number, (Close(number),))
        self._cores, self._rounds = {}, {}
        self._draft.step(time.monotonic())
        self._pieces.clear()
        self._commits.clear()


def _use_threads(num: int | None) -> None:
    """For this thread's products from now on."""
    if num is not None and torch.get_num_threads() != num:
        torch.set_num_threads(num)


def make_handler(arguments: Sequence[str]) -> Handler:
    """Answers a NetworkBatch with "pass_ms" by the digest of its rounds. Above temperature 0 acceptance is by
    rejection, which accepts the most."""
    pace = PassPacer()
    pace.stretch_passes()
    target, draft, threads, *expand = arguments
    engines = Colocated.of(Path(target), Path(draft), threads=int(threads), expand=bool(expand))

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        pace.pass_s = question["pass_ms"] / 1e3
        sampling = SamplingParams(
            temperature=question["temperature"], max_tokens=question["max_tokens"], ignore_eos=True
        )
        opens = [
            Open(0, tuple(ids), sampling, seed=seed, one_hot=sampling.greedy)
            for ids, seed in zip(question["prompts"], question["seeds"], strict=True)
        ]
        return asdict(summarise_rounds(engines.decode(opens, Policy(question["num_draft_tokens"]))))

    return handle


if __name__ == "__main__":
    sys.exit(serve_requests(make_handler))
