"""A blocking call in a thread: its items, its errors, and its end when the reader stops or is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from outrider.client.background import MAX_AHEAD, Background

OnStop = Callable[[Callable[[], object]], None]


def test_items_and_errors() -> None:
    def three(on_stop: OnStop) -> Iterator[int]:
        yield from (1, 2, 3)
        raise ValueError("over")

    items = Background(three).items()
    assert [next(items), next(items), next(items)] == [1, 2, 3]
    with pytest.raises(ValueError, match="over"):
        next(items)


def test_a_reader_that_stops_aborts_the_call() -> None:
    released = threading.Event()

    def blocking(on_stop: OnStop) -> Iterator[int]:
        on_stop(released.set)
        yield 1
        released.wait(10)

    items = Background(blocking).items()
    assert next(items) == 1
    items.close()
    assert released.is_set()


def test_a_slow_reader_holds_the_call_up() -> None:
    taken: list[int] = []

    def fast(on_stop: OnStop) -> Iterator[int]:
        for number in range(10 * MAX_AHEAD):
            taken.append(number)
            yield number

    items = Background(fast).items()
    next(items)
    time.sleep(0.1)
    assert len(taken) <= MAX_AHEAD + 3
    assert len(list(items)) == 10 * MAX_AHEAD - 1


def test_an_interrupt_ends_it() -> None:
    code = (
        "import threading\n"
        "from outrider.client.background import Background\n"
        "def wait(on_stop):\n"
        "    done = threading.Event(); on_stop(done.set)\n"
        "    print('waiting', flush=True); done.wait(60); return iter(())\n"
        "    yield\n"
        "for _ in Background(wait).items(): pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    if process.stdout is None:
        pytest.fail("no output")
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    process.stdout.close()
