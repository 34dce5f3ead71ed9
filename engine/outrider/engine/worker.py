"""The one thread that owns a model and its device: a queue in, futures out, steps in between.

The event loop of a service never runs a forward pass; it submits commands, which the thread applies between two
steps."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

RETRY_S = 0.05  # pause after a failed step, unless a command comes
MOST_WAIT_S = 3600.0  # without a step: a deadline may lie further away than a queue can wait

Command = TypeVar("Command")
CommandIn = TypeVar("CommandIn", contravariant=True)
Result = TypeVar("Result")


class DeviceStopped(RuntimeError):
    """The device thread has ended and takes nothing more."""


class DeviceLost(RuntimeError):
    """The device takes no more work from this process, as after an illegal access: only a new process can use it."""


def require_device(device: torch.device) -> None:
    """To be called after an error on a device: raises DeviceLost, from the device's own error, if it stays."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(f"{device} cannot be used any more: {error}") from error


class EngineCore(Protocol[CommandIn]):
    """What runs on the device thread. No method of it is ever called from elsewhere."""

    def handle(self, command: CommandIn) -> None:
        """Applies a command. It runs nothing on the device."""

    def step(self, now: float) -> float | None:
        """Does one step. Returns None when idle (wait for a command), 0.0 to step again at once, or the most seconds to
        wait for a command before the next step."""

    def on_error(self, error: Exception) -> None:
        """`handle` or `step` raised. Fails what it must; if this raises too, the thread ends. It ends at once by
        DeviceLost."""


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    future: Future[Any]


class _Stop:
    """Ends the thread after what was submitted before."""


def set_switch_interval() -> None:
    """Sets how often threads take turns, for a process whose event loop shares the interpreter with a device thread;
    `__main__` calls it once."""
    sys.setswitchinterval(0.0005)


class DeviceWorker(Generic[Command]):
    """Runs an engine from construction on until `stop`."""

    def __init__(
        self,
        engine: EngineCore[Command],
        name: str,
        num_threads: int | None = None,  # of torch's products; the setting belongs to the thread
        device: torch.device | str = "cpu",  # of its model
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._clock = clock
        self._queue: queue.SimpleQueue[Command | _Call | _Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True
        self._step_started: float | None = None
        self.ended: Future[None] = Future()
        """Done when the thread has ended; with the error that ended it, if it was not `stop`."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still takes commands and steps."""
        return self._thread.is_alive()

    def step_age_s(self) -> float:
        """For how long the step under way has run; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    def submit(self, command: Command) -> None:
        """Queues a command, from any thread. Raises DeviceStopped."""
        self._put(command)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Runs a function on the device thread, after what was submitted before, and returns its result or exception.
        DeviceLost ends the thread, too."""
        future: Future[Result] = Future()
        self._put(_Call(function, future))
        return future

    def replace_engine(self, engine: EngineCore[Command]) -> None:
        """Another engine takes what comes from now on. To be called on the thread, between two steps."""
        self._engine = engine

    def stop(self, timeout: float | None = None) -> None:
        """Lets the thread end once it has taken what was submitted before, and joins it. Calls left over are failed."""
        with self._lock:
            if self._open:
                self._open = False
                self._queue.put(_Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _put(self, item: Command | _Call) -> None:
        with self._lock:
            if not self._open:
                raise DeviceStopped(f"{self._thread.name} has stopped")
            self._queue.put(item)

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        if self._device.type == "cuda":
            _take_device(self._device)
        failed: Exception | None = None
        try:
            wait: float | None = None
            while self._apply(wait):
                wait = self._step()
        except Exception as error:
            logger.critical("%s ends: its worker could not recover", self._thread.name, exc_info=True)
            failed = error
        finally:
            self._close()
        if failed is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failed)
        del self._engine  # whoever keeps the worker does not keep the device's memory

    def _apply(self, wait: float | None) -> bool:
        """Waits as long as the engine asked for, then takes everything that is queued; False to end."""
        try:
            item = self._queue.get(block=wait != 0.0, timeout=None if wait is None else min(wait, MOST_WAIT_S))
            while True:
                if isinstance(item, _Stop):
                    return False
                self._apply_one(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return True

    def _apply_one(self, item: Command | _Call) -> None:
        if isinstance(item, _Call):
            if item.future.set_running_or_notify_cancel():
                try:
                    item.future.set_result(item.function())
                except BaseException as error:
                    item.future.set_exception(error)
                    if isinstance(error, DeviceLost):
                        raise
            return
        try:
            self._engine.handle(item)
        except Exception as error:
            self._report(error, "a command")

    def _step(self) -> float | None:
        self._step_started = self._clock()
        try:
            return self._engine.step(self._step_started)
        except Exception as error:
            self._report(error, "a step")
            return RETRY_S
        finally:
            self._step_started = None

    def _report(self, error: Exception, what: str) -> None:
        if isinstance(error, DeviceLost):
            raise error
        logger.error("%s: %s failed", self._thread.name, what, exc_info=error)
        self._engine.on_error(error)

    def _close(self) -> None:
        with self._lock:
            self._open = False
            while True:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    return
                if isinstance(item, _Call) and item.future.set_running_or_notify_cancel():
                    item.future.set_exception(DeviceStopped(f"{self._thread.name} has stopped"))


def _take_device(device: torch.device) -> None:
    """The device and a stream of its own for this thread: what another thread of the process has launched, as a target
    beside its draft, is not waited for. What was launched before is."""
    if device.index is not None:
        torch.cuda.set_device(device)  # a thread's own; Triton launches there, wherever its tensors are
    torch.cuda.synchronize(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))
