"""Captured steps without a GPU: what is captured is run again on the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Replayed:
    """A GraphDevice. Copies and replays run in their order, and as late as a GPU may run them: when something is waited
    for. Beside operations that are not captured, which run at once, they must do so, too: not `late`."""

    def __init__(self, late: bool = True) -> None:
        self._late = late
        self.captured = 0
        self.replayed = 0
        self._stream: list[Callable[[], object]] = []

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def upload(self, target: Tensor, source: Tensor) -> None:
        self._launch(lambda: target.copy_(source))

    def wait_for_upload(self) -> None:
        self.synchronize()

    def download(self, source: Tensor) -> Tensor:
        self.synchronize()
        return source.clone().cpu()

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        self.captured += 1
        self.synchronize()
        step()

        def replay() -> None:
            self.replayed += 1
            self._launch(step)

        return replay

    def reserved_bytes(self) -> int:
        return self.captured << 20

    def _launch(self, call: Callable[[], object]) -> None:
        self._stream.append(call)
        if not self._late:
            self.synchronize()

    def synchronize(self) -> None:
        """Runs what is due."""
        for call in self._stream:
            call()
        self._stream.clear()
