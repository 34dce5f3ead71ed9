"""A suffix store on disk: one file, written whole in place of the one before, and believed only if its checksum holds.

MAGIC  version, depth, generations
per generation: sequences, indices
    per index: salt's digest, bytes of text, bytes of order; text, order
BLAKE2b of all before"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from outrider.proposers.suffix.index import ContextIndex
from outrider.proposers.suffix.store import Generation, SuffixStore

VERSION = 1
MAGIC = f"outrider suffix store, {sys.byteorder} endian\n".encode()
HEADER = struct.Struct("<III")
GENERATION = struct.Struct("<II")
INDEX = struct.Struct("<16sII")
CHECKSUM = hashlib.blake2b


class BadStoreFile(ValueError):
    """The file is damaged, no store's, or that of another version, another depth or another byte order."""


def save(store: SuffixStore, path: Path) -> None:
    """Writes the store to a file that its owner alone may read. Raises OSError."""
    descriptor, fresh = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            checksum = CHECKSUM()
            for part in _parts(store):
                checksum.update(part)
                file.write(part)
            file.write(checksum.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def load(store: SuffixStore, path: Path) -> None:
    """Fills the store from a file, within the store's bounds. Raises BadStoreFile and OSError."""
    data = path.read_bytes()
    size = len(data) - CHECKSUM().digest_size
    if not data.startswith(MAGIC) or size < len(MAGIC) + HEADER.size:
        raise BadStoreFile(f"{path} is no suffix store of a machine like this one")
    version, depth, num_generations = HEADER.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise BadStoreFile(f"{path} has version {version}; allowed: {VERSION}")
    if CHECKSUM(memoryview(data)[:size]).digest() != data[size:]:
        raise BadStoreFile(f"{path} is damaged: its checksum is another one's")
    if depth != store.depth:
        raise BadStoreFile(f"{path} tells contexts apart by {depth} tokens, and {store.depth} are asked for")
    store.restore(list(_generations(data, depth, num_generations)))


def _parts(store: SuffixStore) -> Iterator[bytes]:
    generations = store.generations
    yield MAGIC
    yield HEADER.pack(VERSION, store.depth, len(generations))
    for generation in generations:
        yield GENERATION.pack(generation.num_sequences, len(generation.indices))
        for salt, index in generation.indices.items():
            text, order = index.dump()
            yield INDEX.pack(salt, len(text), len(order))
            yield text
            yield order


def _generations(data: bytes, depth: int, count: int) -> Iterator[Generation]:
    at = len(MAGIC) + HEADER.size
    for _ in range(count):
        num_sequences, num_indices = GENERATION.unpack_from(data, at)
        at += GENERATION.size
        generation = Generation(num_sequences=num_sequences)
        for _ in range(num_indices):
            salt, text, order = INDEX.unpack_from(data, at)
            at += INDEX.size
            index = ContextIndex.load(depth, data[at : at + text], data[at + text : at + text + order])
            at += text + order
            generation.indices[salt] = index
            generation.num_bytes += index.num_bytes
        yield generation
