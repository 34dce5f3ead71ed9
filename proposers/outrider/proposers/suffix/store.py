"""What finished sequences were answered, for others to draft from: kept apart by salt, bounded in bytes.

The outputs lie in generations, each with an index for every salt. A generation is full with its share of the bytes or
of the sequences; then a new one begins, and the oldest is dropped whole, which costs nothing for a single string."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import NamedTuple, Self

from outrider.proposers.suffix.index import SEPARATOR, TOKEN_BYTES, ContextIndex

GENERATIONS = 3
SLICE = 512  # tokens that are indexed at a time: about 2 ms
SLICE_BYTES = 12 * SLICE  # that they take, at most
MAX_WAITING = 128  # slices


class StoredText(NamedTuple):
    """A slice of an output."""

    salt: bytes
    context: array[int]  # the tokens before it
    tokens: array[int]
    begins: bool  # it is its output's first


class Image(NamedTuple):
    """What a generation holds, as it is on disk: its sequences, and of each salt's digest the text and its order."""

    num_sequences: int
    indices: Sequence[tuple[bytes, bytes | memoryview, bytes]]


@dataclass(slots=True)
class Generation:
    """Outputs of one time, by the salt's digest."""

    indices: dict[bytes, ContextIndex] = field(default_factory=dict)
    num_sequences: int = 0
    num_bytes: int = 0

    def add(self, text: StoredText, depth: int) -> None:
        """Indexes a slice of an output."""
        index = self.indices.get(text.salt)
        if index is None:
            index = self.indices[text.salt] = ContextIndex(depth)
        else:
            self.num_bytes -= index.num_bytes
        index.append((SEPARATOR, *text.context), found=False)
        index.append(text.tokens)
        index.append((SEPARATOR,), found=False)
        self.num_bytes += index.num_bytes
        self.num_sequences += text.begins

    def image(self) -> Image:
        """As it is now."""
        return Image(self.num_sequences, [(salt, *index.dump()) for salt, index in self.indices.items()])

    @classmethod
    def of(cls, image: Image, depth: int) -> Self:
        """The generation that an image was made of."""
        found = cls(num_sequences=image.num_sequences)
        for salt, text, order in image.indices:
            index = found.indices[salt] = ContextIndex.load(depth, text, order)
            found.num_bytes += index.num_bytes
        return found


class SuffixStore:
    """The latest outputs of all salts, in at most `max_bytes` and of at most `max_sequences` sequences. It belongs to
    one thread, but for `images`."""

    def __init__(self, depth: int, max_bytes: int, max_sequences: int) -> None:
        self.depth, self.max_bytes, self.max_sequences = depth, max_bytes, max_sequences
        kept = max(1, min(GENERATIONS, max_sequences))
        self._sequences_each = max_sequences // kept
        self._bytes_each = 10 * max_bytes // (10 * kept + 7)  # an index that grows is copied: there is room for that
        self._generations: deque[Generation] = deque([Generation()], maxlen=kept)
        self._waiting: deque[StoredText] = deque()
        self._changing = Lock()  # held while the newest generation does, or takes another's place
        self.num_added = 0  # outputs, since the start

    @property
    def num_bytes(self) -> int:
        """Memory held, at most."""
        waiting = len(self._waiting) * (SLICE + self.depth) * TOKEN_BYTES
        return waiting + sum(generation.num_bytes for generation in self._generations)

    @property
    def num_sequences(self) -> int:
        """Sequences whose output is held."""
        return sum(generation.num_sequences for generation in self._generations)

    @property
    def num_generations(self) -> int:
        """Generations that hold something."""
        return sum(bool(generation.indices) for generation in self._generations)

    def add(self, prompt_ids: Sequence[int], output_ids: Sequence[int], salt: str) -> None:
        """Takes what a sequence was answered, to be indexed slice by slice."""
        if not self.max_sequences:
            return
        self.num_added += 1
        tokens = array("I", (*prompt_ids[-self.depth :], *output_ids))
        for at in range(len(tokens) - len(output_ids), len(tokens), SLICE):
            context = tokens[max(at - self.depth, 0) : at]
            begins = len(tokens) - len(output_ids) == at
            self._waiting.append(StoredText(digest_of(salt), context, tokens[at : at + SLICE], begins))
        while len(self._waiting) > MAX_WAITING:
            self.index_next()

    def index_next(self) -> None:
        """Indexes a slice that waits, if there is one."""
        if not self._waiting:
            return
        with self._changing:
            text, newest = self._waiting.popleft(), self._generations[-1]
            is_full = newest.num_sequences + text.begins > self._sequences_each
            if is_full or newest.num_bytes + SLICE_BYTES > self._bytes_each:
                newest = Generation()
                self._generations.append(newest)  # the oldest goes
            newest.add(text, self.depth)

    def images(self) -> tuple[int, Iterator[Image]]:
        """How many generations there are, and of each its image, the latest last, with what still waits. Any thread may
        ask; the store's own is held up while the newest one's order is copied, a few milliseconds for 64 MiB."""
        with self._changing:
            *older, newest = self._generations  # older ones do not change any more
            image, waiting = newest.image(), list(self._waiting)
        if waiting:
            copied = Generation.of(image, self.depth)
            for text in waiting:
                copied.add(text, self.depth)
            image = copied.image()
        return len(older) + 1, chain((generation.image() for generation in older), [image])

    def indices(self, salt: bytes) -> Iterator[ContextIndex]:
        """Those of a salt, given by its digest, the latest first."""
        return (found for each in reversed(self._generations) if (found := each.indices.get(salt)) is not None)

    def restore(self, generations: Sequence[Generation]) -> None:
        """Takes generations, the latest last, in place of its own; as many of them as are within the bounds."""
        self._generations.clear()
        for each in reversed(generations[-(self._generations.maxlen or 1) :]):
            if self.num_bytes + each.num_bytes > self.max_bytes:
                break
            if self.num_sequences + each.num_sequences > self.max_sequences:
                break
            self._generations.appendleft(each)
        if not self._generations:
            self._generations.append(Generation())


def digest_of(salt: str) -> bytes:
    """By which a salt's outputs are found; the store and its file tell no salt."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest()
