"""Answers that take long to write are written beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

SLOW_LOGPROBS = 4096  # log probabilities of an answer that take milliseconds to write

P = ParamSpec("P")
T = TypeVar("T")


async def written(num_logprobs: int, write: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `write` makes of that many log probabilities; beside the event loop where they are many."""
    if num_logprobs > SLOW_LOGPROBS:
        return await asyncio.to_thread(write, *arguments, **options)
    return write(*arguments, **options)
