"""The pool of key-value blocks: reference counts, a prefix cache keyed by a chained SHA-256, least-recently-used reuse.
Ints only."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_SIZE = 16


class OutOfBlocks(Exception):
    """The pool has no free block left; the caller preempts a sequence or waits."""


def root_key(salt: str, adapter: str = "", cache_dtype: str = "") -> bytes:
    """The key before the first block: only sequences of equal salt, adapter and cache dtype share blocks."""
    return hashlib.sha256(repr((salt, adapter, cache_dtype)).encode()).digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: SHA-256 over its parent's key and its tokens."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class BlockPool:
    """Hands out block numbers. A block is in use (references above zero) or free; a free block may still hold a cached
    prefix, which a later sequence can take until the block is reused, least recently freed first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, or none at all: raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} free of {self.num_blocks}")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def find(self, key: bytes) -> int | None:
        """The block that holds the prefix `key`, without taking it."""
        return self._block_of.get(key)

    def share(self, block: int) -> None:
        """Adds a reference to a block in use or free."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Makes a full, computed, committed block findable. The first block of a key stays the cached one."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each block; the last of a table is reused first, so that prefixes live longest."""
        for block in reversed(list(blocks)):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released but not in use")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)  # nothing worth keeping: reuse it first

    def references(self, block: int) -> int:
        """How many tables hold the block."""
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block is findable by its prefix."""
        return block in self._key_of

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops the cached prefixes of these blocks."""
        for block in blocks:
            self._forget(block)

    def clear_cache(self) -> None:
        """Forgets every cached prefix; blocks in use stay in use."""
        self._key_of.clear()
        self._block_of.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raises ValueError unless free + used == total, references equal the tables' holders and keys are one to
        one."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        if held != self._references:
            wrong = [b for b in range(self.num_blocks) if held[b] != self._references[b]]
            raise ValueError(f"references differ from the tables' holders for blocks {wrong[:8]}")
        free = {b for b in range(self.num_blocks) if self._references[b] == 0}
        if free != set(self._free):
            raise ValueError("the free list is not the set of blocks without references")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise ValueError("cached keys and blocks are not one to one")

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
