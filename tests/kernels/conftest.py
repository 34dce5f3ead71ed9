"""The kernels' tests run Triton interpreted where there is no GPU."""

from __future__ import annotations

from support.kernels import form, interpreter, triton_device

__all__ = ["form", "interpreter", "triton_device"]
