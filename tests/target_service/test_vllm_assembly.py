"""A target service on vLLM put together, without vLLM: what its steps cost, and what its processes are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.rpc.messages import Load, StepTimings
from outrider.target_service.settings import TargetSettings
from outrider.target_service.vllm import assembly
from outrider.vllm.source import StepReport


class TimedLlm:
    """Every prompt is a step of its rows, which takes a millisecond and one more for each, and at first twice that."""

    def __init__(self, link: Any, max_model_len: int) -> None:
        self.link, self.prompts, self.resets = link, list[Sequence[int]](), 0
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: 97, max_model_len=max_model_len)
        )

    async def run_prompt(self, llm: Any, ids: Sequence[int], name: str) -> None:
        times = 1 if len(ids) in map(len, self.prompts) else 2
        self.prompts.append(ids)
        timings = StepTimings(verify_us=times * 1000 * (1 + len(ids)), num_rows=len(ids))
        self.link.on_event(StepReport(17, 0.002, timings, [], Load()))

    async def reset_prefix_cache(self) -> None:
        self.resets += 1


async def test_steps_are_measured_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimpleNamespace(on_event=None)
    llm = TimedLlm(link, max_model_len=16)
    monkeypatch.setattr(assembly, "run_prompt", llm.run_prompt)

    costs = await assembly.measure_steps(llm, link)  # type: ignore[arg-type]

    assert costs == ((1, 2000), (2, 3000), (4, 5000), (8, 9000))  # no prompt fills the context
    assert all(0 <= token < 97 for ids in llm.prompts for token in ids)
    assert len(set(map(tuple, llm.prompts))) == len(llm.prompts), "no prompt is found in the prefix cache"
    assert llm.resets == 1


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [
        ("cpu", "", "{openmp}"),
        ("cpu", "other.so", "other.so:{openmp}"),
        ("cpu", "libgomp.so", "libgomp.so"),
        ("cuda", "", ""),
    ],
)
def test_intels_openmp_is_loaded_on_a_cpu_where_it_is(
    device: str, before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", before)
    settings = TargetSettings(model=tmp_path, engine="vllm", device=device)
    with assembly.told_of_threads(settings):
        assert os.environ["LD_PRELOAD"] == before
    openmp = tmp_path / "lib" / assembly.OPENMP
    openmp.parent.mkdir()
    openmp.touch()
    with assembly.told_of_threads(settings):
        assert os.environ["LD_PRELOAD"] == after.format(openmp=openmp)
    assert os.environ["LD_PRELOAD"] == before
