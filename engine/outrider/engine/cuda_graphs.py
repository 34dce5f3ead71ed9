"""CUDA's side of captured steps: the graphs, their pool, and the copies between the host and the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 2  # runs before a capture: they compile kernels, and give the library of products its workspace


class CudaGraphs:
    """The GraphDevice of one model on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._downloaded = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def host_buffer(self, size: int) -> Tensor:
        """Pinned: the copy goes on while the host prepares the replay."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """On the current stream, before the replay."""
        target.copy_(source, non_blocking=True)
        self._uploaded.record()

    def wait_for_upload(self) -> None:
        """A step whose logits were read has waited already."""
        self._uploaded.synchronize()

    def download(self, source: Tensor) -> Tensor:
        """Into pinned memory, of which the allocator keeps some at hand."""
        found = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        found.copy_(source, non_blocking=True)
        self._downloaded.record()
        self._downloaded.synchronize()
        return found

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Other threads may use the device meanwhile: only this one's calls are held to the rules of a capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay

    def reserved_bytes(self) -> int:
        """Of the caching allocator, the graphs' pool included."""
        return torch.cuda.memory_reserved(self._device)
