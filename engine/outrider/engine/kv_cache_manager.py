"""The pool of key-value blocks: reference counts, a prefix cache keyed by a chained SHA-256, least-recently-used reuse.
And a sequence and its memory: one state variable, `num_computed_tokens`, and three verbs, extend, truncate, release.
Ints only."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCK_SIZE = 16


class OutOfBlocks(Exception):
    """The pool has no free block left; the caller preempts a sequence or waits."""


def root_key(salt: str, adapter: str = "", cache_dtype: str = "", model: str = "") -> bytes:
    """The key before the first block: only sequences of equal salt, adapter, cache dtype and model share blocks."""
    return hashlib.sha256(repr((salt, adapter, cache_dtype, model)).encode()).digest()


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


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Tokens, how many of them are in the key-value cache, and the blocks that hold them. `num_computed_tokens` is less
    than the number of tokens whenever no step is under way: the last token always has its logits still to come."""

    tokens: list[int]
    salt: str = ""
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the leading full blocks that are committed and computed
    adapter: str = ""  # digest of the one that computes it; empty: the model alone

    def __len__(self) -> int:
        return len(self.tokens)


class KVCacheManager:
    """Gives sequences their blocks: prefix hits on admission, room for the rows of a step, rollback, release."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int = BLOCK_SIZE,
        prefix_cache: bool = True,
        cache_dtype: str = "",
        model: str = "",  # digest of its weights
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.cache_dtype, self.model = cache_dtype, model

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: CachedSequence, use_prefix: bool = True) -> int:
        """Takes the cached blocks of the longest known prefix, at most len - 1 tokens; returns the number of tokens
        found."""
        if sequence.block_table or not (self.prefix_cache and use_prefix):
            return 0
        key = self._root_key(sequence)
        for index in range((len(sequence) - 1) // self.block_size):
            key = chain_key(key, sequence.tokens[index * self.block_size : (index + 1) * self.block_size])
            block = self.pool.find(key)
            if block is None:
                break
            self.pool.share(block)
            sequence.block_table.append(block)
            sequence.block_keys.append(key)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        return sequence.num_computed_tokens

    def extend(self, sequence: CachedSequence, ids: Iterable[int] = (), num_tokens: int | None = None) -> None:
        """Appends ids and makes room for the first `num_tokens` tokens (all by default). Raises OutOfBlocks and changes
        nothing if there is none."""
        new_ids = list(ids)
        length = len(sequence) + len(new_ids) if num_tokens is None else num_tokens
        missing = self.blocks_for(length) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(missing))
        sequence.tokens.extend(new_ids)

    def fork(self, sequence: CachedSequence, length: int) -> tuple[CachedSequence, tuple[int, int] | None]:
        """A sequence with the first `length` tokens, all of them computed: it shares their full blocks and owns a copy
        of the part-filled one. Returns it with the block to copy and where to. Raises OutOfBlocks and changes
        nothing."""
        if length > sequence.num_computed_tokens:
            raise ValueError(f"{length} tokens to fork, {sequence.num_computed_tokens} are computed")
        full = length // self.block_size
        own = self.pool.allocate(1) if length % self.block_size else []
        for block in sequence.block_table[:full]:
            self.pool.share(block)
        forked = CachedSequence(
            sequence.tokens[:length],
            sequence.salt,
            length,
            [*sequence.block_table[:full], *own],
            sequence.block_keys[:full],
            sequence.adapter,
        )
        return forked, (sequence.block_table[full], own[0]) if own else None

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Keeps the first `length` tokens. Slots past it are overwritten later; nothing is copied. The last token kept
        counts as not computed, because its logits are wanted next."""
        del sequence.tokens[length:]
        sequence.num_computed_tokens = max(0, min(sequence.num_computed_tokens, length - 1))
        full = sequence.num_computed_tokens // self.block_size
        if full < len(sequence.block_keys):
            # Rolled back into cached blocks (a resumed or corrected sequence): those from there on are shared or
            # findable and must not be written again.
            self.pool.release(sequence.block_table[full:])
            del sequence.block_table[full:]
            del sequence.block_keys[full:]
            sequence.num_computed_tokens = full * self.block_size

    def publish(self, sequence: CachedSequence, num_committed: int) -> None:
        """Makes the full blocks findable that lie wholly below both the committed length and `num_computed_tokens`."""
        if not self.prefix_cache:
            return
        full = min(num_committed, sequence.num_computed_tokens) // self.block_size
        for index in range(len(sequence.block_keys), full):
            parent = sequence.block_keys[-1] if sequence.block_keys else self._root_key(sequence)
            key = chain_key(parent, sequence.tokens[index * self.block_size : (index + 1) * self.block_size])
            self.pool.register(sequence.block_table[index], key)
            sequence.block_keys.append(key)

    def _root_key(self, sequence: CachedSequence) -> bytes:
        return root_key(sequence.salt, sequence.adapter, self.cache_dtype, self.model)

    def forget(self, sequence: CachedSequence, num_found: int) -> None:
        """Nobody finds the sequence's blocks any more, but for the first `num_found` tokens'."""
        self.pool.forget(sequence.block_table[num_found // self.block_size :])

    def release(self, sequence: CachedSequence) -> None:
        """Gives all blocks back; the sequence must be computed again (or found in the prefix cache) to go on."""
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.block_keys.clear()
        sequence.num_computed_tokens = 0
