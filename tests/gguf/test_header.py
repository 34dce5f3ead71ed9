"""A header says what the file holds, of one file or several; a damaged or hostile one is refused by name, at once."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_files import Typed, write_gguf

from outrider.gguf.header import KINDS, WrongGguf, read_gguf

F32, Q8_0 = 0, 8
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": ["<unk>", "a", "你好"],
    "tokenizer.ggml.scores": [0.0, -1.5],
    "a.flag": True,
    "a.below": -3,
    "nested": [[1, 2], [3, 4]],
    "empty": [],
}
TENSORS = {
    "one": ((2, 32), Q8_0, bytes(range(68))),
    "other": ((3,), F32, struct.pack("<3f", 1.0, 2.0, 3.0)),
}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    header = read_gguf(write_gguf(tmp_path / "a.gguf", METADATA, TENSORS))
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in header.metadata.items()} == {
        **METADATA,
        "nested": [(1, 2), (3, 4)],
        "llama.rope.freq_base": np.float32(1e6),
    }
    for name, (shape, _, data) in TENSORS.items():
        place = header.tensors[name]
        assert (place.name, place.shape, place.num_bytes) == (name, shape, len(data))
        assert place.path.read_bytes()[place.start : place.start + place.num_bytes] == data


def test_the_library_reads_and_writes_the_same(tmp_path: Path) -> None:
    """gguf's own reader of our test's writer, and our reader of its writer."""
    theirs = gguf.GGUFReader(write_gguf(tmp_path / "ours.gguf", METADATA | {"empty": ["x"]}, TENSORS))
    assert [tensor.name for tensor in theirs.tensors] == list(TENSORS)
    writer = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_block_count(3)
    writer.add_tensor("a", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(tmp_path / "theirs.gguf")
    assert header.metadata["llama.block_count"] == 3 and header.tensors["a"].shape == (3, 4)


def test_kinds_are_the_librarys() -> None:
    for number, kind in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == tuple(kind)


def write_split(folder: Path, count: int = 2, **changes: Any) -> Path:
    for number in range(count):
        said = {"split.no": Typed("u16", number), "split.count": Typed("u16", count), "split.tensors.count": count}
        said |= METADATA if number == 0 else {}
        name = f"m-{number + 1:05d}-of-{count:05d}.gguf"
        write_gguf(folder / name, said | changes.get(f"part{number}", {}), {f"t{number}": TENSORS["other"]})
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_split_model_is_all_its_files(tmp_path: Path) -> None:
    first = write_split(tmp_path, 3)
    header = read_gguf(first)
    assert sorted(header.tensors) == ["t0", "t1", "t2"] and len(header.files) == 3
    with pytest.raises(WrongGguf, match="is one of 3 parts of a model; allowed: its first part"):
        read_gguf(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(WrongGguf, match=r"m-00003-of-00003\.gguf is not beside it"):
        read_gguf(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part1": {"split.no": Typed("u16", 7)}}, "is not part 2 of 2"),
        ({"part0": {"split.tensors.count": 9}}, "split.tensors.count: is 9, and its files hold 2"),
        ({"part0": {"split.count": Typed("u16", 60_000)}}, "split.count: is 60000; allowed: 0 to 4096"),
        ({"part0": {"split.count": "two"}}, "split.count: is 'two'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WrongGguf, match=message):
        read_gguf(write_split(tmp_path, **changes))


def edited(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + data + raw[at + len(data) :]


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
    return struct.pack("<Q", len(name)) + name.encode() + sizes


def file_of(
    entries: list[bytes], metadata: bytes = b"", keys: int = 0, count: int | None = None, room: int = 4096
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries) if count is None else count, keys)
    return head + metadata + b"".join(entries) + bytes(4096)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


HUGE = 1 << 62
WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "another magic": (b"GGML" + bytes(64), "is no GGUF: it begins with b'GGML'"),
    "a magic alone": (b"GGUF", "is damaged or cut off"),
    "version 1": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "version: is 1; allowed: 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "version: is 50331648"),
    "2^40 tensors": (file_of([], count=1 << 40), f"has {1 << 40} tensors; allowed: at most"),
    "2^40 keys": (file_of([], keys=1 << 40), f"has {1 << 40} keys"),
    "a key of 2^62 bytes": (file_of([], struct.pack("<Q", HUGE), 1), f"a key has {HUGE} bytes"),
    "an array of 2^62": (file_of([], key("k", 9, struct.pack("<IQ", 4, HUGE)), 1), f"k has {HUGE} entries"),
    "texts of 2^62": (file_of([], key("k", 9, struct.pack("<IQ", 8, HUGE)), 1), f"k has {HUGE} entries"),
    "a text of 2^62 bytes": (file_of([], key("k", 8, struct.pack("<Q", HUGE)), 1), f"k has a text of {HUGE} bytes"),
    "arrays in arrays": (file_of([], key("k", 9, struct.pack("<IQ", 9, 1) * 40), 1), "k has 1 entries"),
    "an unknown type": (file_of([], key("k", 77, bytes(8)), 1), "k is of an unknown type, 77"),
    "a key twice": (file_of([], key("k", 4, bytes(4)) * 2, 2), "has k a second time"),
    "a tensor twice": (file_of([entry("a", (4,), 0, 0), entry("a", (4,), 0, 32)]), "holds a a second time"),
    "no dimension": (file_of([entry("a", (), 0, 0)]), "a has 0 dimensions"),
    "five dimensions": (file_of([entry("a", (1,) * 5, 0, 0)]), "a has 5 dimensions; allowed: 1 to 4"),
    "an empty dimension": (file_of([entry("a", (4, 0), 0, 0)]), r"a has shape \(4, 0\), F32"),
    "half a block": (file_of([entry("a", (4, 40), 8, 0)]), r"a has shape \(4, 40\), Q8_0; allowed: rows of a multiple"),
    "a kind that is not served": (file_of([entry("a", (4, 256), 10, 0)]), "a is Q2_K; allowed: F32, F16"),
    "a kind that nobody knows": (file_of([entry("a", (4, 256), 99, 0)]), "a is of an unknown kind, 99"),
    "beyond the end": (file_of([entry("a", (1 << 20,), 0, 0)]), r"a ends at byte \d+, and the file has"),
    "2^62 numbers": (file_of([entry("a", (1 << 31, 1 << 31), 0, 0)]), "a ends at byte"),
    "one in the other": (file_of([entry("a", (64,), 0, 0), entry("b", (64,), 0, 64)]), "b lies in the place of a"),
    "out of line": (file_of([entry("a", (4,), 0, 5)]), "a begins at 5; allowed: multiples of 32"),
    "odd alignment": (file_of([], key("general.alignment", 4, struct.pack("<I", 48)), 1), "general.alignment: is 48"),
    "a name that is no text": (file_of([entry("a", (4,), 0, 0).replace(b"a", b"\xff")]), "is damaged or cut off"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_at_once(case: str, tmp_path: Path) -> None:
    raw, message = WRONG[case]
    file = tmp_path / "wrong.gguf"
    file.write_bytes(raw)
    began = time.process_time()
    with pytest.raises(WrongGguf, match=message):
        read_gguf(file)
    assert time.process_time() - began < 1.0


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", METADATA, TENSORS).read_bytes()
    file = tmp_path / "cut.gguf"
    end = len(whole) - len(whole) % 32 - 32 + 12  # the last tensor's last byte
    for length in range(0, end, 3):
        file.write_bytes(whole[:length])
        with pytest.raises(WrongGguf):
            read_gguf(file)
