"""What a model's weights are: the SHA-256 of their contents, taken while they are loaded.

The digest is of names, types, shapes and contents: the same weights in other files, or in memory, have the same one.
hashlib lets go of the interpreter, so threads of its own read ahead of whoever loads. A checkpoint's digest is kept for
the next start, beside the checkpoint or in the user's cache, under what says that its files are still the same. A
folder that was copied has other inodes and times of change: what was copied with it is not believed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from outrider.engine.models.base import WrongCheckpoint

CACHE_NAME = ".outrider-digest"
VERSION = 1  # of the cache's contents and of what is hashed
NUM_THREADS = 4
CHUNK_BYTES = 1 << 18
SETTLED_NS = 2_000_000_000  # a file that changed later may change again within one tick of its file system's clock

_FileKey = list[str | int]  # path, size, mtime_ns, ctime_ns, inode
_Pending = tuple[list[Any], "Future[str]"]  # name, type in safetensors' words and shape of a tensor; its digest


def model_digest(config: Mapping[str, Any], weights: str) -> str:
    """SHA-256, in hex, of the configuration that is computed and of the digest of the weights that it is computed from:
    of an expansion, which is made from small ones by a fixed rule, these are the small ones."""
    return _sha256_of([config, weights])


@contextmanager
def checkpoint_digest(folder: Path, files: tuple[Path, ...]) -> Iterator[Callable[[], str]]:
    """Hashes while the body of `with` loads; what it is given waits for the end. Raises WrongCheckpoint if the files
    changed meanwhile."""
    keys = list(map(_file_key, files))
    known = _recall(folder, keys)
    pool = ThreadPoolExecutor(NUM_THREADS, "digest")

    def result() -> str:
        digest = known or _combined(pending)
        if list(map(_file_key, files)) != keys:
            raise WrongCheckpoint(f"{folder}: its weights changed while they were read; load it again")
        if known is None:
            _remember(folder, keys, digest)
        return digest

    try:
        pending = [] if known else [entry for path in files for entry in _submit_file(pool, path)]
        yield result
    finally:
        pool.shutdown(cancel_futures=True)  # a model that is refused needs no digest


def state_digest(state: Mapping[str, Tensor]) -> str:
    """The same of tensors in memory."""
    with ThreadPoolExecutor(NUM_THREADS, "digest") as pool:
        return _combined(
            [([name, _type_name(t.dtype), list(t.shape)], pool.submit(_hash_tensor, t)) for name, t in state.items()]
        )


def _submit_file(pool: ThreadPoolExecutor, path: Path) -> Iterator[_Pending]:
    """By the header of a safetensors file: its length, JSON, then the contents at offsets from its end."""
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header: dict[str, dict[str, Any]] = json.loads(opened.read(min(length, path.stat().st_size)))
            header.pop("__metadata__", None)
            entries = sorted(
                (*entry["data_offsets"], name, entry["dtype"], entry["shape"]) for name, entry in header.items()
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            raise WrongCheckpoint(f"{path} has no header of safetensors: it is damaged or cut off") from None
    for start, end, *facts in entries:
        yield facts, pool.submit(_hash_range, path, 8 + length + start, 8 + length + end)


def _hash_range(path: Path, start: int, end: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as opened:
        opened.seek(start)
        while start < end and (chunk := opened.read(min(CHUNK_BYTES, end - start))):
            digest.update(chunk)
            start += len(chunk)
    return digest.hexdigest()


def _hash_tensor(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


@cache
def _type_name(dtype: torch.dtype) -> str:
    """As safetensors writes it."""
    saved = save({"": torch.empty(0, dtype=dtype)})
    header: dict[str, dict[str, str]] = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])
    return header[""]["dtype"]


def _combined(pending: Sequence[_Pending]) -> str:
    return _sha256_of(sorted([*facts, future.result()] for facts, future in pending))


def _sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _file_key(path: Path) -> _FileKey:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _cache_files(folder: Path) -> Iterator[Path]:
    """Where a digest may be kept, the first choice first."""
    yield folder / CACHE_NAME
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return
    yield caches / "outrider" / "digests" / _sha256_of(str(folder.resolve()))


def _recall(folder: Path, keys: list[_FileKey]) -> str | None:
    for path in _cache_files(folder):
        try:
            kept = json.loads(path.read_bytes())
        except (OSError, ValueError):  # absent, not readable or damaged
            continue
        if isinstance(kept, dict) and (kept.get("version"), kept.get("files")) == (VERSION, keys):
            return str(kept.get("weights"))
    return None


def _remember(folder: Path, keys: list[_FileKey], digest: str) -> None:
    if any(time.time_ns() - int(key[3]) < SETTLED_NS for key in keys):
        return
    content = json.dumps({"version": VERSION, "files": keys, "weights": digest})
    for path in _cache_files(folder):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}-{os.getpid()}")
            fresh.write_text(content)
            fresh.replace(path)  # at once: other processes may be here, too
        except OSError:  # read-only, or full
            continue
        return
