"""A suffix store on disk: one file, written whole in place of the one before, every few minutes and at the end, and
believed only if its checksum holds.

MAGIC  version, depth, generations
per generation: sequences, indices
    per index: salt's digest, bytes of text, bytes of order; text, order
BLAKE2b of all before"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from outrider.proposers.suffix.store import Generation, Image, SuffixStore

logger = logging.getLogger(__name__)

LARGEST_SHARE = 0.05  # of the time that goes into writing
LEFT_S = 3600.0  # nobody writes for so long
VERSION = 2
MAGIC = f"outrider suffix store, {sys.byteorder} endian\n".encode()
HEADER = struct.Struct("<III")
GENERATION = struct.Struct("<II")
INDEX = struct.Struct("<16sII")
CHECKSUM = hashlib.blake2b


class BadStoreFile(ValueError):
    """The file is damaged, no store's, or that of another version, another depth or another byte order."""


class StoreFile:
    """A store's file: read when this is made, written by a thread of its own every so often, and at the end."""

    def __init__(self, store: SuffixStore, path: Path, interval_s: float) -> None:
        self._store, self._path, self._interval_s = store, path, interval_s
        self._read()
        self._written = store.num_added  # outputs that the file has
        self._ending = Event()
        self._thread = Thread(target=self._write_again_and_again, name="suffix-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes it for the last time."""
        self._ending.set()
        self._thread.join()
        self._write()

    def _read(self) -> None:
        remove_leftovers(self._path)
        if not self._path.exists():
            return
        try:
            load(self._store, self._path)
        except (OSError, BadStoreFile) as error:
            logger.warning("the suffix store starts empty: %s", error)
        else:
            logger.info("the suffix store has %d sequences of %s", self._store.num_sequences, self._path)

    def _write_again_and_again(self) -> None:
        """Where something is new. It takes a small share of the time, however large the store is."""
        pause_s = self._interval_s
        while not self._ending.wait(pause_s):
            began = time.monotonic()
            if self._store.num_added != self._written:
                self._write()
            pause_s = max(self._interval_s, (time.monotonic() - began) / LARGEST_SHARE)

    def _write(self) -> None:
        self._written = self._store.num_added
        try:
            save(self._store, self._path)
        except OSError as error:
            logger.error("the suffix store was not written: %s", error)


def remove_leftovers(path: Path) -> None:
    """Files that processes left behind that were killed while they wrote."""
    for file in path.parent.glob(f".{glob.escape(path.name)}-*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > LEFT_S:
                file.unlink()


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


def _parts(store: SuffixStore) -> Iterator[bytes | memoryview]:
    num_generations, images = store.images()
    yield MAGIC
    yield HEADER.pack(VERSION, store.depth, num_generations)
    for image in images:
        yield GENERATION.pack(image.num_sequences, len(image.indices))
        for salt, text, order in image.indices:
            yield INDEX.pack(salt, len(text), len(order))
            yield text
            yield order


def _generations(data: bytes, depth: int, count: int) -> Iterator[Generation]:
    at = len(MAGIC) + HEADER.size
    for _ in range(count):
        num_sequences, num_indices = GENERATION.unpack_from(data, at)
        at += GENERATION.size
        indices = []
        for _ in range(num_indices):
            salt, text, order = INDEX.unpack_from(data, at)
            at += INDEX.size
            indices.append((salt, data[at : at + text], data[at + text : at + text + order]))
            at += text + order
        yield Generation.of(Image(num_sequences, indices), depth)
