"""The probe tells an error that stays on the device from one that passes, and keeps no block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.engine.kv_cache_manager import BlockPool
from outrider.engine.model_runner import probe
from outrider.engine.worker import DeviceLost


def raising(*_: object) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("stays", [False, True])
def test_an_error_that_stays_is_a_lost_device(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", raising if stays else lambda device: None)
    runner: Any = SimpleNamespace(forward=raising, model=SimpleNamespace(device=torch.device("cuda")))
    pool = BlockPool(1)
    with pytest.raises(DeviceLost if stays else RuntimeError):
        probe(runner, pool)
    assert pool.num_free == 1


def test_where_sequences_hold_every_block_nothing_runs() -> None:
    runner: Any = SimpleNamespace(forward=raising)
    probe(runner, BlockPool(0))
