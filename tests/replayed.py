"""Captured steps without a GPU: what is captured is run again on the same memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Replayed:
    """A GraphDevice. Copies and replays run in their order, and as late as a GPU may run them: when something is waited
    for. Operations that are not captured run at once: who has some calls `synchronize` before."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self._stream: list[Callable[[], object]] = []

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def upload(self, target: Tensor, source: Tensor) -> None:
        self._stream.append(lambda: target.copy_(source))

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
            self._stream.append(step)

        return replay

    def reserved_bytes(self) -> int:
        return self.captured << 20

    def synchronize(self) -> None:
        """Runs what is due."""
        due, self._stream = self._stream, []
        for call in due:
            call()
