"""What a learner keeps of the lessons of one key: those that weights are made of, those that judge them, and an even
share of all that came before, so that what is seldom is not forgotten. All of it is bounded.

A text is held out by its prompt, so that what judges was never learned from, however often it comes; and what comes
again teaches nothing."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock

from outrider.rpc.messages import LESSON_BYTES, TOKEN_BYTES, Lesson

MAX_SEEN = 65_536  # texts that are known to have come
MAX_WAITING = 256  # lessons that wait to judge
LEAST_TOKENS = 8  # of an answer, that teaches


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How much is kept, and what is held out."""

    max_bytes: int = 64 << 20
    hold_out: int = 5  # one text in so many
    max_tokens: int = 2048  # of a lesson
    seed: int = 3


@dataclass(slots=True, eq=False)
class Pool:
    """The lessons of one key. Any thread may call it."""

    plan: PoolPlan
    vocab_size: int
    num_taken: int = 0  # lessons, since the start
    num_refused: int = 0  # of those that cannot be learned from
    num_again: int = 0  # that had come before
    num_tokens: int = 0  # that were drawn, of those taken
    _latest: deque[Lesson] = field(default_factory=deque)
    _kept: list[Lesson] = field(default_factory=list)  # an even share of all that left the latest
    _judges: deque[Lesson] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _num_left: int = 0  # lessons that left the latest
    _latest_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.plan.seed)

    def take(self, lesson: Lesson) -> None:
        """Keeps a lesson, unless it cannot be learned from or has come before."""
        with self._lock:
            if not is_usable(lesson, self.vocab_size, self.plan.max_tokens):
                self.num_refused += 1
                return
            if self._has_come(digest_of(lesson.prompt_ids, lesson.output_ids)):
                self.num_again += 1
                return
            self.num_taken += 1
            self.num_tokens += len(lesson.output_ids) - lesson.num_given
            if int.from_bytes(digest_of(lesson.prompt_ids)) % self.plan.hold_out == 0:
                self._judges.append(lesson)
                return
            self._latest.append(lesson)
            self._latest_bytes += lesson.num_bytes
            while self._latest_bytes > self.plan.max_bytes // 2:
                oldest = self._latest.popleft()
                self._latest_bytes -= oldest.num_bytes
                self._keep(oldest)

    def batch(self, size: int) -> list[Lesson]:
        """Some to learn from: of the latest, and as many of those before."""
        with self._lock:
            count = min(size // 2, len(self._kept))
            latest = min(size - count, len(self._latest))
            return self._dice.sample(self._latest, latest) + self._dice.sample(self._kept, count)

    def judges(self) -> list[Lesson]:
        """Those held out that have come since the last time: each judges once."""
        with self._lock:
            found = list(self._judges)
            self._judges.clear()
        return found

    @property
    def has_judges(self) -> bool:
        """Whether there are any."""
        return bool(self._judges)

    @property
    def num_learnt_from(self) -> int:
        """Lessons that batches are taken of."""
        return len(self._latest) + len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory that its lessons take, about."""
        return self._latest_bytes + sum(lesson.num_bytes for lesson in (*self._kept, *self._judges))

    def _has_come(self, digest: bytes) -> bool:
        known = digest in self._seen
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return known

    def _keep(self, lesson: Lesson) -> None:
        """An even share of all (Vitter's algorithm R), of as many lessons as there is room for."""
        self._num_left += 1
        longest = LESSON_BYTES + TOKEN_BYTES * self.plan.max_tokens
        most = max(1, self.plan.max_bytes // 2 // longest)
        if len(self._kept) < most:
            self._kept.append(lesson)
        elif (place := self._dice.randrange(self._num_left)) < most:
            self._kept[place] = lesson


def is_usable(lesson: Lesson, vocab_size: int, max_tokens: int) -> bool:
    """Whether something can be learned from it: a few tokens were drawn, of the draft's own ids."""
    length = len(lesson.prompt_ids) + len(lesson.output_ids)
    if not (lesson.prompt_ids and len(lesson.output_ids) - lesson.num_given >= LEAST_TOKENS and length <= max_tokens):
        return False
    return max(max(lesson.prompt_ids), max(lesson.output_ids)) < vocab_size


def digest_of(*texts: Sequence[int]) -> bytes:
    """By which a text is known to have come."""
    found = blake2b(digest_size=16)
    for text in texts:
        found.update(b"".join(token.to_bytes(4, "little") for token in text) + b"|")
    return found.digest()
