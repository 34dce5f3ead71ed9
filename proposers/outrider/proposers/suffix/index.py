"""A text whose positions are sorted by the tokens before them, read backwards: equal contexts are neighbours.

That order is a suffix array of the reversed text (Manber and Myers 1990), kept while tokens come and go: it lies in
blocks, like a B+ tree's leaves, so a position is put in or taken out by a binary search and a shift within one block.
The text lies backwards in its buffer, behind it what stands for the nothing before it: a position's context is always a
slice of one length, and comparing contexts is comparing bytes. A token takes 4 bytes of text, 4 of order and about one
more."""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from mmap import mmap
from typing import Any

TOKEN_BYTES = 4
SEPARATOR = 2**32 - 1  # between texts; as a token's id it ends one, too
BLOCK = 512  # positions in a full block
BLOCK_BYTES = 128 + sys.getsizeof(array("i")) + sys.getsizeof(b"")  # of a block, beside positions and head
Place = tuple[int, int]  # a block's number, and the index therein
LARGE = 1 << 16  # bytes
EMPTY_BYTES = 1024  # of an index without tokens


class ContextIndex:
    """A text that grows and shrinks at its end. Contexts are compared over `depth` tokens."""

    def __init__(self, depth: int) -> None:
        self._width = TOKEN_BYTES * depth
        self._slice = struct.Struct(f"{self._width}s")
        self._above = b"\xff" * (self._width + 1)  # behind a prefix: above all contexts that begin with it
        # Room for more, the text with its last token first, and separators in the place of what comes before a text.
        self._buffer: bytearray | mmap = bytearray(b"\xff" * self._width)
        self._used = 0  # bytes of text
        self._blocks: list[array[int]] = [array("i")]  # where contexts begin, in bytes from the buffer's end, below 0;
        self._heads: list[bytes] = [b""]  # of equal ones the latest first. None is below its block's head, or above the
        self._num_positions = 0  # next one's
        self._context = self._reader()

    def __len__(self) -> int:
        """Tokens held."""
        return self._used // TOKEN_BYTES

    @property
    def num_bytes(self) -> int:
        """Memory held, at most."""
        order = self._num_positions * TOKEN_BYTES * 17 // 16  # an array that grows takes a 16th more
        return EMPTY_BYTES + len(self._buffer) + order + len(self._blocks) * (BLOCK_BYTES + self._width)

    def append(self, tokens: Iterable[int], found: bool = True) -> None:
        """Adds tokens at the end. What shall not be `found` is context alone."""
        new = array("I", tokens)
        new.reverse()
        first, added = self._used, new.tobytes()
        self._used += len(added)
        self._reserve()
        at = len(self._buffer) - self._width - self._used
        self._buffer[at : at + len(added)] = added
        if found and first == 0:
            self._sort()
        elif found:
            for position in range(first, self._used, TOKEN_BYTES):
                self._insert(-position - self._width)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, as if the others, all of them to be found, had never been there."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot truncate {len(self)} tokens to {length}")
        while len(self) > length:
            self._used -= TOKEN_BYTES
            self._remove(-self._used - self._width)

    def context(self) -> bytes:
        """Of the next token: the last ones, backwards."""
        end = len(self._buffer) - self._width
        return bytes(self._buffer[end - self._used : end - self._used + min(self._used, self._width)])

    def locate(self, context: bytes) -> Place:
        """The place of a context in the order, before its equals; until the text changes."""
        number = max(bisect_left(self._heads, context) - 1, 0)
        return number, bisect_left(self._blocks[number], (context,), key=self._context)

    def longest_match(self, context: bytes, at_least: int, place: Place) -> int:
        """How many tokens at the end of a context, at most, were followed by one here; 0 if less than `at_least`.
        `place` is the context's."""
        number, at = place
        block, prefix = self._blocks[number], context[: TOKEN_BYTES * at_least]
        nearest = block[max(at - 1, 0) : at + 1]  # next to it in the order is what shares most with it
        if at == 0 and number > 0:
            nearest.append(self._blocks[number - 1][-1])
        if at == len(block) and number + 1 < len(self._blocks):
            nearest.append(self._blocks[number + 1][0])
        longest = 0
        for start in nearest:
            (other,) = self._context(start)
            if other.startswith(prefix):
                longest = max(longest, _num_common(context, other))
        return longest

    def occurrences(self, context: bytes, length: int, at_most: int, place: Place) -> list[int]:
        """Positions after the last `length` tokens of a context, whose place is given, the latest first; of more than
        `at_most` those whose contexts are nearest in the order."""
        prefix = context[: TOKEN_BYTES * length]
        number, at = place
        found = self._upwards(number, at, prefix + self._above, at_most)
        found += self._downwards(number, at, prefix, at_most - len(found))
        return [-start - self._width for start in sorted(found)]

    def following(self, positions: Iterable[int], count: int) -> list[bytes]:
        """`count` tokens from each position on, backwards. Where the text ends it goes on as from there again."""
        buffer, length, size = self._buffer, len(self._buffer) - self._width, TOKEN_BYTES * count
        near_end = self._used - size  # positions behind it are followed by less
        return [
            bytes(buffer[length - at - size : length - at])
            if at <= near_end
            else (bytes(buffer[length - self._used : length - at]) * -(-size // (self._used - at)))[-size:]
            for at in positions
        ]

    def dump(self) -> tuple[memoryview, bytes]:
        """The text and its order, for `load`. They stay as they are where more is appended; the text is no copy."""
        end = len(self._buffer) - self._width
        return memoryview(self._buffer)[end - self._used : end], b"".join(self._blocks)

    @classmethod
    def load(cls, depth: int, text: bytes | memoryview, order: bytes) -> ContextIndex:
        """An index with the text and the order of one that was dumped."""
        index = cls(depth)
        index._used = len(text)
        index._reserve()
        index._buffer[len(index._buffer) - index._width - len(text) : len(index._buffer) - index._width] = text
        index._cut(array("i", order))
        return index

    def _reader(self) -> Callable[[int], tuple[Any, ...]]:
        """From a place in the present buffer to the context that begins there, in a tuple of its own, which is quicker
        than a function that cuts it out."""
        return partial(self._slice.unpack_from, self._buffer)

    def _reserve(self) -> None:
        """Makes room for the text in use."""
        needed = self._used + self._width
        if needed <= len(self._buffer):
            return
        grown = _room(max(needed, len(self._buffer) * 9 // 8 // TOKEN_BYTES * TOKEN_BYTES))
        grown[len(grown) - len(self._buffer) :] = self._buffer
        self._buffer = grown
        self._context = self._reader()

    def _sort(self) -> None:
        """Puts all positions in their order at once."""
        starts = range(-self._used - self._width + TOKEN_BYTES, -self._width + 1, TOKEN_BYTES)  # the latest first, also
        self._cut(array("i", sorted(starts, key=self._context)))  # among equals

    def _cut(self, order: array[int]) -> None:
        """Lays sorted positions into blocks with room for more."""
        size = 3 * BLOCK // 4
        self._num_positions = len(order)
        self._blocks = [order[at : at + size] for at in range(0, len(order), size)] or [array("i")]
        self._heads = [b"", *(self._context(block[0])[0] for block in self._blocks[1:])]

    def _upwards(self, number: int, at: int, end: bytes, at_most: int) -> array[int]:
        """The positions from a place in the order on, as far as contexts are below `end`."""
        found = array("i")
        while len(found) < at_most and number < len(self._blocks):
            block = self._blocks[number]
            last = bisect_left(block, (end,), at, min(len(block), at + at_most - len(found)), key=self._context)
            found += block[at:last]
            if last < len(block):
                break
            number, at = number + 1, 0
        return found

    def _downwards(self, number: int, at: int, start: bytes, at_most: int) -> array[int]:
        """Those before a place, the nearest ones, as far as contexts are not below `start`."""
        found = array("i")
        while len(found) < at_most:
            block = self._blocks[number]
            first = bisect_left(block, (start,), max(0, at - at_most + len(found)), at, key=self._context)
            found += block[first:at]
            if first > 0 or number == 0:
                break
            number, at = number - 1, len(self._blocks[number - 1])
        return found

    def _insert(self, start: int) -> None:
        number, at = self.locate(*self._context(start))
        block = self._blocks[number]
        block.insert(at, start)
        self._num_positions += 1
        if len(block) > BLOCK:
            lower, upper = block[: BLOCK // 2], block[BLOCK // 2 :]
            self._blocks[number : number + 1] = lower, upper
            self._heads.insert(number + 1, self._context(upper[0])[0])

    def _remove(self, start: int) -> None:
        """Of the last context: it is the first of its equals."""
        number, at = self.locate(*self._context(start))
        if at == len(self._blocks[number]):
            number, at = number + 1, 0
        del self._blocks[number][at]
        self._num_positions -= 1
        if not self._blocks[number] and len(self._blocks) > 1:
            del self._blocks[number]
            del self._heads[number or 1]  # the first head stays below all


def _room(size: int) -> bytearray | mmap:
    """So many bytes. Large ones are given back to the system when they are dropped, and leave no hole in the heap."""
    return bytearray(size) if size < LARGE else mmap(-1, size)


def _num_common(left: bytes, right: bytes) -> int:
    """How many tokens at the start are equal."""
    size = min(len(left), len(right))
    difference = int.from_bytes(left[:size], "big") ^ int.from_bytes(right[:size], "big")
    return (size - (difference.bit_length() + 7) // 8) // TOKEN_BYTES
