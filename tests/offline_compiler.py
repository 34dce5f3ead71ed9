"""Compiles Triton kernels for a GPU that is not there: launches become compilations, and nothing runs.

The interpreter runs kernels as Python, so it takes much that the compiler refuses. To be used in a process of its own,
in which TRITON_INTERPRET is 0 and nothing has launched a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _NoDevice:
    """As much of a driver as a compilation asks for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(capability: int) -> list[tuple[str, str]]:
    """From now on `kernel[grid](...)` compiles. Returns a list that gets each launch's name, and its
    binary's hash."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_NoDevice(capability))
    compiled: list[tuple[str, str]] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            binary = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            compiled.append((kernel.fn.__name__, binary.hash))
            return binary

        return launch

    JITFunction.__getitem__ = launcher
    return compiled
