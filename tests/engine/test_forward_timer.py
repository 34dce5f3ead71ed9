"""A pass is timed without waiting for it."""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider.engine.model_runner import CudaTimer, HostTimer, timer_of


class Event:
    """A CUDA event on a device that passes one a millisecond, once it may."""

    passing = True
    clock = itertools.count()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self) -> None:
        self.at = next(self.clock)

    def query(self) -> bool:
        return self.passing

    def elapsed_time(self, other: Event) -> float:
        assert self.passing
        return float(other.at - self.at)


def test_events_are_read_once_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = timer_of(torch.device("cuda"))
    assert isinstance(timer, CudaTimer) and timer.microseconds() == 0
    timer.start()
    timer.stop()
    assert timer.microseconds() == 1000
    monkeypatch.setattr(Event, "passing", False)
    timer.start()
    next(Event.clock)
    timer.stop()
    assert timer.microseconds() == 1000  # still the last answer
    monkeypatch.setattr(Event, "passing", True)
    assert timer.microseconds() == 2000


def test_a_processors_pass_has_run_when_it_returns() -> None:
    timer = timer_of(torch.device("cpu"))
    assert isinstance(timer, HostTimer) and timer.microseconds() == 0
    timer.start()
    sum(range(10000))
    timer.stop()
    assert timer.microseconds() > 0
