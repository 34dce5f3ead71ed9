"""A GPU that is not here: tensors that say they lie on it, in this process's memory.

What an engine does to them is held to a device's rules: an operation takes tensors of one place (but for scalars and
indices), a Triton kernel takes only the device's, numpy and the C kernels never see them, and whatever waits for the
device is noted. So code for a GPU runs here from end to end, its kernels interpreted; only its speed and what a
compiler makes of the kernels are another matter. Captured steps are run again on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels import INTERPRETED
from support.models import SMALLEST, build_decoder, tiny_config, tiny_hf_model, tiny_state
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.engine import cuda_graphs, model_runner
from outrider.engine.loader import LoadedModel
from outrider.engine.model_runner import HostTimer


class Replayed:
    """A GraphDevice. Copies and replays run in their order, and as late as a GPU may run them: when something is waited
    for. Operations that are not captured run at once: who has some calls `synchronize` before."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self._stream: list[Callable[[], object]] = []

    def upload(self, target: Tensor, source: Tensor) -> None:
        sent = source.clone()
        self._stream.append(lambda: target.copy_(sent))

    def download(self, source: Tensor) -> Callable[[], Tensor]:
        found: list[Tensor] = []
        self._stream.append(lambda: found.append(source.clone().cpu()))

        def read() -> Tensor:
            self.synchronize()
            return found[0]

        return read

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
        with torch.inference_mode():
            for call in due:
                call()


DEVICE = torch.device("cuda")
WAITS = {  # operations whose result the host needs before it can go on
    "item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique",
}  # fmt: skip
TAKES_INDICES = {"__getitem__", "__setitem__", "index_put_", "index_put"}  # which may lie on the host
STAY_ON_HOST = {"shape", "dtype", "size", "dim", "stride", "numel", "__len__", "data_ptr", "is_contiguous", "ndim"}

VIEWS = STAY_ON_HOST | {"view", "split", "tensor_split", "unbind", "squeeze", "unsqueeze", "expand", "t"}


class DeviceTensor(Tensor):
    """Lies on the device."""

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class WrongPlace(AssertionError):
    """What a GPU would refuse."""


class PretendedDevice(TorchFunctionMode):
    """While it is entered, `cuda` is there. `waits` names each operation that waited for it, in order. Copies from
    pinned memory and replays run late: before the next operation that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[Replayed] = []
        self.waits: list[str] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name == "pin_memory":
            return args[0].clone()
        if name == "__get__" or func is torch.device:  # a property, or a name that stays what it is
            return func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        if not _is_view(name, args):
            self.run_what_is_due(tensors)
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        kwargs.pop("pin_memory", None)
        destination = self._destination(name, args, kwargs)
        self._check(name, args, tensors, on_device)
        plain_args, plain_kwargs = _map(_to_plain, args), _map(_to_plain, kwargs)
        result = func(*plain_args, **plain_kwargs)
        if name in STAY_ON_HOST:
            return result
        stays = destination is None and bool(on_device) and name not in WAITS
        if name == "copy_":
            stays = isinstance(args[0], DeviceTensor)
        return _map(_to_device, result) if destination == DEVICE or stays else result

    def new_graphs(self, device: torch.device) -> Replayed:
        """In the place of CudaGraphs."""
        self.graphs.append(Replayed())
        return self.graphs[-1]

    def run_what_is_due(self, tensors: Iterable[Tensor]) -> None:
        """As far as an operation with these tensors comes after it."""
        if any(isinstance(tensor, DeviceTensor) for tensor in tensors):
            with self:  # which is not entered while it handles a call
                for graphs in self.graphs:
                    graphs.synchronize()

    def _destination(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
        """Where a call says that its result is to be; the call itself is then made on the host."""
        named = kwargs.get("device")
        if name == "to":
            named = named or next((arg for arg in args[1:] if isinstance(arg, str | torch.device)), None)
            other = next((arg for arg in args[1:] if isinstance(arg, Tensor)), None)
            named = named or (other.device if other is not None else None)
        if name == "cuda":
            named = DEVICE
        if named is None:
            return None
        device = torch.device(named)
        if device.type == "cpu" and args and isinstance(args[0], DeviceTensor) and name == "to":
            self.waits.append("to")
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return torch.device(device.type)

    def _check(self, name: str, args: tuple[Any, ...], tensors: list[Tensor], on_device: Sequence[Tensor]) -> None:
        if not on_device:
            return
        if name == "numpy" or name == "__array__":
            raise WrongPlace("numpy cannot read a tensor of the device")
        if name in WAITS:
            self.waits.append(name)
        if name in ("__getitem__", "__setitem__") and any(t.dtype == torch.bool for t in _tensors(args[1])):
            self.waits.append("mask")
        if name == "copy_" and not isinstance(args[0], DeviceTensor):
            self.waits.append("copy_")
        if name == "repeat_interleave":
            self.waits.append(name)
        if name in TAKES_INDICES and isinstance(args[0], DeviceTensor):
            return
        if name in ("copy_", "to", "type_as"):
            return
        strangers = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
        if strangers:
            raise WrongPlace(f"{name} of tensors of the device and of the host")


def _is_view(name: str, args: tuple[Any, ...]) -> bool:
    """Whether nothing is launched for it."""
    if name != "__getitem__":
        return name in VIEWS
    places = args[1] if isinstance(args[1], tuple) else (args[1],)
    return not any(isinstance(place, list | Tensor) for place in places)


def _to_plain(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.as_subclass(Tensor)
    return torch.device("cpu") if isinstance(value, torch.device) or value == "cuda" else value


def _to_device(value: Any) -> Any:
    return value.as_subclass(DeviceTensor) if isinstance(value, Tensor) else value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Of every leaf of lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(change, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([_map(change, item) for item in value])
    if isinstance(value, dict):
        return {key: _map(change, item) for key, item in value.items()}
    return change(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@contextmanager
def pretended_device(checks_overflow: bool = False) -> Iterator[PretendedDevice]:
    """A device for the time of the context, whose Triton kernels are interpreted. Whether 32 bits suffice for every sum
    and product is asked in the kernels' own tests, and here where it is wanted: it takes a third of the time."""
    from triton.runtime import interpreter

    launch, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=checks_overflow)

    def checked(executor: Any, *args: Any, **kwargs: Any) -> None:
        given = list(_tensors((args, kwargs)))
        if not all(isinstance(tensor, DeviceTensor) for tensor in given):
            raise WrongPlace(f"{executor.fn.__name__} was given a tensor of the host")
        device.run_what_is_due(given)
        with torch._C.DisableTorchFunction():
            launch(executor, *_map(_to_plain, args), **_map(_to_plain, kwargs))

    with pytest.MonkeyPatch.context() as patch, PretendedDevice() as device:
        patch.setattr(interpreter.GridExecutor, "__call__", checked)
        patch.setattr(builder, "options", options)
        patch.setattr(model_runner, "timer_of", lambda _: HostTimer())
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(cuda_graphs, "CudaGraphs", device.new_graphs)
        yield device


@contextmanager
def device_of(request: pytest.FixtureRequest) -> Iterator[PretendedDevice | None]:
    """What a fixture gives whose parameter is "pretended" or "cuda"; None stands for a real one."""
    pytest.importorskip("triton")
    if (request.param == "pretended") != INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1" if INTERPRETED is False else "needs a GPU and TRITON_INTERPRET=0")
    checked = request.config.getoption("--prove")
    with nullcontext() if request.param == "cuda" else pretended_device(checked) as device:
        yield device


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[PretendedDevice | None]:
    """Holds a test to a device's rules where there is none."""
    with device_of(request) as device:
        yield device


@pytest.fixture(scope="module")
def checkpoint() -> tuple[Any, dict[str, Tensor]]:
    """The smallest model that a device runs here: its configuration and weights."""
    return tiny_config("llama", **SMALLEST), tiny_state(tiny_hf_model("llama", **SMALLEST))


@pytest.fixture(scope="module")
def on_host(checkpoint: Any) -> LoadedModel:
    """What is expected of the device."""
    return build_decoder(*checkpoint, dtype="float32", device="cpu")
