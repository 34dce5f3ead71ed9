"""The block pool alone: counts, reuse order, the prefix index."""

from __future__ import annotations

import pytest

from outrider.engine.kv_cache_manager import BlockPool, OutOfBlocks, chain_key, root_key


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
    assert pool.num_free == 0 and pool.references(block) == 1 and pool.is_cached(block)
    pool.check_integrity([[block]])


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"key")
    pool.register(second, b"key")
    assert pool.find(b"key") == first and not pool.is_cached(second)


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
        chain_key(root_key(salt, adapter, dtype), tokens)
        for salt in ("", "a")
        for adapter in ("", "a")
        for dtype in ("", "a")
        for tokens in ([1, 2], [2, 1])
    }
    assert len(keys) == 16
    assert chain_key(root_key("s"), [1, 2]) == chain_key(root_key("s"), [1, 2])
