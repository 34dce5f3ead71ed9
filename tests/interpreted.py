"""Triton kernels run interpreted where there is no GPU, and compiled where there is one: a process has one mode, which
tests/conftest.py sets before anything imports Triton."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test of a Triton kernel puts its tensors: interpreted on the CPU, compiled on a GPU."""
    pytest.importorskip("triton")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a GPU and TRITON_INTERPRET=0")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """The interpreter as the tests need it."""
    if INTERPRETED and importlib.util.find_spec("triton") is not None:
        _count_by_scalars()
        _patch_once_a_launch()
        _multiply_row_by_row()


def _count_by_scalars() -> None:
    """The interpreter keeps scalars as arrays of one element, which numpy 2.4 no longer takes for whole numbers: a loop
    over a range that the kernel computes would fail."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _patch_once_a_launch() -> None:
    """The interpreter patches the language anew for every call of a device function, which is half of its time; once
    in a launch is enough."""
    from triton.runtime import interpreter

    patch_language, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()

    def patch_once(function: Any) -> Any:
        seen = list(function.__globals__.values())
        visible = tuple(any(value is language for value in seen) for language in languages)
        if visible in patched:
            return None  # a device function ignores it
        scope, is_launch = patch_language(function), not patched
        patched.add(visible)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


def _multiply_row_by_row() -> None:
    """The interpreter's product of tiles is one call of OpenBLAS, some of whose kernels (Haswell's and Zen's) add a row
    up in an order that depends on its place. On a GPU it does not: here, too, each row is a product of its own."""
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data[..., None, :], b.data[..., None, :, :]  # [rows, 1, in], [1, in, out]
        products = np.matmul(left, right, dtype=d.data.dtype)[..., 0, :]
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
