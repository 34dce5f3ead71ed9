"""A target service on vLLM put together, without vLLM: what its steps cost, and what its processes are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import opened

from outrider.rpc.errors import ResourceExhausted
from outrider.rpc.messages import Load, StepTimings
from outrider.target_service.sequence import check_open
from outrider.target_service.settings import TargetSettings
from outrider.vllm.source import StepReport
from outrider.vllm.target import assembly


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


@pytest.mark.parametrize(
    ("said", "environment", "nodes", "is_one"),
    [
        ({}, {}, 1, True),
        ({"threads": 3}, {}, 0, True),
        ({"engine_args": {"speculative_config": {"method": "eagle"}}}, {}, 1, True),
        ({"device": "cuda"}, {}, 1, False),
        ({"tensor_parallel_size": 2}, {}, 1, False),
        ({"engine_args": {"tensor_parallel_size": 2}}, {}, 1, False),
        ({"engine_args": {"data_parallel_size": 2}}, {}, 1, False),
        ({"engine_args": {"distributed_executor_backend": "mp"}}, {}, 1, False),
        ({}, {assembly.BINDING: "0-3"}, 1, False),
        ({}, {}, 2, False),
    ],
)
def test_a_single_rank_on_a_cpu_has_no_process_of_its_own(
    said: dict[str, Any], environment: dict[str, str], nodes: int, is_one: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv(assembly.BINDING, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for node in range(nodes):
        (tmp_path / f"node{node}").mkdir()
    monkeypatch.setattr(assembly, "MEMORY_NODES", tmp_path)
    settings = TargetSettings(model=tmp_path, engine="vllm", **said)
    with assembly.told_of_threads(settings):  # in which vLLM is started
        backend = assembly.engine_args(settings).get("distributed_executor_backend")
    assert (backend == assembly.ONE_PROCESS) is is_one


@pytest.mark.parametrize(
    ("threads", "before", "after"), [(3, None, ("3", "1")), (None, None, ("2", "1")), (3, "200", ("3", "200"))]
)
def test_the_engine_s_own_products_know_their_threads(
    threads: int | None, before: str | None, after: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "MEMORY_NODES", tmp_path)
    monkeypatch.delenv(assembly.BINDING, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    if before is not None:
        monkeypatch.setenv("KMP_BLOCKTIME", before)
    with assembly.told_of_threads(TargetSettings(model=tmp_path, engine="vllm", threads=threads)):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["KMP_BLOCKTIME"]) == after
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("KMP_BLOCKTIME")) == ("2", before)


def test_one_block_is_vllms_own() -> None:
    """A request that needed it, too, would wait for ever."""
    settings = TargetSettings(model=Path("model"), engine="vllm", num_blocks=4)
    loaded = assembly.Checkpoint("digest", 97, 128, (2,), {}, "float32")
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=4, block_size=32))
    limits = assembly.limits_of(settings, loaded, config)
    assert limits.num_blocks == 3
    check_open(opened(1, range(60), max_tokens=36), limits)
    with pytest.raises(ResourceExhausted):
        check_open(opened(1, range(60), max_tokens=37), limits)
