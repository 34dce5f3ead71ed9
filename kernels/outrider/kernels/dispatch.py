"""Which of its two forms an op runs: the Triton kernel, or the PyTorch reference.

Every op asks here and as `dispatch.runs_triton`, so that a test which replaces the answer drives a whole model through
interpreted kernels on a CPU."""

from __future__ import annotations

from torch import Tensor


def runs_triton(x: Tensor) -> bool:
    """Whether an op with this input launches its Triton kernel."""
    return x.is_cuda
