"""Nothing is kept of requests that are over, given up or broken off; and what is kept is found: each check has a leak
planted that it has to see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chaos import objects, resources
from chaos.objects import ask_many
from chaos.resources import MIB, Reading, problems
from support.environment import SEED

from outrider.draft_service.engine import DraftEngine
from outrider.engine.kv_cache_manager import BlockPool
from outrider.gateway.servicer import GenerationServicer


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nothing_is_kept_of_many_requests(tmp_path: Path) -> None:
    outcome = await ask_many(tmp_path, 1200, SEED, told=print)
    assert outcome.problems == []
    assert outcome.num_breaks > 0 and {"closed", "deadline", "whole", "http", "http closed"} <= outcome.ends.keys()


def forgotten_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release, calls = BlockPool.release, iter(range(1 << 30))

    def forgetful(self: BlockPool, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        release(self, blocks[1:] if next(calls) % 20 == 9 else blocks)

    monkeypatch.setattr(BlockPool, "release", forgetful)


def open_sequence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release, calls = DraftEngine._release, iter(range(1 << 30))

    def forgetful(self: DraftEngine, key: Any) -> None:
        if next(calls) % 20 != 9:
            release(self, key)

    monkeypatch.setattr(DraftEngine, "_release", forgetful)


def repeated_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count = objects.SequenceIds._count

    def again(self: objects.SequenceIds, stream: int, sequence_id: int) -> None:
        count(self, stream, sequence_id - sequence_id % 5)

    monkeypatch.setattr(objects.SequenceIds, "_count", again)


def with_every_request(monkeypatch: pytest.MonkeyPatch, keep: Callable[[Any], object]) -> None:
    """Something more is done at the gateway with each request over gRPC."""
    generate = GenerationServicer.Generate

    async def and_more(self: GenerationServicer, request: Any, context: Any) -> None:
        keep(request)
        await generate(self, request, context)

    monkeypatch.setattr(GenerationServicer, "Generate", and_more)


def kept_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []
    with_every_request(monkeypatch, kept.append)


def kept_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []
    with_every_request(monkeypatch, lambda request: kept.append([[number] for number in range(200)]))


def open_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []
    with_every_request(monkeypatch, lambda request: kept.append(os.open(tmp_path, os.O_RDONLY)))


def endless_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[Any] = []
    with_every_request(monkeypatch, lambda request: kept.append(asyncio.create_task(asyncio.Event().wait())))


PLANTED = {
    forgotten_block: "blocks in use at the",
    open_sequence: "sequences at the draft",
    repeated_id: "on stream",
    kept_object: "of outrider.v1.generation_pb2.GenerateRequest live after",
    kept_memory: "more blocks of Python's memory",
    open_file: "descriptors after",
    endless_task: "tasks after",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
async def test_a_planted_leak_is_found(plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "QUIET_S", 2.0)
    plant(monkeypatch, tmp_path)
    outcome = await ask_many(tmp_path, 160, SEED, rounds=4)
    assert any(PLANTED[plant] in problem for problem in outcome.problems), outcome.problems


def reading(number: int = 0, **fields: Any) -> Reading:
    return replace(Reading("target 0", 1, {}, 40, 20, 200 * MIB, 100 * number), **fields)


GROWING = [reading(number, resident_bytes=200 * MIB + 8 * MIB * number) for number in range(8)]
PEAK = [reading(number, resident_bytes=(300 if number == 6 else 200) * MIB) for number in range(8)]
FILLING = [reading(number, resident_bytes=min(300, 200 + 30 * number) * MIB) for number in range(8)]
READINGS: dict[str, tuple[list[Reading], str]] = {
    "as at first": ([reading(number) for number in range(8)], ""),
    "a few descriptors more": ([reading(), reading(1, descriptors=48)], ""),
    "descriptors": (
        [reading(), reading(1, descriptors=60)],
        "target 0 has 60 descriptors, and had 40 100 requests ago",
    ),
    "threads": ([reading(), reading(1, threads=60)], "target 0 has 60 threads, and had 20 100 requests ago"),
    "another process": ([reading(), reading(1, process=2, descriptors=60)], ""),
    "held": (
        [reading(), reading(1, held={"outrider_target_num_requests_open": 2.0}), reading(2)],
        "target 0 holds outrider_target_num_requests_open 2 at rest, after 100 requests",
    ),
    "memory": (GROWING, "target 0 keeps 83886 bytes a request: 24.0 MiB over the later half of 700 requests"),
    "a peak of memory": (PEAK, ""),
    "memory that fills": (FILLING, ""),
}


@pytest.mark.parametrize(("readings", "problem"), READINGS.values(), ids=READINGS)
def test_what_readings_show(readings: list[Reading], problem: str) -> None:
    assert problems(readings) == ([problem] if problem else [])


def test_what_a_service_holds_is_read_from_its_metrics() -> None:
    lines = [f"{name} 0.0" for name in resources.HELD["target"]]
    assert resources.held_by("target", "\n".join(lines) + "\n") == {}
    lines[2] = f"{resources.HELD['target'][2]} 3.0"
    assert resources.held_by("target", "\n".join(lines) + "\n") == {resources.HELD["target"][2]: 3.0}
    with pytest.raises(ValueError, match="the metrics of a target lack outrider_target_num_requests_open"):
        resources.held_by("target", "\n".join(lines[:2] + lines[3:]) + "\n")
