"""One product on the CPU by the C kernels, for what is no decoder's pass. Weights that are bfloat16 numbers are read as
16 bits, and a row's bits do not depend on the other rows."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.cpu.decoder import DIM_MULTIPLE, Weights, is_bfloat16, kind_for, matrix_of, may_round
from outrider.kernels.cpu.library import cpu_library


def can_multiply(weight: Tensor) -> bool:  # [out, in]
    """Whether the kernels are there and take it."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[1] % DIM_MULTIPLE == 0
    return fits and cpu_library() is not None


class CpuLinear:
    """y = x W^T + b. One thread at a time may call it: it keeps its scratch memory."""

    def __init__(
        self,
        weight: Weights,  # [out, in]
        bias: Tensor | None = None,  # [out] float32
        rounds: bool = False,  # rows become integers of 16 bits, where the weight is quantised
    ) -> None:
        library: Any = cpu_library()
        self._library = library
        self._library.matrix_scratch.restype = c_int64
        kind = kind_for(is_bfloat16(weight)) if isinstance(weight, Tensor) else None
        self._matrix, self._kept = matrix_of(weight, bias, kind, rounds and may_round(weight))
        self._outputs, self._inputs = self._matrix.outputs, self._matrix.inputs
        self._scratch = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:  # [rows, in] float32 -> [rows, out]
        """The product. Raises ValueError for rows of another width."""
        rows, threads = len(x), torch.get_num_threads()
        if x.shape[1] != self._inputs:
            raise ValueError(f"rows of {x.shape[1]} numbers; allowed: {self._inputs}")
        out = torch.empty(rows, self._outputs)
        if rows:
            x = x.contiguous()
            size = self._library.matrix_scratch(byref(self._matrix), c_int64(rows), c_int64(threads))
            if self._scratch.numel() < size:
                self._scratch = torch.zeros(size)
            self._library.matrix_product(
                byref(self._matrix), c_void_p(x.data_ptr()), c_int64(rows), c_void_p(out.data_ptr()),
                c_void_p(self._scratch.data_ptr()), c_int64(threads),
            )  # fmt: skip
        return out
