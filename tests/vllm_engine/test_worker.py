"""A step's weights get from its plan to the sampler's rows; the worker's own platform is not needed for that."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from outrider.rpc.messages import TokenWeights
from outrider.vllm import patches
from outrider.vllm.weights import ATTRIBUTE
from outrider.vllm.worker import AdaptedWorker, Worker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its runner has three requests, and computes nothing."""
    monkeypatch.setattr(AdaptedWorker.__base__, "init_device", lambda self: None)
    monkeypatch.setattr(AdaptedWorker.__base__, "execute_model", lambda self, step: "computed")
    worker = object.__new__(Worker)
    worker.model_runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b", "c"], vocab_size=3))
    return worker


def test_weights_of_a_step_are_the_samplers_rows_of_this_step_alone(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "apply", lambda: False)
    worker.init_device()
    metadata = SpecDecodeMetadata.make_dummy([[1], [], [0, 2]], torch.device("cpu"))
    step = SchedulerOutput.make_empty()
    assert worker.execute_model(step) == "computed"
    assert worker.model_runner._get_spec_decode_draft_probs(metadata) is None
    setattr(step, ATTRIBUTE, {"c": [TokenWeights.of([0, 1], [1, 1])]})
    worker.execute_model(step)
    rows = worker.model_runner._get_spec_decode_draft_probs(metadata)
    assert rows.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    worker.execute_model(SchedulerOutput.make_empty())
    assert worker.model_runner._get_spec_decode_draft_probs(metadata) is None


@pytest.mark.parametrize("plugins_were_left_out", [True, False])
def test_what_no_plugin_mended_is_registered_again(
    plugins_were_left_out: bool, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = []
    monkeypatch.setattr(patches, "apply", lambda: plugins_were_left_out)
    monkeypatch.setattr(current_platform, "register_triton_kernel_overrides", lambda: registered.append(True))
    worker.init_device()
    assert registered == [True] * plugins_were_left_out


@pytest.mark.parametrize(("modules", "is_taken"), [({"layers.0.up", "layers.1.up"}, True), ({"layers.0.up"}, False)])
def test_an_adapter_is_taken_whole_or_not_at_all(modules: set[str], is_taken: bool) -> None:
    removed: list[int] = []
    adapter = SimpleNamespace(loras=dict.fromkeys(["layers.0.up", "layers.1.up"]))
    manager = SimpleNamespace(get_adapter={3: adapter}.__getitem__, modules=dict.fromkeys(modules))
    held = SimpleNamespace(_adapter_manager=manager)
    worker = object.__new__(AdaptedWorker)
    worker.model_runner = SimpleNamespace(add_lora=lambda _: True, remove_lora=removed.append, lora_manager=held)
    with nullcontext() if is_taken else pytest.raises(ValueError, match=r"no adapter of layers\.1\.up \(1 modules\)"):
        assert worker.add_lora(SimpleNamespace(lora_int_id=3))
    assert removed == ([] if is_taken else [3])
