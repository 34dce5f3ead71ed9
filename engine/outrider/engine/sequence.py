"""A sequence and its memory. One state variable, `num_computed_tokens`, and three verbs: extend, truncate, release."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.engine.blocks import BLOCK_SIZE, BlockPool, chain_key, root_key


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them are in the key-value cache, and the blocks that hold them. `num_computed_tokens` is less
    than the number of tokens whenever no step is under way: the last token always has its logits still to come."""

    tokens: list[int]
    salt: str = ""
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the leading full blocks that are committed and computed

    def __len__(self) -> int:
        return len(self.tokens)


class SequenceCache:
    """Gives sequences their blocks: prefix hits on admission, room for the rows of a step, rollback, release."""

    def __init__(
        self, pool: BlockPool, block_size: int = BLOCK_SIZE, prefix_cache: bool = True, cache_dtype: str = ""
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.cache_dtype = cache_dtype

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def admit(self, sequence: Sequence, use_prefix: bool = True) -> int:
        """Takes the cached blocks of the longest known prefix, at most len - 1 tokens; returns the number of tokens
        found."""
        if sequence.block_table or not (self.prefix_cache and use_prefix):
            return 0
        key = root_key(sequence.salt, cache_dtype=self.cache_dtype)
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

    def extend(self, sequence: Sequence, ids: Iterable[int] = (), num_tokens: int | None = None) -> None:
        """Appends ids and makes room for the first `num_tokens` tokens (all by default). Raises OutOfBlocks and changes
        nothing if there is none."""
        new_ids = list(ids)
        length = len(sequence) + len(new_ids) if num_tokens is None else num_tokens
        missing = self.blocks_for(length) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table.extend(self.pool.allocate(missing))
        sequence.tokens.extend(new_ids)

    def fork(self, sequence: Sequence, length: int) -> tuple[Sequence, tuple[int, int] | None]:
        """A sequence with the first `length` tokens, all of them computed: it shares their full blocks and owns a copy
        of the part-filled one. Returns it with the block to copy and where to. Raises OutOfBlocks and changes
        nothing."""
        if length > sequence.num_computed_tokens:
            raise ValueError(f"{length} tokens to fork, {sequence.num_computed_tokens} are computed")
        full = length // self.block_size
        own = self.pool.allocate(1) if length % self.block_size else []
        for block in sequence.block_table[:full]:
            self.pool.share(block)
        forked = Sequence(
            sequence.tokens[:length],
            sequence.salt,
            length,
            [*sequence.block_table[:full], *own],
            sequence.block_keys[:full],
        )
        return forked, (sequence.block_table[full], own[0]) if own else None

    def truncate(self, sequence: Sequence, length: int) -> None:
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

    def publish(self, sequence: Sequence, num_committed: int) -> None:
        """Makes the full blocks findable that lie wholly below both the committed length and `num_computed_tokens`."""
        if not self.prefix_cache:
            return
        full = min(num_committed, sequence.num_computed_tokens) // self.block_size
        for index in range(len(sequence.block_keys), full):
            parent = (
                sequence.block_keys[-1]
                if sequence.block_keys
                else root_key(sequence.salt, cache_dtype=self.cache_dtype)
            )
            key = chain_key(parent, sequence.tokens[index * self.block_size : (index + 1) * self.block_size])
            self.pool.register(sequence.block_table[index], key)
            sequence.block_keys.append(key)

    def forget(self, sequence: Sequence, num_found: int) -> None:
        """Nobody finds the sequence's blocks any more, but for the first `num_found` tokens'."""
        self.pool.forget(sequence.block_table[num_found // self.block_size :])

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back; the sequence must be computed again (or found in the prefix cache) to go on."""
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.block_keys.clear()
        sequence.num_computed_tokens = 0
