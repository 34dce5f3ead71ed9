"""How long a pass took: by the host's clock, or by the device's events, which nobody waits for."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class ForwardTimer(Protocol):
    """Times one pass after the other."""

    def start(self) -> None:
        """Before a pass."""

    def stop(self) -> None:
        """After it was launched."""

    def microseconds(self) -> int:
        """Of the last pass that is known to have ended; 0 if none is."""


def timer_of(device: torch.device) -> ForwardTimer:
    """The one that tells the time of a pass on this device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


class HostTimer:
    """For a pass that has run when it returns."""

    def __init__(self) -> None:
        self._started = 0
        self._nanoseconds = 0

    def start(self) -> None:
        """Before a pass."""
        self._started = time.perf_counter_ns()

    def stop(self) -> None:
        """After it."""
        self._nanoseconds = time.perf_counter_ns() - self._started

    def microseconds(self) -> int:
        """Of the last pass."""
        return self._nanoseconds // 1000


class CudaTimer:
    """Of events on the current stream. A pass that still runs when it is asked for leaves the last answer."""

    def __init__(self) -> None:
        self._first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ran = False
        self._known = 0

    def start(self) -> None:
        """Before a pass."""
        self._first.record()

    def stop(self) -> None:
        """After it was launched."""
        self._last.record()
        self._ran = True

    def microseconds(self) -> int:
        """Reads the events where both have passed; whoever read the logits has waited for them."""
        if self._ran and self._last.query():  # type: ignore[no-untyped-call]
            self._known = round(self._first.elapsed_time(self._last) * 1000)
        return self._known
