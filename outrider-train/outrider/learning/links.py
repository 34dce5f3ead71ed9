"""Between a learner and the services that it learns from, drafts or targets with a head: lessons come, and each is
brought to use the versions that are to be in use, also one that has started again. One that is away is sought again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
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
FINAL = ("OTHER_MODEL", "ANOTHER_LEARNER", "NO_ROOM")  # reasons for which nothing more can be learned from it


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
        tasks = [asyncio.create_task(self._listen(stream)), asyncio.create_task(self._keep_up(channel))]
        self.is_there = True
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _listen(self, stream: AsyncIterator[LearningNews]) -> None:
        async for news in stream:
            await asyncio.to_thread(self.learner.take, news.lessons, news.num_lost)

    async def _keep_up(self, channel: grpc.aio.Channel) -> None:
        """Lets the draft use what is to be used, whenever that changes; first it gives up what is not, whose room is
        wanted."""
        while True:
            wanted = self.in_use()
            for key in sorted({*wanted, *self.used}, key=wanted.__contains__):
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
        keys, rank = self.learner.plan.most_keys, self.learner.student.plan.rank
        for flag, wants, its_flag, has in (
            ("--keys", keys, "--learned-drafts", first.max_learned), ("--rank", rank, "--learned-rank", first.max_rank)
        ):  # fmt: skip
            if 0 < has < wants:
                raise FailedPrecondition(
                    f"{its_flag} is {has}, and {flag} {wants}; allowed: at most {has}", reason="NO_ROOM"
                )
        self.used = {row.key: (row.digest, row.left_out) for row in first.learned}
