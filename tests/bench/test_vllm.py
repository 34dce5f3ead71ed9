"""outrider.bench.vllm, without vLLM: what is made of runs, and what its processes are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from outrider.bench.pair import Cell, Run
from outrider.bench.results import new_result
from outrider.bench.vllm import VllmBenchSettings, measure, render, target_flags
from outrider.rpc.settings import parse_settings
from outrider.target_service.settings import TargetSettings

WAYS = {"vllm plain": 10.0, "vllm draft": 20.0, "vllm, remote drafts": 17.0}


@dataclass
class Paced:
    """A way of so many tokens a second."""

    name: str
    speed: float
    seeds: list[int] = field(default_factory=list)

    def fits(self, cell: Cell) -> bool:
        return True

    def decode(self, cell: Cell, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Run:
        self.seeds.append(seed)
        num_tokens = max_tokens * len(prompts)
        return Run(num_tokens / self.speed, num_tokens)


def test_ways_are_compared_with_vllms_own_run_by_run() -> None:
    ways = [Paced(name, speed) for name, speed in WAYS.items()]
    settings = VllmBenchSettings(repeats=3, max_tokens=8, seed=5)
    cell = measure(settings, Cell(2, 1.0), ways, [[1, 2], [3, 4], [5, 6]])
    assert all(way.seeds == [5, 5, 6, 7] for way in ways), "one run that counts for nothing, then one a repeat"
    remote = cell["ways"]["vllm, remote drafts"]
    assert remote["tokens_per_s"]["values"] == pytest.approx([17.0] * 3)
    assert remote["over_plain"]["median"] == pytest.approx(1.7)
    assert remote["over_own_draft"]["median"] == pytest.approx(0.85)
    setup = {"pair": "a pair", "k": 4, "cache_mb": 1024}
    result = new_result(setup) | {"cells": [cell], "cache_tokens": {"vllm plain": 4096}}
    text = "\n".join(render(result))
    assert "| vllm plain | 4096 |" in text and "2 streams, temperature 1; " in text
    assert "| vllm, remote drafts | 17.00 (17.00..17.00) | 1.70 (1.70..1.70) | 0.85 (0.85..0.85) | - |" in text


@pytest.mark.parametrize(("engine", "arguments"), [("vllm", {"enforce_eager": False}), ("outrider", {})])
def test_a_target_takes_its_flags(engine: str, arguments: dict[str, bool]) -> None:
    settings = parse_settings(TargetSettings, [*target_flags(engine), "--model", "/models/target"], "target", "")
    assert (settings.engine, settings.cache_mb) == (engine, 1024)
    assert settings.engine_args == arguments, "vLLM's own worker compiles, too"
