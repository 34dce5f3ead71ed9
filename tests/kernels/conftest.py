"""The kernels' tests run Triton interpreted where there is no GPU."""

from __future__ import annotations

from interpreted import interpreted_loops, one_patch_a_launch, triton_device

__all__ = ["interpreted_loops", "one_patch_a_launch", "triton_device"]
