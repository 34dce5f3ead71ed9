"""The store's bounds, its generations, and its file."""

from __future__ import annotations

import os
import random
import stat
import struct
import sys
import time
import tracemalloc
from array import array
from pathlib import Path
from threading import Event, current_thread

import pytest

from outrider.proposers.suffix import store_file
from outrider.proposers.suffix.index import ContextIndex
from outrider.proposers.suffix.store import GENERATIONS, MAX_WAITING, SLICE, Generation, SuffixStore, digest_of
from outrider.proposers.suffix.store_file import BadStoreFile

DEPTH = 8
WORDS = [[random.Random(number).randrange(50_000)] * 12 for number in range(200)]


def output(number: int, words: int = 20) -> list[int]:
    """Text of which much occurs again, and that tells its number."""
    chosen = random.Random(number)
    return [100_000 + number, *(token for _ in range(words) for token in chosen.choice(WORDS))]


def knows(store: SuffixStore, number: int, salt: str = "") -> bool:
    begin = array("I", [100_000 + number]).tobytes()
    return any(index.longest_match(begin, 1, index.locate(begin)) for index in store.indices(digest_of(salt)))


def fill(store: SuffixStore, numbers: range, salts: int = 1) -> None:
    for number in numbers:
        store.add((), output(number), str(number % salts))
        store.index_next()


@pytest.mark.parametrize("salts", [1, 20, 10**6])
def test_memory_is_bounded_and_reported(salts: int) -> None:
    """More is fed than fits: to one caller, to some, and to as many as there are outputs."""
    bound, store = 1 << 17, SuffixStore(DEPTH, 1 << 17, 10**6)
    tracemalloc.start()
    try:
        before, most = tracemalloc.get_traced_memory()[0], 0
        for number in range(150):
            fill(store, range(number, number + 1), salts)
            most = max(most, store.num_bytes)
        held, peak = (traced - before for traced in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert bound // 3 < held <= store.num_bytes <= most <= bound and peak <= bound
    assert store.num_generations == GENERATIONS
    assert knows(store, 149, str(149 % salts)) and not knows(store, 0, "0")


def test_the_oldest_generation_goes_whole() -> None:
    store = SuffixStore(DEPTH, 1 << 20, 9)
    kept = []
    for number in range(14):
        fill(store, range(number, number + 1))
        kept.append([other for other in range(14) if knows(store, other, "0")])
        assert len(kept[-1]) == store.num_sequences <= 9
    assert [len(numbers) for numbers in kept] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 8, 9, 7, 8]
    assert kept[-1] == list(range(6, 14))


def test_a_long_output_waits_and_is_found_to_its_end() -> None:
    store, text = SuffixStore(DEPTH, 1 << 20, 10), [100_000, *range(10 * SLICE)]
    store.add((), text, "")
    assert not knows(store, 0)
    store.index_next()
    assert knows(store, 0) and store.num_sequences == 1
    assert store.num_bytes > 4 * 9 * SLICE  # what waits counts
    for _ in range(20):
        store.index_next()
    assert store.num_sequences == 1
    for at in range(2, len(text), 97):
        context = array("I", text[at - 2 : at][::-1]).tobytes()
        assert [index.longest_match(context, 1, index.locate(context)) for index in store.indices(digest_of(""))] == [2]


def test_nothing_waits_for_ever() -> None:
    store = SuffixStore(DEPTH, 64 << 20, 10**6)
    for number in range(1000):
        store.add((), output(number), "")
    assert knows(store, 0) and not knows(store, 999)
    for _ in range(MAX_WAITING):
        store.index_next()
    assert knows(store, 999)


def test_without_requests_nothing_is_stored() -> None:
    store = SuffixStore(DEPTH, 1 << 20, 0)
    fill(store, range(3))
    assert not store.num_sequences and not store.num_bytes and not list(store.indices(digest_of("0")))


def saved(tmp_path: Path, numbers: range = range(40)) -> tuple[SuffixStore, Path]:
    store, path = SuffixStore(DEPTH, 1 << 20, 36), tmp_path / "store"
    fill(store, numbers, salts=3)
    store_file.save(store, path)
    return store, path


def test_a_store_is_the_same_after_a_restart(tmp_path: Path) -> None:
    store, path = saved(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["store"]
    again = SuffixStore(DEPTH, 1 << 20, 36)
    store_file.load(again, path)
    assert (again.num_sequences, again.num_generations) == (store.num_sequences, store.num_generations)
    for number in range(60):
        if number >= 40:  # and it goes on alike
            fill(store, range(number, number + 1), salts=3)
            fill(again, range(number, number + 1), salts=3)
    for number in range(60):
        assert knows(again, number, str(number % 3)) == knows(store, number, str(number % 3))
        assert not knows(again, number, str((number + 1) % 3))


def test_a_file_is_read_within_smaller_bounds(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    again = SuffixStore(DEPTH, 1 << 20, 20)
    store_file.load(again, path)
    assert 0 < again.num_sequences <= 20
    assert knows(again, 39, "0") and not knows(again, 4, "1")
    tiny = SuffixStore(DEPTH, 1 << 10, 36)
    store_file.load(tiny, path)
    assert tiny.num_sequences == 0


def test_every_damage_is_seen(tmp_path: Path) -> None:
    _, path = saved(tmp_path, range(2))
    good = path.read_bytes()
    for at in range(len(store_file.MAGIC) + 4, len(good), 101):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(BadStoreFile, match="damaged"):
            store_file.load(SuffixStore(DEPTH, 1 << 20, 36), path)
    for size in (0, 10, len(store_file.MAGIC), len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(BadStoreFile):
            store_file.load(SuffixStore(DEPTH, 1 << 20, 36), path)


def test_what_is_no_store_of_ours(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    with pytest.raises(BadStoreFile, match="by 8 tokens, and 9 are asked for"):
        store_file.load(SuffixStore(9, 1 << 20, 36), path)
    good, at = path.read_bytes(), len(store_file.MAGIC)
    path.write_bytes(good[:at] + struct.pack("<I", 1) + good[at + 4 :])
    with pytest.raises(BadStoreFile, match="has version 1; allowed: 2"):
        store_file.load(SuffixStore(DEPTH, 1 << 20, 36), path)
    path.write_bytes(b"x" * 1000)
    with pytest.raises(BadStoreFile, match="no suffix store"):
        store_file.load(SuffixStore(DEPTH, 1 << 20, 36), path)


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = saved(tmp_path)
    good = path.read_bytes()

    def fails(index: ContextIndex) -> tuple[bytes, bytes]:
        raise OSError("no space left")

    monkeypatch.setattr(ContextIndex, "dump", fails)
    with pytest.raises(OSError, match="no space"):
        store_file.save(store, path)
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["store"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_100_mb_of_text_in_64_mb() -> None:
    """By the process' own memory, not by the store's word. Four bytes of text are a token, as for most tokenizers."""
    store = SuffixStore(24, 64 << 20, 10**6)
    text = b"".join(b"def f%d(x): return x * %d + %d\n" % (n, n * n % 977, n) for n in range(4000))
    tokens = memoryview(text[: len(text) // 4 * 4]).cast("I").tolist()
    before, fed = resident_bytes(), 0
    while fed < 100 << 20:
        store.add((), tokens, str(fed % 7))
        store.index_next()
        fed += len(text)
        assert store.num_bytes <= 64 << 20
    assert resident_bytes() - before <= 64 << 20
    assert store.num_bytes > 30 << 20


def resident_bytes() -> int:
    """Of this process now."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_written_while_more_comes_is_of_one_moment() -> None:
    """Another thread's image, and what waited when it was asked for; nothing that came later."""
    store = SuffixStore(DEPTH, 1 << 20, 1000)
    fill(store, range(40))
    store.add((), output(40), "0")  # waits
    expected = SuffixStore(DEPTH, 1 << 20, 1000)
    count, images = store.images()
    fill(store, range(41, 400))  # into other blocks, and other buffers
    expected.restore([Generation.of(image, DEPTH) for image in images])
    assert count == 1 and expected.num_sequences == 41
    assert [number for number in range(60) if knows(expected, number, "0")] == list(range(41))


def test_a_writer_of_its_own_writes_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, times = tmp_path / "store", list[float]()
    saved_by, save = list[str](), store_file.save
    saved_once = Event()

    def noted(store: SuffixStore, path: Path) -> None:
        saved_by.append(current_thread().name)  # before the file can be seen
        save(store, path)
        saved_once.set()

    monkeypatch.setattr(store_file, "save", noted)
    (tmp_path / ".store-left").write_bytes(b"by a process that was killed")
    os.utime(tmp_path / ".store-left", (0, 0))
    (tmp_path / ".store-fresh").write_bytes(b"another process's, which writes")
    store = SuffixStore(DEPTH, 1 << 20, 1000)
    file = store_file.StoreFile(store, path, 0.01)
    try:
        assert sorted(os.listdir(tmp_path)) == [".store-fresh"]
        fill(store, range(3))
        assert saved_once.wait(60)
        while knows_file(path) != 3:  # the writer may have come before the last one
            assert not times or time.monotonic() - times[0] < 60
            times = times or [time.monotonic()]
            time.sleep(0.01)
        num_saved = len(saved_by)
        time.sleep(0.1)
        assert len(saved_by) == num_saved and set(saved_by) == {"suffix-store"}, "nothing new, nothing written"
    finally:
        file.close()
    assert saved_by[-1] == current_thread().name


def knows_file(path: Path) -> int:
    store = SuffixStore(DEPTH, 1 << 20, 1000)
    store_file.load(store, path)
    return store.num_sequences
