"""Keeps the fault of one sequence from the others that share its step, and one of the process from being charged to
sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from outrider.engine.device_thread import DeviceLost

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_apart(
    items: Sequence[Item],
    run: Callable[[Sequence[Item]], Result | None],  # None where it had no room for any
    give_up: Callable[[Item, Exception], None],
    hand_over: Callable[[Item, Exception], None],
) -> Iterator[Result]:
    """Runs all items at once. Where that raises, it runs halves of them, down to the ones that fail alone: these are
    given up. Where two have failed alone and nothing has run, it is no item's fault: nothing more is tried, and all
    are handed over. DeviceLost goes to the caller: nothing can run any more."""
    waiting = [items] if items else []
    alone: list[tuple[Item, Exception]] = []
    has_run = False
    while waiting and (has_run or len(alone) < 2):
        # After the first one that failed alone, the largest parts show whether anything runs.
        part = waiting.pop(0 if alone and not has_run else -1)
        try:
            result = run(part)
        except DeviceLost:
            raise
        except Exception as error:
            if len(part) == 1:
                alone.append((part[0], error))
            else:
                log.exception("a step of %d sequences failed; they run again in halves", len(part))
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
        else:
            if result is not None:
                has_run = True
                yield result
    if has_run or len(alone) < 2:
        for item, cause in alone:
            give_up(item, cause)
    else:
        for item in items:
            hand_over(item, alone[-1][1])
