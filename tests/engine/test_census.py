"""How many experts the rows of a pass went to: by every kind of kernels those that transformers' routers choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.devices import PretendedDevice, Replayed, gpu
from support.models import KERNELS, MIXTURES, build_decoder, cpu_kernels, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import BatchEntry, StepLimits
from outrider.engine.cuda_graphs import CudaGraphs
from outrider.engine.kv_cache_manager import BlockPool
from outrider.engine.model_runner import ModelRunner
from outrider.engine.profile import measure_experts, measure_steps

__all__ = ["gpu"]

IDS = [3, 9, 9, 40, 71, 8, 22]


@pytest.fixture(params=KERNELS)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with cpu_kernels(request.param):
        yield


def chosen_by_transformers(model: Any, ids: list[int], num_chosen: int) -> int:
    """Experts of all layers that any row's router ranks among the first."""
    found = model(torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits
    scores = [one.reshape(len(ids), -1) for one in found if one is not None]
    return sum(len(layer.float().topk(num_chosen).indices.unique()) for layer in scores)


@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_woken_experts_are_those_that_routers_choose(family: str, on_cpu: None) -> None:
    hf = tiny_hf_model(family)
    runner = ModelRunner(build_decoder(tiny_config(family), tiny_state(hf)).model, 8)
    assert runner.census is not None
    num_chosen = runner.census.mixture.num_chosen
    for ids in (IDS, IDS[:1], IDS[:2]):
        runner.forward([BatchEntry(ids, 0, [2, 0, 1], len(ids))])
        assert runner.last_woken() == chosen_by_transformers(hf, ids, num_chosen)
    runner.forward([BatchEntry(IDS[:1], 0, [2, 0, 1], 1)])
    before = runner.last_woken
    runner.forward([BatchEntry(IDS, 0, [2, 0, 1], len(IDS))])
    assert before() < runner.last_woken()  # what a pass woke is known after the next one, too


def test_a_dense_model_wakes_none() -> None:
    runner = ModelRunner(build_decoder(tiny_config(), tiny_state(tiny_hf_model())).model, 8)
    runner.forward([BatchEntry(IDS, 0, [2, 0, 1], len(IDS))])
    assert runner.census is None and runner.last_woken() == 0
    assert measure_experts(runner, BlockPool(8), ((1, 100), (8, 100))) is None


@torch.inference_mode()
def test_a_captured_step_counts_behind_what_was_launched(gpu: PretendedDevice | None) -> None:
    """Nobody waits for the number. Spare rows of a captured step wake nothing: they go where the first row does."""
    options: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 32, "num_experts_per_tok": 2}
    config, state = tiny_config("qwen3_moe", **options), tiny_state(tiny_hf_model("qwen3_moe", **options))
    runner = ModelRunner(build_decoder(config, state, dtype="float32", device="cuda").model, num_blocks=12)
    plain = ModelRunner(build_decoder(config, state).model, num_blocks=12)
    device = CudaGraphs(torch.device("cuda")) if gpu is None else Replayed()
    runner.capture(StepLimits(8, 1, 8), device)
    if gpu is not None:
        gpu.graphs.append(device)  # type: ignore[arg-type]
        gpu.waits.clear()
    for num_rows in range(1, 9):
        ids = [*IDS, 5, 8, 22, 3][:num_rows]
        logits = runner.forward([BatchEntry(ids, 0, [7, 2, 11], num_rows)])
        read = runner.last_woken
        assert gpu is None or gpu.waits == []
        torch.testing.assert_close(
            logits.cpu(), plain.forward([BatchEntry(ids, 0, [7, 2, 11], num_rows)]), atol=1e-4, rtol=1e-4
        )
        assert read() == plain.last_woken() > 0
        if gpu is not None:
            gpu.waits.clear()


class TimedRunner(ModelRunner):
    """Whose passes take a millisecond, and 50 us for each expert that they wake, on a clock of its own."""

    now = 0.0

    def forward(self, entries: Any) -> torch.Tensor:
        logits = super().forward(entries)
        self.now += 1e-3 + 50e-6 * self.last_woken()
        return logits


def test_what_an_expert_costs_is_measured() -> None:
    options: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    loaded = build_decoder(tiny_config("qwen3_moe", **options), tiny_state(tiny_hf_model("qwen3_moe", **options)))
    runner, pool = TimedRunner(loaded.model, 16), BlockPool(16)
    costs = measure_steps(runner, pool, 64, 512, clock=lambda: runner.now)
    found = measure_experts(runner, pool, costs, clock=lambda: runner.now)
    assert found is not None and pool.num_free == 16
    assert (found.num_layers, found.num_experts, found.num_chosen) == (2, 16, 2)
    assert found.expert_us == pytest.approx(50) and 0.3 < found.along <= 1
    assert measure_experts(runner, pool, costs[:1]) is None  # one row wakes those of one row
    small = BlockPool(1)  # has room for eight rows, and nothing before them
    assert measure_experts(runner, small, costs[:4]) is not None and small.num_free == 1
