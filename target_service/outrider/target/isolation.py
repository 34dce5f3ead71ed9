"""Keeps the fault of one sequence from the others that share its step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from outrider.engine.device_thread import DeviceLost

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_apart(
    items: Sequence[Item], run: Callable[[Sequence[Item]], Result], give_up: Callable[[Item, Exception], None]
) -> Iterator[Result]:
    """Runs all items at once. Where that raises, it runs halves of them, down to the ones that fail alone: these are
    given up. DeviceLost goes to the caller: nothing can run any more."""
    if not items:
        return
    try:
        result = run(items)
    except DeviceLost:
        raise
    except Exception as error:
        if len(items) == 1:
            give_up(items[0], error)
            return
        log.exception("a step of %d sequences failed; they run again in halves", len(items))
    else:
        yield result
        return
    middle = len(items) // 2
    for half in (items[:middle], items[middle:]):
        yield from run_apart(half, run, give_up)
