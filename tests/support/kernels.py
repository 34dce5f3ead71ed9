"""How kernels are tested: interpreted where there is no GPU, compiled for one that is not there, between poisoned
memory, with draft weights as they cross the wire.

A process has one mode, which tests/conftest.py sets before anything imports Triton. `compile_only` is to be used in
a process of its own, in which TRITON_INTERPRET is 0 and nothing has launched a kernel: the interpreter runs kernels
as Python, so it takes much that the compiler refuses."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.kernels import dispatch

BAD_VECTORS: dict[str, Vector] = {
    "missing": None,
    "empty": ((), ()),
    "ids and weights of unequal number": ((0, 1), (1,)),
    "duplicate id": ((1, 0, 1), (1, 1, 1)),
    "zero weight": ((0, 1, 2), (0, 1, 1)),
    "negative weight": ((0, 1), (-1, 3)),
    "total of 2^24": ((0, 1), (1 << 23, 1 << 23)),
    "one huge weight": ((0, 1), (1, 2**62)),
    "id outside the vocabulary": ((1, 3), (1, 1)),
    "negative id": ((1, -1), (1, 1)),
    "lacks the drafted id": ((0, 2), (1, 1)),
}

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


@pytest.fixture(params=["reference", "triton", pytest.param("gpu", marks=pytest.mark.gpu)])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where a test puts its tensors, so that an operation runs in this form: PyTorch's, or Triton's interpreted or
    compiled."""
    if request.param == "reference":
        return torch.device("cpu")
    pytest.importorskip("triton")
    if (request.param == "triton") != INTERPRETED:
        pytest.skip(f"needs TRITON_INTERPRET={int(not INTERPRETED)}")
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """The interpreter as the tests need it."""
    if INTERPRETED and importlib.util.find_spec("triton") is not None:
        _count_by_scalars()
        _patch_once_a_launch()
        _remember_types()
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

            def restored() -> None:
                patched.clear()
                restore()

            scope.restore = restored
        return scope

    interpreter._patch_lang = patch_once


def _remember_types() -> None:
    """For every value the interpreter looks up numpy's type in a table that it builds anew, and wraps each number of
    its shape: a fifth of its time, for the same few types and shapes."""
    from triton.runtime import interpreter

    tl = interpreter.tl
    numpy_types: dict[str, np.dtype[Any]] = {}
    numpy_type = interpreter._get_np_dtype

    def remembered(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    @functools.cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def made(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = wrapped(tuple(kind.shape) if kind.is_block() else ())

    interpreter._get_np_dtype = remembered
    tl.tensor.__init__ = made


def _multiply_row_by_row() -> None:
    """The interpreter's product of tiles is one call of OpenBLAS, some of whose kernels (Haswell's and Zen's) add a row
    up in an order that depends on its place. On a GPU it does not: here, too, each row is a product of its own."""
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data[..., None, :], b.data[..., None, :, :]  # [rows, 1, in], [1, in, out]
        products = np.matmul(left, right, dtype=d.data.dtype)[..., 0, :]
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


POISON_INTEGER = -(1 << 20)
MARGIN = 7


def poisoned(values: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """A copy of `values`, [rows, width] or [width], with NaN, or a large negative integer, all round."""
    rows, width = (values.shape[0], values.shape[1]) if values.dim() == 2 else (1, values.shape[0])
    poison = float("nan") if values.is_floating_point() else POISON_INTEGER
    memory = torch.full((rows + 2, MARGIN + width + MARGIN), poison, dtype=values.dtype, device=device)
    inside = memory[1 : rows + 1, MARGIN : MARGIN + width]
    inside.copy_(values.view(rows, width))
    return inside if values.dim() == 2 else inside[0]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fills what torch.empty returns with NaN, or the greatest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


Vector = tuple[Sequence[int], Sequence[int]] | None


def packed(vectors: Sequence[Vector]) -> list[tuple[bytes, bytes] | None]:
    """Little-endian uint32; what is negative wraps around, as it would on a careless sender."""
    return [None if vector is None else (_pack(vector[0]), _pack(vector[1])) for vector in vectors]


def _pack(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *(int(value) & 0xFFFFFFFF for value in values))


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


class Compiled(NamedTuple):
    """A launch that was compiled."""

    name: str
    binary: str  # its hash
    shared: int  # bytes of shared memory of one program
    tensor_cores: bool
    fuses: bool  # a product and a sum into one rounding


def compile_only(capability: int) -> list[Compiled]:
    """From now on `kernel[grid](...)` compiles. Returns a list that gets every launch."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_NoDevice(capability))
    compiled: list[Compiled] = []

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            binary = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            tensor_cores = any(name in binary.asm["ptx"] for name in ("mma.sync", "wgmma.mma_async"))
            fuses = "fma.rn" in binary.asm["ptx"]
            compiled.append(Compiled(kernel.fn.__name__, binary.hash, binary.metadata.shared, tensor_cores, fuses))
            return binary

        return launch

    JITFunction.__getitem__ = launcher
    return compiled
