"""One thread fewer where that is faster beside a draft."""

from __future__ import annotations

import pytest

from outrider.target_service import threads
from outrider.target_service.threads import TURN, TURNS, ThreadSplit, thread_split

COSTS = ((1, 10_000), (8, 20_000), (64, 100_000))


@pytest.mark.parametrize(("contention", "chosen"), [(1.0, 4), (1.25, 4), (1.6, 3)])
def test_both_are_tried_and_the_faster_stays(contention: float, chosen: int) -> None:
    """A pass of three threads takes 4/3 of the profiled time; one of four suffers where the draft has a core."""
    used = [4]
    split = ThreadSplit(4, COSTS, used.append)
    for index in range(2 * TURN * TURNS + 50):
        num_rows, profiled_us = (5, 20_000) if index % 3 else (64, 100_000)
        slower = contention if used[-1] == 4 else 4 / 3
        split.add_step(num_rows, 1e-6 * profiled_us * slower)
    assert used[-1] == chosen and used[:4] == [4, 3, 4, 3] and len(used) == 2 * TURNS + 1


def test_what_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(threads, "usable_threads", lambda: 8)
    assert thread_split(None, "c-avx512", COSTS)
    assert not thread_split(8, "c-avx512", COSTS)  # by the flag
    assert not thread_split(None, "torch-2.13-avx512", COSTS)  # its bits depend on the threads
    assert not thread_split(None, "c-avx512", ())
    monkeypatch.setattr(threads, "usable_threads", lambda: 4)
    assert not thread_split(None, "c-avx512", COSTS)  # by the environment
    for count in ("usable_cores", "usable_threads"):
        monkeypatch.setattr(threads, count, lambda: 2)
    assert not thread_split(None, "c-avx512", COSTS)
