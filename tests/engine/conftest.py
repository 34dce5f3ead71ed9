"""A whole decoder runs by the Triton kernels, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from support.kernels import interpreter, triton_device

from outrider.kernels import dispatch

__all__ = ["interpreter", "triton_device", "triton_everywhere"]


@pytest.fixture
def triton_everywhere(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where a model is to be put whose every op runs its Triton kernel."""
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    monkeypatch.setattr("outrider.kernels.cpu.decoder.cpu_library", lambda: None)  # no C kernels in their place
    return triton_device
