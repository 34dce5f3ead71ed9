"""Pictures as callers give them, made into what travels: bytes, a data: URL, or a file of the one folder that is open
to them. Nothing is fetched from the network, and nothing is decoded but base64; all of it beside the event loop."""

from __future__ import annotations

import asyncio
import base64
import os
import stat
from binascii import Error as NoBase64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outrider.rpc.errors import InvalidArgument, Violation, Violations, quoted
from outrider.rpc.media import (
    MAX_MEDIA,
    MAX_MEDIA_PIXELS,
    MEDIA,
    MEDIA_TYPES,
    Media,
    look_at,
    num_bytes,
    too_many_pixels,
)
from outrider.rpc.messages import TargetInfo
from outrider.rpc.words.request import MediaSource

MAX_PATH_CHARS = 4096
MAX_SHOWN_NAME = 100
BASE64 = ";base64"
URLS = "a data: URL with base64, or a file: URL of the gateway's media folder"
NOT_THERE = "is no file below the gateway's media folder; allowed: the path of one"


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What a gateway takes of a request."""

    max_bytes: int = 0  # of its pictures together; 0: it takes none
    max_pixels: int = MAX_MEDIA_PIXELS  # the same
    folder: Path | None = None  # below which files may be named


async def media_of(
    found: Violations, sources: Sequence[MediaSource], target: TargetInfo, limits: MediaLimits
) -> tuple[Media, ...]:
    """The pictures of a request, of no use once something was found."""
    try:
        if MEDIA not in target.capabilities:
            problem = f"has {len(sources)} entries, and {target.model.name[:MAX_SHOWN_NAME]} takes no pictures"
            raise _refusal("media", f"{problem}; allowed: none (engine vllm, of outrider[vllm], has models that do)")
        return await load_media(sources, limits)
    except InvalidArgument as error:
        found.take(error)
        return ()


async def load_media(sources: Sequence[MediaSource], limits: MediaLimits) -> tuple[Media, ...]:
    """The pictures. InvalidArgument names the first that is none, or too much."""
    if not limits.max_bytes:
        problem = f"has {len(sources)} entries; allowed: none (this gateway takes media with --max-media-bytes)"
        raise _refusal("media", problem)
    found = Violations()
    found.length("media", sources, MAX_MEDIA)
    found.raise_if_any()
    return await asyncio.to_thread(_load, sources, limits)


def held_bytes(sources: Sequence[MediaSource], media: Sequence[Media]) -> int:
    """What a request holds for its pictures: their files, and the URLs in which they came."""
    return num_bytes(media) + sum(len(source.url) for source in sources)


def _load(sources: Sequence[MediaSource], limits: MediaLimits) -> tuple[Media, ...]:
    loaded, bytes_left, pixels_left = [], limits.max_bytes, limits.max_pixels
    for place, source in enumerate(sources):
        where = f"media[{place}].{source.name}"
        data, said = _read(where, source, limits, bytes_left)
        bytes_left -= len(data)
        looks = look_at(data)
        if looks is None:
            raise _refusal(where, f"is no picture; allowed: {', '.join(MEDIA_TYPES)}")
        if said not in ("", looks.mime_type):
            raise _refusal(where, f"is {quoted(said)} by its name, and {looks.mime_type} by its contents; allowed: one")
        if problem := too_many_pixels(looks, pixels_left):
            raise _refusal(where, problem)
        pixels_left -= looks.num_pixels
        loaded.append(Media.of(looks.mime_type, data))
    return tuple(loaded)


def _read(where: str, source: MediaSource, limits: MediaLimits, most: int) -> tuple[bytes, str]:
    """The bytes, and the type that they are said to be."""
    if source.data is None and not source.path and not source.url:
        raise _refusal(where, "is not set, nor any other source; allowed: one of data and path")
    if source.data is not None:
        _require_room(where, len(source.data), most)
        return source.data, source.mime_type
    if source.path:
        return _read_file(where, source.path, limits.folder, most), source.mime_type
    scheme, _, rest = source.url.partition(":")
    if scheme.lower() == "data":
        return _read_data_url(where, rest, most)
    if scheme.lower() == "file":
        parts = urlsplit(source.url)
        if parts.netloc not in ("", "localhost"):
            raise _refusal(where, f"names another host's file; allowed: {URLS}")
        return _read_file(where, unquote(parts.path), limits.folder, most), source.mime_type
    if scheme.lower() in ("http", "https"):
        raise _refusal(where, f"is on the network, from where nothing is fetched; allowed: {URLS}")
    raise _refusal(where, f"is none that is read; allowed: {URLS}")


def _read_data_url(where: str, rest: str, most: int) -> tuple[bytes, str]:
    head, comma, body = rest.partition(",")
    if not comma or not head.endswith(BASE64):
        raise _refusal(where, "is no data: URL with base64; allowed: data:image/png;base64,...")
    _require_room(where, len(body) * 3 // 4 - 2, most)  # at least so many
    try:
        data = base64.b64decode(body, validate=True)
    except (NoBase64, ValueError):
        raise _refusal(where, "is no base64; allowed: data:image/png;base64,...") from None
    _require_room(where, len(data), most)
    return data, head.removesuffix(BASE64).partition(";")[0].lower()


def _read_file(where: str, path: str, folder: Path | None, most: int) -> bytes:
    """The bytes of a file below the folder, wherever links lead. What is outside is told apart from what is absent by
    nothing."""
    if folder is None:
        raise _refusal(where, "is given, and this gateway has no --media-folder; allowed: the picture's bytes")
    if len(path) > MAX_PATH_CHARS or "\0" in path:
        raise _refusal(where, NOT_THERE)
    root = folder.resolve()
    try:
        resolved = (root / path).resolve(strict=True)
        if not resolved.is_relative_to(root):
            raise _refusal(where, NOT_THERE)
        opened = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: links in a ring
        raise _refusal(where, NOT_THERE) from None
    status = os.fstat(opened)
    if not stat.S_ISREG(status.st_mode):
        os.close(opened)
        raise _refusal(where, NOT_THERE)
    with os.fdopen(opened, "rb") as file:
        _require_room(where, status.st_size, most)
        data = file.read(most + 1)
    _require_room(where, len(data), most)
    return data


def _require_room(where: str, size: int, most: int) -> None:
    if size > most:
        allowed = f"at most {most}, of what a request's media may have together (--max-media-bytes)"
        raise _refusal(where, f"has {size} bytes; allowed: {allowed}")


def _refusal(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument.of([Violation(field, problem)])
