"""Runs rows: those that one server serves together, each beside what plain decoding says of it, and finds what differs.
What comes out of it is `Outcome`s, which tests judge and pages show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
from lossless.composition.checkpoints import Checkpoints
from lossless.composition.replay import Judged, Replay
from lossless.composition.requests import Answer, Refused, ask, body_of, number_of, speculating, warming
from lossless.composition.serving import NAME, Server, serving
from lossless.composition.table import Row

NUM_FILLERS = 5  # requests beside the rows where blocks are to be too few
CLOSE = 2e-4  # log probabilities, told in decimals


@dataclass(slots=True)
class Outcome:
    """What became of a row."""

    row: Row
    problems: list[str] = field(default_factory=list)
    num_output: int = 0  # tokens, of all completions
    num_drafted: int = 0
    num_accepted: int = 0
    num_replayed: int = 0  # windows


@dataclass(slots=True)
class Run:
    """Outcomes of many rows, and what was met on the way."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_servers: int = 0
    num_preempted: int = 0

    @property
    def failures(self) -> list[str]:
        """By row."""
        return [f"{one.row}: {problem}" for one in self.outcomes for problem in one.problems]


Serving = Callable[[Checkpoints, Sequence[str]], AbstractContextManager[Server]]


def run(rows: Iterable[Row], folder: Path, serving: Serving = serving) -> Run:
    """All of them, by what `serving` starts."""
    checkpoints, found = Checkpoints(folder), Run()
    wanted = sorted(rows, key=lambda row: (row.plain_server, row.server))
    for plain_server, members in groupby(wanted, key=lambda row: row.plain_server):
        with serving(checkpoints, plain_server) as plain:
            expected = plain.run(_plainly(plain, list(members)))
        for server, served in groupby(expected.items(), key=lambda item: item[0].server):
            with serving(checkpoints, server) as speculating_server:
                found.outcomes += _compared(speculating_server, list(served))
                found.num_servers += 1
                found.num_preempted += speculating_server.num_preempted
    return found


async def _plainly(server: Server, rows: Sequence[Row]) -> dict[Row, Answer | Refused]:
    """One after the other, alone."""
    found: dict[Row, Answer | Refused] = {}
    async with server.client() as client:
        for row in rows:
            body = body_of(row, NAME)
            of_greedy = "coupled" if server.couples else "auto"
            rule = of_greedy if row.rule == "greedy" else row.rule
            try:
                await _warm(client, row, body)
                found[row] = await ask(client, body | {"speculation": {"enabled": False, "acceptance": rule}})
            except Refused as refused:
                found[row] = refused
    return found


async def _warm(client: httpx.AsyncClient, row: Row, body: dict[str, Any]) -> None:
    before = warming(row, body)
    if before is not None:
        await ask(client, before)


def _compared(server: Server, asked: Sequence[tuple[Row, Answer | Refused]]) -> Iterator[Outcome]:
    """Together, and what is wrong with each."""
    yield from (Outcome(row, [f"without drafts: {plain}"]) for row, plain in asked if isinstance(plain, Refused))
    expected = [(row, plain) for row, plain in asked if isinstance(plain, Answer)]
    answers = server.run(_together(server, expected))
    left, replay = server.run(server.left_over()), Replay(server.engine) if server.judges_again else None
    for (row, plain), answer in zip(expected, answers, strict=True):
        outcome = Outcome(row, [*left])
        if isinstance(answer, BaseException):
            outcome.problems.append(f"{type(answer).__name__}: {answer}")
        else:
            outcome.num_output = answer.num_output
            outcome.num_drafted, outcome.num_accepted = answer.num_drafted, answer.num_accepted
            outcome.problems += _differences(row, answer, plain)
        if not row.is_plain_again and replay is not None:
            _judge_again(outcome, server.judged, replay)
        yield outcome


def _judge_again(outcome: Outcome, judged: Sequence[Judged], replay: Replay) -> None:
    """Its windows, of all that its server judged."""
    seed = number_of(outcome.row)
    own = [window for window in judged if window.request.seed == seed and window.rejects]
    outcome.num_replayed = len(own)
    if not own:
        outcome.problems.append("nothing was judged by rejection")
    for window in own:
        try:
            replay.check(window)
        except AssertionError as error:
            outcome.problems.append(f"replayed: {error}")


async def _together(server: Server, expected: Sequence[tuple[Row, Answer]]) -> list[Answer | BaseException]:
    async with server.client() as client:
        for row, _ in expected:
            await _warm(client, row, body_of(row, NAME))
        asked = [ask(client, speculating(row, body_of(row, NAME), _guess(plain))) for row, plain in expected]
        few = any(row.blocks == "too few" for row, _ in expected)
        fillers = [_filler(client, place) for place in range(NUM_FILLERS * few)]
        answers = await asyncio.gather(*asked, *fillers, return_exceptions=True)
        return list(answers[: len(expected)])


async def _filler(client: httpx.AsyncClient, place: int) -> Answer:
    text = f"{place} the lazy dog jumps over the quick brown fox " * 2
    messages = [{"role": "user", "content": text}]
    return await ask(client, {"model": NAME, "messages": messages, "max_tokens": 96, "n": 1, "seed": place})


def _guess(plain: Answer) -> str:
    """At the text, wrong in its middle."""
    text = plain.choices[0].reasoning + plain.choices[0].text
    return text[: len(text) // 3] + "~" + text[len(text) // 3 + 1 :]


def _differences(row: Row, answer: Answer, plain: Answer) -> Iterator[str]:
    for name in ("num_prompt", "num_cached"):
        ours, theirs = getattr(answer, name), getattr(plain, name)
        if ours != theirs:
            yield f"{name} is {ours}, plain decoding's {theirs}"
    if row.cache == "warm" and not answer.num_cached:
        yield "nothing was cached of a warm prompt"
    if row.cache != "warm" and answer.num_cached:
        yield f"{answer.num_cached} tokens of a cold prompt were cached"
    yield from _different_prompts(answer.prompt_logprobs, plain.prompt_logprobs)
    if (row.logprobs == "of the prompt, too") != (len(answer.prompt_logprobs) == answer.num_prompt - 1 > 0):
        yield f"{len(answer.prompt_logprobs)} log probabilities of {answer.num_prompt} tokens of the prompt"
    if answer.num_output != sum(len(choice.ids) for choice in answer.choices):
        yield f"usage says {answer.num_output} tokens"
    for place, (ours, theirs) in enumerate(zip(answer.choices, plain.choices, strict=True)):
        if ours.finish_reason is None:
            yield f"completion {place} has no end"
        if row.is_plain_again:
            for name in ("ids", "text", "reasoning", "calls", "finish_reason"):
                told, wanted = getattr(ours, name), getattr(theirs, name)
                if told != wanted:
                    yield f"completion {place}: {name} {told!r:.300}, plainly {wanted!r:.300}"
            yield from _different_logprobs(place, ours.logprobs, theirs.logprobs)


def _different_prompts(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """By token; the lists are as long as one another where nothing else is wrong."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one.keys() != other.keys() or any(abs(one[key] - other[key]) > CLOSE for key in one):
            yield f"log probabilities of the prompt's token {place} {one}, plainly {other}"


def _different_logprobs(place: int, ours: list[Any], theirs: list[Any]) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"completion {place}: {len(ours)} log probabilities, plainly {len(theirs)}"
        return
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = [(one[:2], other[:2]), *zip(one[2], other[2], strict=True)]
        if any(a != b or abs(x - y) > CLOSE for (a, x), (b, y) in pairs):
            yield f"completion {place}: log probabilities of token {index} {one}, plainly {other}"
