"""What a learner costs those who are served on its cores: the same services and the same load, while a learner of their
texts runs and while it stands still, by turns."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from outrider.bench.harness import start_service
from outrider.bench.results import Json, note, processor_s, spread
from outrider.cli.local_services import Folders, Service, Services, wait_for_draft
from outrider.client import Client

STREAMS, TURN_S, WARM_S = 4, 20.0, 15.0
ANSWER_TOKENS = 96


def served_beside(
    folders: Folders, prompts: Sequence[Sequence[int]], num_turns: int, start_s: float, head: Path | None = None
) -> Json:
    """Tokens a second of four streams, with the learner and without it, and the ratio of each turn to the next; of a
    `head` in the draft's place, if there is one."""
    with Services() as services, TemporaryDirectory(prefix="outrider-learning-") as versions:
        if head is None:
            address, learns = served_by_draft(services, folders, start_s)
        else:
            address, learns = served_by_head(services, folders, start_s, head)
        learner = services.start("learn", ["learn", *learns, "--folder", versions])
        try:
            return asyncio.run(by_turns(address, learner, prompts, num_turns))
        finally:
            with suppress(ProcessLookupError):
                os.kill(learner.pid, signal.SIGCONT)


def served_by_draft(services: Services, folders: Folders, start_s: float) -> tuple[str, list[str]]:
    """A gateway's address, and what a learner is told."""
    draft = start_service(services, "draft", "--model", folders.draft, "--threads", 1, "--learn-from", "unsalted")
    target = start_service(services, "target", "--model", folders.target)
    peers = ["--target", services.wait(target, start_s), "--draft", services.wait(draft, start_s)]
    gateway = start_service(services, "gateway", *peers, "--tokenizer", folders.target, "--draft-trial", "off")
    address = services.wait(gateway, start_s)
    asyncio.run(wait_for_draft(address, start_s))
    return address, ["--model", str(folders.draft), "--draft", draft.address]


def served_by_head(services: Services, folders: Folders, start_s: float, head: Path) -> tuple[str, list[str]]:
    """The same, of a target with a head."""
    beside = "--head", head, "--head-trial", "off", "--learn-from", "unsalted"
    target = start_service(services, "target", "--model", folders.target, *beside)
    peers = "--target", services.wait(target, start_s)
    gateway = start_service(services, "gateway", *peers, "--tokenizer", folders.target)
    address = services.wait(gateway, start_s)
    return address, ["--model", str(folders.target), "--head", str(head), "--target", target.address]


async def by_turns(address: str, learner: Service, prompts: Sequence[Sequence[int]], num_turns: int) -> Json:
    """Alternates, and counts."""
    speeds: dict[bool, list[float]] = {True: [], False: []}
    busy: list[float] = []
    async with Askers(address, prompts) as askers:
        await askers.speed(WARM_S)
        for turn in range(2 * num_turns):
            runs = turn % 2 == 0
            os.kill(learner.pid, signal.SIGCONT if runs else signal.SIGSTOP)
            before, began = processor_s(learner.pid), time.monotonic()
            speeds[runs].append(await askers.speed(TURN_S))
            if runs:
                busy.append((processor_s(learner.pid) - before) / (time.monotonic() - began))
            note(f"the learner {'runs' if runs else 'stands still'}: {speeds[runs][-1]:.1f} tokens/s")
    ratios = [beside / alone for beside, alone in zip(speeds[True], speeds[False], strict=True)]
    return {
        "streams": STREAMS,
        "turn_s": TURN_S,
        "beside": spread(speeds[True]),
        "alone": spread(speeds[False]),
        "ratio": spread(ratios),
        "cores_of_the_learner": round(median(busy), 3),
    }


class Askers:
    """So many streams that ask again and again, half of them greedily, each time with another seed."""

    def __init__(self, address: str, prompts: Sequence[Sequence[int]]) -> None:
        self._address, self._prompts, self._num_tokens = address, prompts, 0
        self._numbers = count()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Askers:
        self._tasks = [asyncio.create_task(self._ask(stream)) for stream in range(STREAMS)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def speed(self, seconds: float) -> float:
        """Tokens a second over so long a time. Raises what ended a stream."""
        before, began = self._num_tokens, time.monotonic()
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks:
            if task.done():
                task.result()
        return (self._num_tokens - before) / (time.monotonic() - began)

    async def _ask(self, stream: int) -> None:
        async with Client(self._address) as client:
            while True:
                prompt = self._prompts[next(self._numbers) % len(self._prompts)]
                answer = client.generate(
                    token_ids=list(prompt), max_tokens=ANSWER_TOKENS, ignore_eos=True, temperature=float(stream % 2)
                )
                async with aclosing(answer) as parts:
                    async for part in parts:
                        self._num_tokens += len(part.token_ids)
