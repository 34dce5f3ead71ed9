"""Memory that the kernels read from end to end."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes


def in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Empty memory, in huge pages as far as it fills them and the system has them: whoever reads all of it meets fewer
    ends of pages."""
    count = math.prod(shape)
    whole = count * dtype.itemsize // HUGE_PAGE * HUGE_PAGE  # bytes
    if sys.platform != "linux" or not whole:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    with suppress(OSError):  # a system built without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
