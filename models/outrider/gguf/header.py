"""The header of a GGUF file (version 2 and 3, little-endian): its metadata, and which tensors lie where.

Nothing of a header is believed before it was held against the file: a number of things that the file has no room for,
a tensor beyond its end or in the place of another is refused at once, by name. The layout is that of ggml's
`docs/gguf.md`."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32  # of tensors, where the metadata says no other
MOST_KEYS, MOST_TENSORS, MOST_DIMENSIONS = 1 << 16, 1 << 16, 4
MOST_NAME_BYTES = 1 << 12  # of a key, or a tensor's name
MOST_DEPTH = 4  # of arrays in arrays
MOST_FILES = 1 << 12  # of a split model

Metadata = Mapping[str, Any]


class WrongGguf(ValueError):
    """A file that is no GGUF, is damaged, or holds what can't be served."""


class BlockKind(NamedTuple):
    """How numbers lie in a tensor: blocks of so many numbers take so many bytes."""

    name: str
    block: int
    num_bytes: int


KINDS: Mapping[int, BlockKind] = {
    0: BlockKind("F32", 1, 4),
    1: BlockKind("F16", 1, 2),
    2: BlockKind("Q4_0", 32, 18),
    3: BlockKind("Q4_1", 32, 20),
    6: BlockKind("Q5_0", 32, 22),
    7: BlockKind("Q5_1", 32, 24),
    8: BlockKind("Q8_0", 32, 34),
    12: BlockKind("Q4_K", 256, 144),
    13: BlockKind("Q5_K", 256, 176),
    14: BlockKind("Q6_K", 256, 210),
    30: BlockKind("BF16", 1, 2),
    39: BlockKind("MXFP4", 32, 17),
}
# Of kinds that are not served, to be named where one is met.
OTHER_KINDS: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a file. `shape` is in the order of rows: the last dimension lies together."""

    name: str
    shape: tuple[int, ...]
    kind: BlockKind
    path: Path
    start: int  # of its bytes in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a model's files say of themselves: metadata are the first file's."""

    metadata: Metadata
    tensors: Mapping[str, TensorPlace]
    files: tuple[Path, ...]


def read_gguf(path: Path) -> GgufHeader:
    """The header of a model, of all its files where it is split. Raises WrongGguf."""
    metadata, places = read_part(path)
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST_FILES:
        raise WrongGguf(f"{path}: split.count: is {count!r:.40}; allowed: 0 to {MOST_FILES}")
    if count <= 1:
        return GgufHeader(metadata, _by_name([places]), (path,))
    files, parts = _split_files(path, count), [places]
    for number, file in enumerate(files[1:], start=1):
        of_part, places = read_part(file)
        if (of_part.get("split.no"), of_part.get("split.count")) != (number, count):
            raise WrongGguf(f"{file}: is not part {number + 1} of {count}")
        parts.append(places)
    tensors, said = _by_name(parts), metadata.get("split.tensors.count")
    if said is not None and said != len(tensors):
        raise WrongGguf(f"{path}: split.tensors.count: is {said!r:.40}, and its files hold {len(tensors)}")
    return GgufHeader(metadata, tensors, files)


def _split_files(path: Path, count: int) -> tuple[Path, ...]:
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (1, count):
        allowed = f"its first part, whose name ends in -00001-of-{count:05d}.gguf"
        raise WrongGguf(f"{path}: is one of {count} parts of a model; allowed: {allowed}")
    files = tuple(path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    if absent := [file.name for file in files if not file.is_file()]:
        raise WrongGguf(f"{path}: the model has {count} parts, and {absent[0]} is not beside it")
    return files


def _by_name(parts: Sequence[Sequence[TensorPlace]]) -> dict[str, TensorPlace]:
    found: dict[str, TensorPlace] = {}
    for place in (place for places in parts for place in places):
        if place.name in found:
            raise WrongGguf(f"{place.path} holds {place.name} a second time")
        found[place.name] = place
    return found


def read_part(path: Path) -> tuple[dict[str, Any], list[TensorPlace]]:
    """What one file holds, of a split model as well: its metadata and its tensors. Raises WrongGguf."""
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = _Cursor(path, mapped)
            try:
                metadata, num_tensors = cursor.metadata()
                return metadata, list(_places(path, cursor, metadata, num_tensors))
            except (struct.error, UnicodeDecodeError, RecursionError):
                raise WrongGguf(f"{path} is damaged or cut off at byte {cursor.at}") from None
    except ValueError as error:
        if isinstance(error, WrongGguf):
            raise
        raise WrongGguf(f"{path} is empty") from error  # which can't be mapped


class _Cursor:
    """Reads on from a place in a file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.at, self.size = 0, len(mapped)
        self._path, self._mapped = path, mapped

    def metadata(self) -> tuple[dict[str, Any], int]:
        """What stands before the tensors, and how many of these there are."""
        if self._bytes(4) != MAGIC:
            raise WrongGguf(f"{self._path} is no GGUF: it begins with {self._mapped[:4]!r}")
        version = self.number("I")
        if version not in VERSIONS:
            allowed = " and ".join(map(str, VERSIONS))
            raise WrongGguf(f"{self._path}: version: is {version}; allowed: {allowed}, little-endian")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        for what, count, most in (("tensors", num_tensors, MOST_TENSORS), ("keys", num_keys, MOST_KEYS)):
            if count > most:
                raise WrongGguf(f"{self._path}: has {count} {what}; allowed: at most {most}")
        found: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.name("a key")
            if key in found:
                raise WrongGguf(f"{self._path}: has {key} a second time")
            found[key] = self._value(key, self.number("I"), MOST_DEPTH)
        return found, num_tensors

    def number(self, form: str) -> int:
        """The next number."""
        return int(self._numbers(form, 1)[0])

    def name(self, what: str) -> str:
        """The next string, which is the name of something."""
        text = self.string(MOST_NAME_BYTES, what)
        if not text:
            raise WrongGguf(f"{self._path}: {what} has no name, before byte {self.at}")
        return text

    def string(self, most: int, what: str) -> str:
        """The next string, of at most so many bytes."""
        length = self.number("Q")
        if length > min(most, self.size - self.at):
            raise WrongGguf(
                f"{self._path}: {what} has {length} bytes at byte {self.at}; the file is cut off or damaged"
            )
        return self._bytes(length).decode()

    def _value(self, key: str, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._bytes_of_string(key).decode(errors="surrogateescape")
        if kind == _ARRAY:
            return self._array(key, depth)
        return self._numbers(self._form(key, kind), 1)[0]

    def _array(self, key: str, depth: int) -> Sequence[Any]:
        kind, count = self.number("I"), self.number("Q")
        least = 8 if kind == _STRING else 12 if kind == _ARRAY else struct.calcsize(self._form(key, kind))
        if depth == 0 or count * least > self.size - self.at:
            raise WrongGguf(
                f"{self._path}: {key} has {count} entries at byte {self.at}, and the file has no room for them"
            )
        if kind == _STRING:
            return [self._bytes_of_string(key).decode(errors="surrogateescape") for _ in range(count)]
        if kind == _ARRAY:
            return [self._array(key, depth - 1) for _ in range(count)]
        return self._numbers(self._form(key, kind), count)

    def _bytes_of_string(self, key: str) -> bytes:
        length = self.number("Q")
        if length > self.size - self.at:
            raise WrongGguf(
                f"{self._path}: {key} has a text of {length} bytes at byte {self.at}, beyond the file's end"
            )
        return self._bytes(length)

    def _form(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise WrongGguf(f"{self._path}: {key} is of an unknown type, {kind}")
        return _NUMBERS[kind]

    def _numbers(self, form: str, count: int) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{form}", self._mapped, self.at)
        self.at += count * struct.calcsize(f"<{form}")
        return found

    def _bytes(self, count: int) -> bytes:
        found = self._mapped[self.at : self.at + count]
        self.at += count
        return found


def _places(path: Path, cursor: _Cursor, metadata: Metadata, num_tensors: int) -> Iterator[TensorPlace]:
    """The tensors of a file, once all of them were looked at."""
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise WrongGguf(f"{path}: general.alignment: is {alignment!r:.40}; allowed: a power of two from 8 to 65536")
    entries = [_entry(path, cursor, alignment) for _ in range(num_tensors)]
    begin = -(-cursor.at // alignment) * alignment
    places = [
        TensorPlace(name, shape, kind, path, begin + offset, prod(shape) // kind.block * kind.num_bytes)
        for name, shape, kind, offset in entries
    ]
    end, before = begin, ""
    for place in sorted(places, key=lambda place: place.start):
        if place.start + place.num_bytes > cursor.size:
            needed = place.start + place.num_bytes
            raise WrongGguf(f"{path}: {place.name} ends at byte {needed}, and the file has {cursor.size}")
        if place.start < end:
            raise WrongGguf(f"{path}: {place.name} lies in the place of {before}")
        end, before = place.start + place.num_bytes, place.name
    yield from places


def _entry(path: Path, cursor: _Cursor, alignment: int) -> tuple[str, tuple[int, ...], BlockKind, int]:
    name, num_dimensions = cursor.name("a tensor"), cursor.number("I")
    if not 1 <= num_dimensions <= MOST_DIMENSIONS:
        raise WrongGguf(f"{path}: {name} has {num_dimensions} dimensions; allowed: 1 to {MOST_DIMENSIONS}")
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
    number, offset = cursor.number("I"), cursor.number("Q")
    kind = KINDS.get(number)
    if kind is None:
        given = OTHER_KINDS.get(number, f"of an unknown kind, {number}")
        raise WrongGguf(f"{path}: {name} is {given}; allowed: {', '.join(kind.name for kind in KINDS.values())}")
    if not all(shape) or shape[-1] % kind.block:
        wanted = f"rows of a multiple of {kind.block}" if kind.block > 1 else "no empty dimension"
        raise WrongGguf(f"{path}: {name} has shape {shape}, {kind.name}; allowed: {wanted}")
    if offset % alignment:
        raise WrongGguf(f"{path}: {name} begins at {offset}; allowed: multiples of {alignment}")
    return name, shape, kind, offset
