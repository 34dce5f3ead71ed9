"""Virtual time: events in order, links that keep it, and a device that takes turns."""

from __future__ import annotations

import random

from support.environment import SEED

from outrider.planner.simulate import Clock, Device, OneWayLink


def test_events_run_in_the_order_of_their_times() -> None:
    clock, seen = Clock(), list[tuple[str, float]]()
    for name, when in (("late", 3.0), ("first", 1.0), ("second", 1.0)):
        clock.at(when, lambda name=name: seen.append((name, clock.now)))  # type: ignore[misc]
    never = clock.call_later(2.0, lambda: seen.append(("never", clock.now)))
    never.cancel()
    clock.run(2.5)
    assert seen == [("first", 1.0), ("second", 1.0)] and clock.now == 2.5
    clock.at(0.0, lambda: seen.append(("past", clock.now)))
    while clock.step():
        pass
    assert seen[2:] == [("past", 2.5), ("late", 3.0)]


def test_a_link_keeps_the_order_of_what_it_carries() -> None:
    clock, dice, arrived = Clock(), random.Random(SEED), list[tuple[int, float]]()
    delays = [dice.uniform(0.0, 1.0) for _ in range(100)]
    link = OneWayLink(clock, iter(delays).__next__)
    for number in range(100):
        link.send(lambda number=number: arrived.append((number, clock.now)), after=0.5)  # type: ignore[misc]
    clock.run(10.0)
    assert [number for number, _ in arrived] == list(range(100))
    assert [when for _, when in arrived] == [0.5 + max(delays[: number + 1]) for number in range(100)]


class Recorder:
    """A device whose steps take a second each while it has work."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.work = 0
        self.taken: list[tuple[str, float]] = []
        self.steps: list[float] = []
        self.device = Device(self.clock, self.step)

    def step(self) -> tuple[float, float | None]:
        if not self.work:
            return 0.0, None
        self.work -= 1
        self.steps.append(self.clock.now)
        return 1.0, 0.0

    def put(self, name: str, when: float) -> None:
        self.clock.at(when, lambda: self.device.put(lambda: self.taken.append((name, self.clock.now))))


def test_commands_wait_for_the_step_under_way() -> None:
    recorder = Recorder()
    recorder.work = 2
    recorder.put("begins", 1.0)
    recorder.put("waits", 1.5)
    recorder.put("idle", 7.25)
    recorder.clock.run(10.0)
    assert recorder.taken == [("begins", 1.0), ("waits", 2.0), ("idle", 7.25)]
    assert recorder.steps == [1.0, 2.0] and recorder.device.busy_s == 2.0


def test_a_device_that_stalls_takes_nothing_and_one_that_is_reset_forgets() -> None:
    recorder = Recorder()
    recorder.clock.at(1.0, lambda: recorder.device.stall(2.0))
    recorder.put("stalled", 1.5)
    recorder.clock.run(4.0)
    assert recorder.taken == [("stalled", 3.0)]
    recorder.clock.at(5.0, lambda: recorder.device.stall(2.0))
    recorder.put("lost", 5.5)
    recorder.clock.at(6.0, recorder.device.reset)
    recorder.put("after", 6.5)
    recorder.clock.run(10.0)
    assert recorder.taken == [("stalled", 3.0), ("after", 6.5)]
