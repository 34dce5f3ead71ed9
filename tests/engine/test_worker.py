"""The device thread: commands between steps, waits, errors, the end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
import torch

from outrider.engine.worker import DeviceLost, DeviceStopped, DeviceWorker, require_device

TIMEOUT = 30.0


class Recorder:
    """A worker that does what the test says and remembers what happened."""

    def __init__(self, step: Callable[[int], float | None] = lambda count: None) -> None:
        self.commands: list[object] = []
        self.errors: list[Exception] = []
        self.steps = 0
        self.stepped = threading.Event()
        self.fatal = False
        self._step = step

    def handle(self, command: object) -> None:
        if isinstance(command, Exception):
            raise command
        self.commands.append(command)

    def step(self, now: float) -> float | None:
        self.steps += 1
        try:
            return self._step(self.steps)
        finally:
            self.stepped.set()

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)
        if self.fatal:
            raise error


def settle(thread: DeviceWorker[object]) -> None:
    """Waits until everything submitted before is handled."""
    thread.call(lambda: None).result(TIMEOUT)


def test_commands_arrive_in_order_and_an_idle_worker_sleeps() -> None:
    worker = Recorder()
    thread = DeviceWorker[object](worker, "device")
    for number in range(50):
        thread.submit(number)
    settle(thread)
    steps = worker.steps
    time.sleep(0.02)
    assert worker.commands == list(range(50))
    assert worker.steps - steps <= 1
    thread.stop(TIMEOUT)
    assert not thread.is_alive


def test_zero_steps_again_at_once_and_none_ends_it() -> None:
    worker = Recorder(lambda count: 0.0 if count < 100 else None)
    thread = DeviceWorker[object](worker, "device")
    thread.submit("go")
    deadline = time.monotonic() + TIMEOUT
    while worker.steps < 100 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.steps >= 100
    thread.stop(TIMEOUT)


def test_a_wait_ends_by_time_or_by_a_command() -> None:
    worker = Recorder(lambda count: 0.01 if count < 3 else 60.0)
    thread = DeviceWorker[object](worker, "device")
    thread.submit("go")
    deadline = time.monotonic() + TIMEOUT
    while worker.steps < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert worker.steps == 3  # two waits ran out
    worker.stepped.clear()
    thread.submit("wake")
    assert worker.stepped.wait(TIMEOUT)  # long before 60 s
    thread.stop(TIMEOUT)


def test_no_wait_is_too_long_for_the_queue() -> None:
    """A request's deadline is 64 bits of milliseconds."""
    worker = Recorder(lambda count: 2.0**64 / 1000)
    thread = DeviceWorker[object](worker, "device")
    thread.submit("go")
    assert worker.stepped.wait(TIMEOUT)
    settle(thread)
    assert thread.is_alive and not worker.errors
    thread.stop(TIMEOUT)


def test_call_runs_on_the_thread_and_carries_exceptions() -> None:
    thread = DeviceWorker[object](Recorder(), "device", num_threads=1)
    assert thread.call(lambda: threading.current_thread().name).result(TIMEOUT) == "device"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(TIMEOUT)
    assert thread.is_alive
    thread.stop(TIMEOUT)


def test_step_age_is_that_of_the_step_under_way() -> None:
    entered, leave = threading.Event(), threading.Event()

    def step(count: int) -> float | None:
        if count == 1:
            entered.set()
            leave.wait(TIMEOUT)
        return None

    thread = DeviceWorker[object](Recorder(step), "device")
    assert thread.step_age_s() == 0.0
    thread.submit("go")
    assert entered.wait(TIMEOUT)
    time.sleep(0.01)
    assert thread.step_age_s() >= 0.01
    leave.set()
    thread.stop(TIMEOUT)
    assert thread.step_age_s() == 0.0


def test_errors_are_logged_and_given_to_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    def step(count: int) -> float | None:
        if count == 1:
            raise ValueError("step broke")
        return None

    worker = Recorder(step)
    thread = DeviceWorker[object](worker, "device")
    with caplog.at_level(logging.ERROR):
        thread.submit(KeyError("command broke"))
        deadline = time.monotonic() + TIMEOUT
        while len(worker.errors) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert [str(error) for error in worker.errors] == ["'command broke'", "step broke"]
    assert "step broke" in caplog.text
    assert thread.is_alive
    thread.stop(TIMEOUT)


def test_an_error_handler_that_raises_ends_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    worker = Recorder()
    worker.fatal = True
    thread = DeviceWorker[object](worker, "device")
    thread.submit(ValueError("no way on"))
    deadline = time.monotonic() + TIMEOUT
    while thread.is_alive and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not thread.is_alive
    with pytest.raises(DeviceStopped):
        thread.submit("late")
    with pytest.raises(DeviceStopped):
        thread.call(lambda: None)
    thread.stop(TIMEOUT)


def test_calls_queued_behind_the_end_fail() -> None:
    entered, leave = threading.Event(), threading.Event()
    worker = Recorder()
    worker.fatal = True
    thread = DeviceWorker[object](worker, "device")

    def hold() -> None:
        entered.set()
        leave.wait(TIMEOUT)

    thread.call(hold)
    assert entered.wait(TIMEOUT)
    thread.submit(ValueError("fatal"))
    left_over = thread.call(lambda: None)
    leave.set()
    with pytest.raises(DeviceStopped):
        left_over.result(TIMEOUT)
    thread.stop(TIMEOUT)


def test_stop_takes_what_was_submitted_before_and_may_be_repeated() -> None:
    worker = Recorder()
    thread = DeviceWorker[object](worker, "device")
    for number in range(10):
        thread.submit(number)
    thread.stop(TIMEOUT)
    thread.stop(TIMEOUT)
    assert worker.commands == list(range(10))


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", []), ("cuda:1", [1])])
def test_the_current_device_is_the_models(device: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the thread's own; a device without a number is the one that is current."""
    found: list[int] = []
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(device.index))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    thread: DeviceWorker[object] = DeviceWorker(Recorder(), "test", device=device)
    thread.call(lambda: None).result(TIMEOUT)
    thread.stop(TIMEOUT)
    assert found == expected
    assert streams == ([f"a stream of {device}"] if device != "cpu" else [])  # models of one process run side by side


def test_a_lost_device_ends_the_thread_and_nobody_is_told_of_an_error() -> None:
    def lose(_: int) -> None:
        raise DeviceLost("the device is gone")

    worker = Recorder(lose)
    thread = DeviceWorker[object](worker, "device")
    thread.submit("go")
    assert isinstance(thread.ended.exception(TIMEOUT), DeviceLost)
    assert not worker.errors and worker.steps == 1
    with pytest.raises(DeviceStopped):
        thread.submit("more")


def test_a_call_that_loses_the_device_ends_the_thread() -> None:
    def probe() -> None:
        raise DeviceLost("the device is gone")

    thread = DeviceWorker[object](Recorder(), "device")
    with pytest.raises(DeviceLost):
        thread.call(probe).result(TIMEOUT)
    assert isinstance(thread.ended.exception(TIMEOUT), DeviceLost)


def test_a_thread_that_is_stopped_ends_without_an_error() -> None:
    thread = DeviceWorker[object](Recorder(), "device")
    thread.stop(TIMEOUT)
    assert thread.ended.exception(TIMEOUT) is None


def test_a_device_is_lost_where_its_error_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    require_device(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    require_device(torch.device("cuda"))  # as after memory ran out
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        require_device(torch.device("cuda"))
