"""The block pool alone: counts, reuse order, the prefix index.

Sequences over the pool, against a model of what every slot holds: no history of steps may read another's tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.kv_cache_manager import BlockPool, CachedSequence, KVCacheManager, OutOfBlocks, chain_key, root_key


def test_a_fork_is_of_the_same_adapter() -> None:
    """And blocks of another are not found."""
    cache = KVCacheManager(BlockPool(8), BLOCK)
    sequence = CachedSequence([1, 2, 3, 4, 5], adapter="a")
    cache.extend(sequence)
    sequence.num_computed_tokens = 4
    forked, _ = cache.fork(sequence, 4)
    assert forked.adapter == "a"
    cache.publish(sequence, 5)
    assert [cache.admit(CachedSequence([1, 2, 3, 4, 5], adapter=name)) for name in ("a", "", "b")] == [4, 0, 0]


def test_all_or_nothing() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 free of 3"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([taken])


def test_release_of_a_free_block_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks)


def test_cached_blocks_are_reused_last_and_least_recently_freed_first() -> None:
    pool = BlockPool(4)
    old, young, plain, _ = (pool.allocate(1)[0] for _ in range(4))
    pool.register(old, b"old")
    pool.register(young, b"young")
    pool.release([old])
    pool.release([young])
    pool.release([plain])
    assert pool.allocate(1) == [plain]
    assert pool.allocate(1) == [old]
    assert pool.find(b"old") is None and pool.find(b"young") == young


def test_a_free_cached_block_can_be_taken_again() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.register(block, b"key")
    pool.release([block])
    pool.share(block)
    assert pool.num_free == 0 and pool.references(block) == 1 and block in pool._key_of
    pool.check_integrity([[block]])


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"key")
    pool.register(second, b"key")
    assert pool.find(b"key") == first and second not in pool._key_of


def test_clear_cache_forgets_keys_only() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"key")
    pool.clear_cache()
    assert pool.find(b"key") is None and pool.references(blocks[0]) == 1
    pool.check_integrity([blocks])


def test_integrity_names_what_differs() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    with pytest.raises(ValueError, match=rf"blocks \[{blocks[0]}\]"):
        pool.check_integrity([])


def test_keys_depend_on_everything_before_and_around() -> None:
    keys = {
        chain_key(root_key(salt, adapter, dtype, model), tokens)
        for salt in ("", "a")
        for adapter in ("", "a")
        for dtype in ("", "a")
        for model in ("", "a")
        for tokens in ([1, 2], [2, 1])
    }
    assert len(keys) == 32
    assert chain_key(root_key("s"), [1, 2]) == chain_key(root_key("s"), [1, 2])


BLOCK, NUM_BLOCKS = 2, 9
Content = tuple[str, tuple[int, ...]]  # salt and the tokens up to the slot: what its key and value are a function of


class SequenceMachine(RuleBasedStateMachine):
    """Random histories of admissions, verified windows, rollbacks, preemptions and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = KVCacheManager(self.pool, BLOCK)
        self.sequences: list[CachedSequence] = []
        self.committed: dict[int, list[int]] = {}  # by id(sequence)
        self.slots: dict[tuple[int, int], Content] = {}
        self.known: set[Content] = set()  # committed prefixes

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "x"]))
    def admit(self, tokens: list[int], salt: str) -> None:
        sequence = CachedSequence(list(tokens), salt=salt)
        found = self.cache.admit(sequence)
        assert found == sequence.num_computed_tokens <= len(tokens) - 1 and found % BLOCK == 0
        self.sequences.append(sequence)
        self.committed[id(sequence)] = list(tokens)
        self._commit(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), drafted=st.lists(st.integers(0, 1), max_size=4), bonus=st.booleans())
    def verify(self, data: st.DataObject, drafted: list[int], bonus: bool) -> None:
        """A window: its rows are computed, a prefix of it and perhaps one more token is committed, the rest rolled
        back."""
        sequence = data.draw(st.sampled_from(self.sequences))
        before = list(sequence.tokens), list(sequence.block_table), sequence.num_computed_tokens
        try:
            self.cache.extend(sequence, drafted)
        except OutOfBlocks:
            assert before == (sequence.tokens, sequence.block_table, sequence.num_computed_tokens)
            return
        self._compute(sequence, len(sequence))
        accepted = data.draw(st.integers(0, len(drafted)))
        self.committed[id(sequence)] += drafted[:accepted]
        self.cache.truncate(sequence, len(self.committed[id(sequence)]))
        if bonus or accepted < len(drafted) or not drafted:
            self.committed[id(sequence)].append(1)
            sequence.num_computed_tokens = len(sequence.tokens)
            self._pin(sequence)
            self.cache.extend(sequence, [1], num_tokens=len(sequence.tokens))
        self._commit(sequence)
        self.cache.publish(sequence, len(self.committed[id(sequence)]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), rows=st.integers(1, 3))
    def prefill_chunk(self, data: st.DataObject, rows: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        end = min(sequence.num_computed_tokens + rows, len(sequence) - 1)
        try:
            self.cache.extend(sequence, num_tokens=end)
        except OutOfBlocks:
            return
        self._compute(sequence, end)
        self.cache.publish(sequence, len(sequence))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """To any length at all, as after a correction of a draft."""
        sequence = data.draw(st.sampled_from(self.sequences))
        length = data.draw(st.integers(1, len(sequence)))
        self.cache.truncate(sequence, length)
        self.committed[id(sequence)] = list(sequence.tokens)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def preempt_and_admit_again(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.cache.release(sequence)
        assert self.cache.admit(sequence) <= len(sequence) - 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        del self.committed[id(sequence)]
        self.cache.release(sequence)

    @invariant()
    def counts_hold(self) -> None:
        self.pool.check_integrity(sequence.block_table for sequence in self.sequences)

    @invariant()
    def every_sequence_finds_its_own_tokens(self) -> None:
        for sequence in self.sequences:
            assert 0 <= sequence.num_computed_tokens < len(sequence)
            for position in range(sequence.num_computed_tokens):
                assert self.slots[self._slot(sequence, position)] == self._content(sequence, position)

    @invariant()
    def blocks_to_be_written_are_owned_alone_and_not_findable(self) -> None:
        for sequence in self.sequences:
            for block in sequence.block_table[sequence.num_computed_tokens // BLOCK :]:
                assert self.pool.references(block) == 1 and block not in self.pool._key_of

    @invariant()
    def findable_blocks_hold_committed_tokens(self) -> None:
        for block in range(NUM_BLOCKS):
            if block in self.pool._key_of:
                assert all(self.slots[block, offset] in self.known for offset in range(BLOCK))

    def _compute(self, sequence: CachedSequence, end: int) -> None:
        for position in range(sequence.num_computed_tokens, end):
            block, offset = self._slot(sequence, position)
            assert self.pool.references(block) == 1
            self.slots[block, offset] = self._content(sequence, position)
        sequence.num_computed_tokens = min(end, len(sequence) - 1)

    def _pin(self, sequence: CachedSequence) -> None:
        """After a rejection the token before the recovered one was computed: it counts once the next token is there."""
        position = len(sequence.tokens) - 1
        assert self.slots[self._slot(sequence, position)] == self._content(sequence, position)

    def _commit(self, sequence: CachedSequence) -> None:
        tokens = tuple(self.committed[id(sequence)])
        self.known.update((sequence.salt, tokens[:length]) for length in range(1, len(tokens) + 1))

    def _slot(self, sequence: CachedSequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // BLOCK], position % BLOCK

    @staticmethod
    def _content(sequence: CachedSequence, position: int) -> Content:
        return sequence.salt, tuple(sequence.tokens[: position + 1])


TestSequenceMachine = SequenceMachine.TestCase
TestSequenceMachine.settings = settings(max_examples=150, stateful_step_count=40)


def admitted(cache: KVCacheManager, tokens: list[int], salt: str = "") -> CachedSequence:
    sequence = CachedSequence(list(tokens), salt=salt)
    cache.admit(sequence)
    cache.extend(sequence)
    sequence.num_computed_tokens = len(tokens) - 1
    cache.publish(sequence, len(tokens))
    return sequence


@pytest.mark.parametrize(("length", "found"), [(2, 0), (3, 2), (4, 2), (5, 4), (9, 4)])
def test_a_hit_covers_whole_blocks_and_at_most_all_but_one(length: int, found: int) -> None:
    cache = KVCacheManager(BlockPool(20), BLOCK)
    admitted(cache, [0, 1, 2, 3, 4])
    assert cache.admit(CachedSequence(list(range(length)))) == found


def test_salt_and_cache_dtype_separate() -> None:
    pool = BlockPool(20)
    admitted(KVCacheManager(pool, BLOCK), [1, 2, 3], salt="a")
    assert KVCacheManager(pool, BLOCK).admit(CachedSequence([1, 2, 3], salt="b")) == 0
    assert KVCacheManager(pool, BLOCK, cache_dtype="fp8").admit(CachedSequence([1, 2, 3], salt="a")) == 0
    assert KVCacheManager(pool, BLOCK).admit(CachedSequence([1, 2, 3], salt="a")) == 2


def test_prefix_is_not_read_where_it_must_not_be() -> None:
    cache = KVCacheManager(BlockPool(20), BLOCK)
    admitted(cache, [1, 2, 3])
    assert cache.admit(CachedSequence([1, 2, 3]), use_prefix=False) == 0
    off = KVCacheManager(BlockPool(20), BLOCK, prefix_cache=False)
    admitted(off, [1, 2, 3])
    assert off.admit(CachedSequence([1, 2, 3])) == 0


def test_tokens_committed_but_not_computed_are_not_published() -> None:
    cache = KVCacheManager(BlockPool(20), BLOCK)
    sequence = CachedSequence([1, 2, 3, 4])
    cache.extend(sequence)
    sequence.num_computed_tokens = 3
    cache.publish(sequence, 4)
    assert cache.admit(CachedSequence([1, 2, 3, 4, 5])) == 2
