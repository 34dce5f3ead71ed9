"""What a cache must hold, and must not: keys and values against a fresh prefill, the prefix cache against what was
committed, writes against the rows of a step, and poison where nothing may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import CachedSequence, SequenceCache, chain_key, root_key
from outrider.engine.model_runner import ModelRunner
from outrider.engine.models.base import CausalLM

Forward = Callable[[Sequence[BatchEntry]], Tensor]
FRESH_BLOCKS = 16


def seen(bug: object) -> AbstractContextManager[Any]:
    """Around the checks of a scenario: with its bug put in, one of them must fail."""
    return pytest.raises(AssertionError) if bug else nullcontext()


class FreshPrefill:
    """Keys and values of tokens computed in one pass into an empty cache."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    def of(self, tokens: Sequence[int]) -> list[Tensor]:  # per layer keys, then values: [tokens, kv_heads, dim]
        """Computed once per prefix."""
        key = tuple(tokens)
        if key not in self._known:
            runner = ModelRunner(self._model, FRESH_BLOCKS)
            runner.forward([BatchEntry(key, 0, list(range(FRESH_BLOCKS)), 1)])
            self._known[key] = [part.flatten(0, 1)[: len(key)] for part in (*runner.cache.keys, *runner.cache.values)]
        return self._known[key]


def held_kv(runner: ModelRunner, block_table: Sequence[int], length: int) -> list[Tensor]:
    """What the cache holds of the first `length` tokens of a block table, in the same form."""
    table = torch.tensor(block_table, dtype=torch.int64)
    return [part[table].flatten(0, 1)[:length] for part in (*runner.cache.keys, *runner.cache.values)]


def check_kv(runner: ModelRunner, sequence: CachedSequence, fresh: FreshPrefill, exact: bool = True) -> None:
    """Every computed token's keys and values are those of a fresh prefill: to the bit, or but for rounding."""
    length = sequence.num_computed_tokens
    assert length < len(sequence), f"{length} of {len(sequence)} tokens count as computed"
    if length == 0:
        return
    held = held_kv(runner, sequence.block_table, length)
    for ours, theirs in zip(held, fresh.of(sequence.tokens[:length]), strict=True):
        same = (ours == theirs) if exact else torch.isclose(ours, theirs, atol=1e-4)
        wrong = (~same).flatten(1).any(1).nonzero().flatten().tolist()
        assert not wrong, f"keys or values of positions {wrong} of {length} are not a fresh prefill's"


class PrefixLedger:
    """The committed prefixes that a prefix cache may hold, by key."""

    def __init__(self, cache: SequenceCache) -> None:
        self._cache = cache
        self._prefixes: dict[bytes, tuple[int, ...]] = {}
        self._mirror: list[Tensor] = []  # per layer keys, then values, as they should be in findable blocks
        self._mirrored: dict[int, bytes] = {}

    def keys(self, committed: Sequence[int], salt: str = "") -> list[bytes]:
        """The keys of all full blocks of committed tokens; they are known from now on."""
        size, keys = self._cache.block_size, [root_key(salt, cache_dtype=self._cache.cache_dtype)]
        for end in range(size, len(committed) + 1, size):
            keys.append(chain_key(keys[-1], committed[end - size : end]))
            self._prefixes[keys[-1]] = tuple(committed[:end])
        return keys[1:]

    def check(self, runner: ModelRunner, fresh: FreshPrefill) -> None:
        """Findable blocks are full blocks of committed tokens, and hold what these tokens give."""
        findable, parts = dict(self._cache.pool._key_of), (*runner.cache.keys, *runner.cache.values)
        if not self._mirror:
            self._mirror = [torch.empty_like(part) for part in parts]
        for block, key in findable.items() - self._mirrored.items():
            assert key in self._prefixes, f"block {block} is findable by tokens that were not committed"
            for mirror, expected in zip(self._mirror, fresh.of(self._prefixes[key]), strict=True):
                mirror[block] = expected[-self._cache.block_size :]
        self._mirrored = findable
        blocks = torch.tensor(sorted(findable), dtype=torch.int64)
        for part, mirror in zip(parts, self._mirror, strict=True):
            assert torch.equal(part[blocks], mirror[blocks]), "a findable block holds other tokens' keys or values"

    def check_complete(self, sequence: CachedSequence) -> None:
        """Every full computed block of a living sequence was published: nothing that was accepted is left out."""
        full = sequence.num_computed_tokens // self._cache.block_size
        keys = self.keys(sequence.tokens[: full * self._cache.block_size], sequence.salt)
        assert sequence.block_keys == keys, "a computed block of committed tokens was not published"


def watch_forward(runner: ModelRunner, wrap: Callable[[Forward, Sequence[BatchEntry]], Tensor]) -> None:
    """Lets `wrap` run the runner's forward passes from now on."""
    forward = runner.forward
    runner.forward = lambda entries: wrap(forward, entries)  # type: ignore[method-assign]


def poison(runner: ModelRunner, cache: SequenceCache, sequences: Callable[[], Iterable[CachedSequence]]) -> list[int]:
    """Before every pass, writes NaN wherever nothing may be read: blocks that are free and not findable, and the slots
    of tables past what is computed. Returns the numbers of blocks poisoned, a list that grows."""
    num_poisoned: list[int] = []

    def run(forward: Forward, entries: Sequence[BatchEntry]) -> Tensor:
        pool = cache.pool
        free = [b for b in range(pool.num_blocks) if pool.references(b) == 0 and not pool.is_cached(b)]
        slots = [block * cache.block_size + offset for block in free for offset in range(cache.block_size)]
        for sequence in sequences():
            end = len(sequence.block_table) * cache.block_size
            slots += [slot_of(sequence.block_table, p) for p in range(sequence.num_computed_tokens, end)]
        for part in (*runner.cache.keys, *runner.cache.values):
            part.flatten(0, 1)[slots] = float("nan")
        num_poisoned.append(len(free))
        return forward(entries)

    watch_forward(runner, run)
    return num_poisoned


def check_writes(runner: ModelRunner, cache: SequenceCache) -> list[int]:
    """Checks from now on that a pass writes the slots of its own rows alone, in blocks that nobody shares or can find.
    Returns the numbers of slots written, a list that grows."""
    num_written: list[int] = []

    def run(forward: Forward, entries: Sequence[BatchEntry]) -> Tensor:
        before = [part.clone() for part in (*runner.cache.keys, *runner.cache.values)]
        logits = forward(entries)
        changed: set[int] = set()
        for old, new in zip(before, (*runner.cache.keys, *runner.cache.values), strict=True):
            changed |= set((old != new).flatten(0, 1).flatten(1).any(1).nonzero().squeeze(1).tolist())
        rows = {slot_of(e.block_table, e.start + offset) for e in entries for offset in range(len(e.token_ids))}
        assert changed <= rows, "slots were written that are no row's of this pass"
        for block in {slot // cache.block_size for slot in rows}:
            assert cache.pool.references(block) == 1, f"block {block} is written and not owned alone"
            assert not cache.pool.is_cached(block), f"block {block} is written and findable"
        num_written.append(len(changed))
        return logits

    watch_forward(runner, run)
    return num_written


def slot_of(block_table: Sequence[int], position: int, block_size: int = 16) -> int:
    """Where a position's keys and values are."""
    return block_table[position // block_size] * block_size + position % block_size
