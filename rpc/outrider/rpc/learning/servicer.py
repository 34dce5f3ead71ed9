"""LearningService over gRPC, beside the service of what drafts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.rpc.codec import LEARNING_NEWS, PUT_LEARNED
from outrider.rpc.errors import FailedPrecondition, PermissionDenied, Unavailable
from outrider.rpc.messages import LearningKey, LearningNews
from outrider.v1 import learning_pb2, learning_pb2_grpc

if TYPE_CHECKING:
    from outrider.rpc.learning.lessons import Lessons
    from outrider.rpc.learning.promotion import LearnedDrafts

LESSONS_AT_ONCE = 32  # in a message
LESSONS_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Taught:
    """What others may learn from, and what becomes of it."""

    lessons: Lessons
    learned: LearnedDrafts[Any]
    model_digest: Callable[[], str]  # of the present weights that learn
    max_rank: int  # of what is learned


class LearningServicer(learning_pb2_grpc.LearningServiceServicer):
    """Refuses all until `taught` is set. Belongs to the event loop."""

    def __init__(self, role: str, is_draining: Callable[[], bool]) -> None:
        self.taught: Taught | None = None
        self._role, self._is_draining = role, is_draining
        self._learner = 0  # the number of the latest

    async def Learn(self, request: Any, context: Any) -> AsyncIterator[learning_pb2.LearnResponse]:
        """Hands out lessons until another learner asks, the service drains, or another model drafts."""
        taught = self._taught()
        self._learner = turn = self._learner + 1
        learned = taught.learned.drafts().learned  # another one where another model drafts
        news = LearningNews((), 0, taught.model_digest(), learned.rows, learned.most, taught.max_rank)
        yield LEARNING_NEWS.encode(news)
        while not self._is_draining() and taught.learned.drafts().learned is learned:
            if turn != self._learner:
                raise FailedPrecondition("another learner asked after this one", reason="ANOTHER_LEARNER")
            lessons, num_lost = taught.lessons.take()
            for start in range(0, len(lessons), LESSONS_AT_ONCE):
                yield LEARNING_NEWS.encode(LearningNews(tuple(lessons[start : start + LESSONS_AT_ONCE]), num_lost))
                num_lost = 0
            await asyncio.sleep(LESSONS_EVERY_S)

    async def PutLearned(self, request: Any, context: Any) -> learning_pb2.PutLearnedResponse:
        """Lets what was learned draft."""
        taught = self._taught()
        if self._is_draining():
            raise Unavailable("the service is draining", reason="DRAINING")
        key = LearningKey(request.target_digest, request.group)
        return PUT_LEARNED.encode(await taught.learned.put(key, request.path, tuple(request.left_out)))

    def register(self, server: Any) -> None:
        """Adds itself to a grpc.aio server."""
        learning_pb2_grpc.add_LearningServiceServicer_to_server(self, server)

    def _taught(self) -> Taught:
        if self.taught is None:
            raise PermissionDenied(f"the {self._role} was not started with --learn-from")
        return self.taught
