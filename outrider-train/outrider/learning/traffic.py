"""What a learner keeps of the lessons of one key: those that weights are made of, those that judge them, and an even
share of all that came before, so that what is seldom is not forgotten. All of it is bounded.

A text is held out by its prompt, so that what judges was never learned from, however often it comes; and what comes
again teaches nothing. Of several callers each has an equal share, however much one sends: of what is learned from,
until its texts have been read often enough, and of what judges."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock

from outrider.rpc.messages import LESSON_BYTES, TOKEN_BYTES, Lesson

MAX_SEEN = 65_536  # texts that are known to have come
MAX_WAITING = 32  # lessons of a caller that wait to judge
MAX_CALLERS = 64  # the latest
MAX_JUDGED = 400  # rounds that have judged, which judge what is made later
MOST_READS = 16  # of a lesson, on average: more is learned by heart
LEAST_TOKENS = 8  # of an answer, that teaches


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How much is kept, and what is held out."""

    max_bytes: int = 64 << 20
    hold_out: int = 3  # one text in so many
    max_tokens: int = 2048  # of a lesson
    seed: int = 3

    @property
    def max_lesson_bytes(self) -> int:
        """Of the longest, with its parameters' maps and lists: one that has many of these has fewer tokens."""
        return LESSON_BYTES + TOKEN_BYTES * self.max_tokens


@dataclass(slots=True, eq=False)
class CallersPart:
    """The lessons of one caller."""

    latest: deque[Lesson] = field(default_factory=deque)
    kept: list[Lesson] = field(default_factory=list)  # an even share of all that left the latest
    judges: deque[Lesson] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    is_awaited: bool = False  # others' texts wait for one of it to judge
    num_left: int = 0  # lessons that left the latest
    num_taken: int = 0
    num_read: int = 0  # from batches
    latest_bytes: int = 0

    @property
    def num_learnt_from(self) -> int:
        """Lessons that batches are taken of."""
        return len(self.latest) + len(self.kept)

    @property
    def is_read(self) -> bool:
        """Whether its lessons were read often enough."""
        return self.num_read >= MOST_READS * self.num_taken

    def add(self, lesson: Lesson) -> None:
        """One to learn from."""
        self.num_taken += 1
        self.latest.append(lesson)
        self.latest_bytes += lesson.num_bytes

    def age(self, most: int, dice: random.Random) -> None:
        """The oldest of the latest gives up its place for one in an even share of all (Vitter's algorithm R), which has
        room for so many."""
        oldest = self.latest.popleft()
        self.latest_bytes -= oldest.num_bytes
        self.num_left += 1
        if len(self.kept) < most:
            self.kept.append(oldest)
        elif (place := dice.randrange(self.num_left)) < most:
            self.kept[place] = oldest

    def trim(self, most: int, dice: random.Random) -> None:
        """Keeps so many of those that left the latest."""
        while len(self.kept) > most:
            self.kept.pop(dice.randrange(len(self.kept)))

    def sample(self, size: int, dice: random.Random) -> list[Lesson]:
        """Of the latest, and as many of those before."""
        count = min(size // 2, len(self.kept))
        latest = min(size - count, len(self.latest))
        self.num_read += latest + count
        return dice.sample(self.latest, latest) + dice.sample(self.kept, count)


@dataclass(slots=True, eq=False)
class Pool:
    """The lessons of one key. Any thread may call it."""

    plan: PoolPlan
    vocab_size: int
    num_taken: int = 0  # lessons, since the start
    num_refused: int = 0  # of those that cannot be learned from
    num_again: int = 0  # that had come before
    num_tokens: int = 0  # that were drawn, of those taken
    _judged: deque[list[Lesson]] = field(default_factory=lambda: deque(maxlen=MAX_JUDGED))  # the newest last
    _parts: OrderedDict[str, CallersPart] = field(default_factory=OrderedDict)  # by caller, the latest last
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _lock: Lock = field(default_factory=Lock)
    _dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.plan.seed)

    def take(self, lesson: Lesson) -> None:
        """Keeps a lesson, unless it cannot be learned from or has come before."""
        with self._lock:
            if not is_usable(lesson, self.vocab_size, self.plan):
                self.num_refused += 1
                return
            if self._has_come(digest_of(lesson.prompt_ids, lesson.output_ids)):
                self.num_again += 1
                return
            self.num_taken += 1
            self.num_tokens += lesson.num_drawn
            part = self._part(lesson.caller)
            if int.from_bytes(digest_of(lesson.prompt_ids)) % self.plan.hold_out == 0:
                part.judges.append(lesson)
                part.is_awaited = True
                return
            part.add(lesson)
            self._make_room()

    def batch(self, size: int) -> list[Lesson]:
        """Some to learn from. Each caller has an equal share; that of one whose lessons were read often enough goes to
        all, by how many they have."""
        with self._lock:
            parts = [part for part in self._parts.values() if part.num_learnt_from]
            if not parts:
                return []
            even = self._dice.choices(parts, k=size)
            by_number = self._dice.choices(parts, [part.num_learnt_from for part in parts], k=size)
            shares = Counter(id(other if one.is_read else one) for one, other in zip(even, by_number, strict=True))
            return [lesson for part in parts for lesson in part.sample(shares[id(part)], self._dice)]

    def rounds(self) -> list[list[Lesson]]:
        """Those held out that have come since the last time, a text of every caller together. One who sends none is
        waited for until another's next has no room."""
        found: list[list[Lesson]] = []
        with self._lock:
            while self._has_round():
                found.append([part.judges.popleft() for part in self._parts.values() if part.judges])
            self._judged.extend(found)
            waiting = sum(_bytes_of(part.judges) for part in self._parts.values())
            while self._judged and waiting + sum(map(_bytes_of, self._judged)) > self.plan.max_bytes // 4:
                self._judged.popleft()
        return found

    @property
    def judged(self) -> list[list[Lesson]]:
        """Those of before, the newest first."""
        with self._lock:
            return list(reversed(self._judged))

    @property
    def has_rounds(self) -> bool:
        """Whether there are any."""
        with self._lock:
            return self._has_round()

    @property
    def num_callers(self) -> int:
        """That are known."""
        return len(self._parts)

    @property
    def num_learnt_from(self) -> int:
        """Lessons that batches are taken of."""
        with self._lock:
            return sum(part.num_learnt_from for part in self._parts.values())

    @property
    def num_bytes(self) -> int:
        """Memory that its lessons take, about."""
        with self._lock:
            judged = sum(map(_bytes_of, self._judged))
            return judged + sum(
                part.latest_bytes + _bytes_of((*part.kept, *part.judges)) for part in self._parts.values()
            )

    def _has_round(self) -> bool:
        """Whether all who are awaited have sent a text to judge; they are not where another's next has no room."""
        parts = self._parts.values()
        if any(len(part.judges) == MAX_WAITING for part in parts):
            for part in parts:
                part.is_awaited = bool(part.judges)
        return any(part.judges for part in parts) and all(part.judges for part in parts if part.is_awaited)

    def _part(self, caller: str) -> CallersPart:
        """A caller's; where there are too many, the one goes that sent something longest ago."""
        part = self._parts.get(caller)
        if part is None:
            part = self._parts[caller] = CallersPart()
            if len(self._parts) > MAX_CALLERS:
                self._parts.popitem(last=False)
            for other in self._parts.values():
                other.trim(self._most_kept, self._dice)
        self._parts.move_to_end(caller)
        return part

    def _make_room(self) -> None:
        """At the cost of who has the most."""
        parts, half = self._parts.values(), self.plan.max_bytes // 2
        while sum(part.latest_bytes for part in parts) > half:
            max(parts, key=lambda part: part.latest_bytes).age(self._most_kept, self._dice)

    @property
    def _most_kept(self) -> int:
        """Lessons of a caller."""
        return max(1, self.plan.max_bytes // 4 // self.plan.max_lesson_bytes // len(self._parts))

    def _has_come(self, digest: bytes) -> bool:
        known = digest in self._seen
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return known


def _bytes_of(lessons: Iterable[Lesson]) -> int:
    return sum(lesson.num_bytes for lesson in lessons)


def is_usable(lesson: Lesson, vocab_size: int, plan: PoolPlan) -> bool:
    """Whether something can be learned from it: a few tokens were drawn, of the draft's own ids."""
    if not (lesson.prompt_ids and lesson.num_drawn >= LEAST_TOKENS and lesson.num_bytes <= plan.max_lesson_bytes):
        return False
    return max(max(lesson.prompt_ids), max(lesson.output_ids)) < vocab_size


def digest_of(*texts: Sequence[int]) -> bytes:
    """By which a text is known to have come."""
    found = blake2b(digest_size=16)
    for text in texts:
        found.update(b"".join(token.to_bytes(4, "little") for token in text) + b"|")
    return found.digest()
