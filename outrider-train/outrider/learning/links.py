"""Between a learner and the services that it learns from, drafts or targets with a head: lessons come, and each is
brought to use the versions that are to be in use, also one that has started again. One that is away is sought again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc.aio

from outrider.gateway.peers.remote import lessons_of, put_learned
from outrider.learning.learner import Learner
from outrider.learning.versions import Version
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, OutriderError, PermissionDenied
from outrider.rpc.messages import LearningKey, LearningNews
from outrider.rpc.security import ClientTls, open_channel

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 0.5
SOUGHT_EVERY_S = 2.0
InUse = tuple[str, tuple[str, ...]]  # a digest, and the callers who are left out
NOTHING: InUse = ("", ())
FINAL = ("OTHER_MODEL", "ANOTHER_LEARNER")  # reasons for which nothing more can be learned from it


@dataclass(slots=True, eq=False)
class LearningLink:
    """One service that drafts. Belongs to the event loop."""

    address: str
    tls: ClientTls | None
    learner: Learner
    in_use: Callable[[], Mapping[LearningKey, Version]]
    role: str = "draft"  # draft, or target: of a head
    used: dict[LearningKey, InUse] = field(default_factory=dict)  # what it has, as it said
    refused: set[str] = field(default_factory=set)  # digests
    is_there: bool = False

    async def run(self) -> None:
        """Until it is cancelled. Raises PermissionDenied and FailedPrecondition for one that nothing can be learned
        from."""
        while True:
            try:
                async with open_channel(self.address, self.tls) as channel:
                    await self._serve(channel)
            except OutriderError as error:
                if isinstance(error, PermissionDenied) or error.reason in FINAL:
                    raise type(error)(f"{self.role} {self.address}: {error.message}", reason=error.reason) from error
                if self.is_there:
                    logger.warning("%s %s is away: %s", self.role, self.address, error.message)
            self.is_there = False
            await asyncio.sleep(SOUGHT_EVERY_S)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        stream = lessons_of(channel)
        if (first := await anext(stream, None)) is None:
            return  # it drains
        self._check(first)
        keeping = asyncio.create_task(self._keep_up(channel))
        self.is_there = True
        try:
            async for news in stream:
                await asyncio.to_thread(self.learner.take, news.lessons, news.num_lost)
                if keeping.done():
                    break
        finally:
            keeping.cancel()
            try:
                await keeping
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise

    async def _keep_up(self, channel: grpc.aio.Channel) -> None:
        """Lets the draft use what is to be used, whenever that changes."""
        while True:
            wanted = self.in_use()
            for key in {*wanted, *self.used}:
                version = wanted.get(key)
                path, wants = ("", NOTHING) if version is None else (version.path, (version.digest, version.left_out))
                if wants == self.used.get(key, NOTHING) or wants[0] in self.refused:
                    continue
                try:
                    done = await put_learned(channel, *key, path, wants[1])
                    self.used[key] = done.after, wants[1]
                except InvalidArgument as error:
                    self.refused.add(wants[0])
                    logger.warning("%s %s does not take %s: %s", self.role, self.address, path, error.message)
                if self.used.get(key) == NOTHING:
                    self.used.pop(key)
            await asyncio.sleep(LOOKS_EVERY_S)

    def _check(self, first: LearningNews) -> None:
        """Raises FailedPrecondition where another model drafts."""
        own, its = self.learner.student.digest, first.model_digest
        if own != its:
            flag = "--head" if self.role == "target" else "--model"
            told = f"drafts with another model, {its[:12] or 'none'}, than {flag}, {own[:12]}"
            raise FailedPrecondition(told, reason="OTHER_MODEL")
        self.used = {row.key: (row.digest, row.left_out) for row in first.learned}
