"""What was learned from ended sequences is put in use. The weights are loaded on a thread of their own, and take their
place between two steps: what is open goes on with them, and nothing that was drafted is drafted again. What cannot be
used is told, and what was in use stays."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol

from outrider.rpc.errors import FailedPrecondition, InvalidArgument, Violation, Violations, one_line
from outrider.rpc.learning.learned import LearnedAdapters, Weights
from outrider.rpc.messages import MAX_NAME_CHARS, LearnedDraft, LearningKey, PutLearned

if TYPE_CHECKING:
    from outrider.rpc.engine_service import DeviceThread
    from outrider.rpc.reloads import OneReload

logger = logging.getLogger(__name__)

MAX_DIGEST, MAX_GROUP, MAX_PATH = 128, 32, 4096  # characters
MAX_LEFT_OUT = 64  # callers


class Learns(Protocol[Weights]):
    """What drafts, and takes learned weights."""

    @property
    def learned(self) -> LearnedAdapters[Weights]:
        """Those in use."""

    def load_learned(self, folder: Path) -> Weights:
        """Reads a folder in PEFT's layout. From any thread. Raises FailedPrecondition where there is no room for any,
        and ValueError for what is no adapter of its weights."""

    def put_learned(self, key: LearningKey, adapter: Weights | None, left_out: Collection[str] = ()) -> int:
        """Between two steps, drafts for a key's sequences with these, but for callers who are `left_out`; None: as
        without them. Returns how many open sequences go on so."""


@dataclass(slots=True, eq=False)
class LearnedDrafts(Generic[Weights]):
    """Puts them in use, one change at a time, and none beside another model's. Belongs to the event loop."""

    drafts: Callable[[], Learns[Weights]]  # what does now
    thread: DeviceThread
    one: OneReload
    listener: Callable[[tuple[LearnedDraft, ...]], None] = lambda rows: None  # is told what is in use

    async def put(self, key: LearningKey, path: str, left_out: Sequence[str] = ()) -> PutLearned:
        """Lets a folder's weights draft for a key (empty: the model alone), but for callers who are `left_out`. Raises
        InvalidArgument and FailedPrecondition."""
        _check(key, path, left_out)
        return await self.one.run(partial(self._put, key, path, left_out))

    async def _put(self, key: LearningKey, path: str, left_out: Sequence[str]) -> PutLearned:
        began, drafts = time.monotonic(), self.drafts()
        adapter = await asyncio.to_thread(_loaded, drafts, Path(path)) if path else None
        load_s = time.monotonic() - began
        swap = partial(_swap, drafts, key, adapter, left_out)
        try:
            before, num_sequences, pause_s = await asyncio.wrap_future(self.thread.call(swap))
        except (ValueError, MemoryError, RuntimeError) as error:
            raise FailedPrecondition(f"path: {path} cannot be used: {one_line(error)}", reason="NOT_LOADED") from error
        self.listener(drafts.learned.rows)
        after = "" if adapter is None else adapter.digest
        logger.info("%s drafts for %s in place of %s", _named(after), key.said, _named(before))
        return PutLearned(before, after, round(1000 * load_s), round(1000 * pause_s), num_sequences)


def _loaded(drafts: Learns[Weights], folder: Path) -> Weights:
    try:
        return drafts.load_learned(folder)
    except ValueError as error:
        allowed = "the folder of an adapter of what drafts here in PEFT's layout"
        raise InvalidArgument.of([Violation("path", f"{one_line(error)}; allowed: {allowed}")]) from error


def _swap(
    drafts: Learns[Weights], key: LearningKey, adapter: Weights | None, left_out: Sequence[str]
) -> tuple[str, int, float]:
    """Between two steps, on the device thread."""
    began, before = time.monotonic(), drafts.learned.digest(key)
    num_sequences = drafts.put_learned(key, adapter, left_out)
    return before, num_sequences, time.monotonic() - began


def _check(key: LearningKey, path: str, left_out: Sequence[str]) -> None:
    found = Violations()
    if not 0 < len(key.target_digest) <= MAX_DIGEST:
        problem = f"has {len(key.target_digest)} characters"
        found.add("target_digest", problem, f"a model's digest, 1 to {MAX_DIGEST}")
    if len(key.group) > MAX_GROUP:
        found.add("group", f"has {len(key.group)} characters", f"a lesson's group, at most {MAX_GROUP}")
    if len(path) > MAX_PATH or "\0" in path:
        found.add("path", f"has {len(path)} characters", f"a folder's path, at most {MAX_PATH}, none of them NUL")
    if found.length("left_out", left_out, MAX_LEFT_OUT):
        for index, caller in enumerate(left_out):
            found.text(f"left_out[{index}]", caller, MAX_NAME_CHARS)
    found.raise_if_any()


def _named(digest: str) -> str:
    return f"learned {digest[:12]}" if digest else "the model alone"
