"""A GGUF file as a checkpoint's folder: its metadata as the files in which Hugging Face keeps the same, links to its
weights beside them. So whatever reads a folder reads a GGUF file, and a tokenizer is made from its tokens once.

The folder lies in the user's cache, one a file, and is made anew when the file is another one; where no cache can be
written it is a temporary one of this process."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.gguf.config import config_of
from outrider.gguf.header import SPLIT_NAME, read_gguf

SUFFIX, LINK = ".gguf", "model.gguf"
PART = "model-{:05d}-of-{:05d}.gguf"  # links to the parts of a split model
FIRST_PARTS = "model-00001-of-*.gguf"
SOURCE = "source.json"  # which file the folder is of
VERSION = 1  # of what is made of a file
WEIGHTS = ("*.safetensors", "*.bin")  # beside which a GGUF file of a folder is another form of the same


def is_gguf(model: str | Path) -> bool:
    """Whether it is the path of a GGUF file that is there."""
    return Path(model).suffix == SUFFIX and Path(model).is_file()


def gguf_of(model: str | Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only model in a folder that holds no other weights. ValueError
    where a folder has several."""
    path = Path(model)
    if is_gguf(path):
        return path
    if not path.is_dir() or weights_entry(path) is not None or any(any(path.glob(name)) for name in WEIGHTS):
        return None
    found = [file for file in sorted(path.glob(f"*{SUFFIX}")) if _is_first(file)]
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise ValueError(f"{path} holds {len(found)} GGUF models; allowed: the path of one of them: {names}")
    return found[0] if found else None


def weights_entry(folder: Path) -> str | None:
    """The name of the link to a model's weights in a folder made here, or to its first part."""
    if (folder / LINK).is_file():
        return LINK
    return next((path.name for path in folder.glob(FIRST_PARTS)), None) if (folder / SOURCE).is_file() else None


def gguf_name(folder: Path) -> str | None:
    """The name of the file that a folder was made of, without its ending; None for any other folder."""
    name = _read(folder / SOURCE).get("name")
    return name if isinstance(name, str) else None


def folder_of(file: Path) -> Path:
    """The folder that stands for a GGUF file. Raises WrongGguf for what our decoder or its tokenizer can't be made
    of."""
    source = _source(file)
    for folder in _places(file):
        if _read(folder / SOURCE) == source:
            return folder
    for folder in _places(file):
        try:
            with _alone(folder):
                if _read(folder / SOURCE) != source:
                    _make(file, folder, source)
            return folder
        except OSError:  # read-only, or full
            continue
    folder = Path(tempfile.mkdtemp(prefix="outrider-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write(file, folder, source)
    return folder


def _is_first(file: Path) -> bool:
    match = SPLIT_NAME.fullmatch(file.name)
    return match is None or int(match[2]) == 1


def _source(file: Path) -> dict[str, Any]:
    """What tells whether a file is still the same, with all its parts."""
    match = SPLIT_NAME.fullmatch(file.name)
    parts = sorted(file.parent.glob(f"{_literal(match[1])}-*-of-{match[3]}{SUFFIX}")) if match else [file]
    stats = [(part, part.stat()) for part in parts]
    keys = [[str(part.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino] for part, stat in stats]
    return {"version": VERSION, "name": match[1] if match else file.stem, "files": keys}


def _literal(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)


def _places(file: Path) -> Iterator[Path]:
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return
    yield caches / "outrider" / "gguf" / hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Nobody else makes the same folder meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _make(file: Path, folder: Path, source: dict[str, Any]) -> None:
    """Whole or not at all, in the place of what was there."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        _write(file, partial, source)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(file: Path, folder: Path, source: dict[str, Any]) -> None:
    from outrider.gguf.tokenizer import generation_config, tokenizer_files  # loads a library: only where one is made

    header = read_gguf(file)
    backend, tokenizer_config = tokenizer_files(header)
    _write_json(folder / "config.json", config_of(header))
    _write_json(folder / "generation_config.json", generation_config(header))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    count = len(header.files)
    for number, part in enumerate(header.files, start=1):
        (folder / (LINK if count == 1 else PART.format(number, count))).symlink_to(part.resolve())
    _write_json(folder / SOURCE, source)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    """An object; empty where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
