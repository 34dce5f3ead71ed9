"""Pictures beside a prompt: what is known of one, what its first bytes say of its type and size, and the bounds. Here
nothing is decoded, so that a small file that stands for a huge picture costs nothing."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.rpc.errors import InvalidArgument, Violation, Violations

MEDIA = "media"  # among the capabilities of a target that takes pictures
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
MAX_MEDIA = 64  # pictures of a request
MAX_MEDIA_BYTES = 48 << 20  # of a request, at most, whatever the flags say: with its prompt it has to fit a message
MAX_MEDIA_PIXELS = 1 << 26  # of a picture, where nothing else is said; decoded that takes 256 MiB
MOST_PIXELS = 1 << 30
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Media:
    """A picture: its file's bytes, and by what caches know it."""

    mime_type: str
    data: bytes = field(repr=False)
    digest: bytes  # SHA-256 of the bytes

    @classmethod
    def of(cls, mime_type: str, data: bytes) -> Media:
        """With its digest, which takes milliseconds for megabytes: not on an event loop."""
        return cls(mime_type, data, hashlib.sha256(data).digest())


def num_bytes(media: Sequence[Media]) -> int:
    """Bytes of all files together."""
    return sum(len(one.data) for one in media)


def check_media(found: Violations, media: Sequence[Media]) -> None:
    """Their number, types and digests; not the contents."""
    if found.length("media", media, MAX_MEDIA):
        for place, one in enumerate(media):
            if one.mime_type not in MEDIA_TYPES:
                found.add(f"media[{place}].mime_type", "is no type of a picture", ", ".join(MEDIA_TYPES))
            if len(one.digest) != DIGEST_BYTES:
                found.add(f"media[{place}].sha256", f"has {len(one.digest)} bytes", str(DIGEST_BYTES))


def too_many_bytes(size: int, most: int) -> InvalidArgument | None:
    """The refusal of a request's media where a target takes no more than `most` bytes; 0: none at all."""
    if size <= most and most:
        return None
    if not most:
        allowed = "none: this target takes no pictures (engine vllm does, with a model that sees)"
    else:
        allowed = f"at most {most} (--max-media-bytes of the target)"
    return InvalidArgument.of([Violation("open.media", f"has {size} bytes; allowed: {allowed}")])


@dataclass(frozen=True, slots=True)
class Looks:
    """What a picture's first bytes say."""

    mime_type: str
    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        """Pixels that decoding it would make."""
        return self.width * self.height


def look_at(data: bytes) -> Looks | None:
    """The type and the size of a picture; None for what is none of MEDIA_TYPES, or cut off before it says its size."""
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return Looks("image/png", *_of_png(data))
        if data.startswith(b"\xff\xd8\xff"):
            return Looks("image/jpeg", *_of_jpeg(data))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return Looks("image/webp", *_of_webp(data))
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return Looks("image/gif", *_of_gif(data))
    except (struct.error, IndexError, ValueError):
        return None
    return None


def _of_png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _of_gif(data: bytes) -> tuple[int, int]:
    """The first frame may reach beyond what the file says of the whole."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)  # behind the colours
    while data[at] == 0x21:  # extensions: their blocks, up to an empty one
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    if data[at] != 0x2C:
        raise ValueError
    left, top, own_width, own_height = struct.unpack_from("<HHHH", data, at + 1)
    return max(width, left + own_width), max(height, top + own_height)


def _of_webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(_whole(data[27:30], 3), "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError


def _of_jpeg(data: bytes) -> tuple[int, int]:
    """Of its first frame, behind segments of other kinds."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ValueError
        while data[at] == 0xFF:  # fill bytes
            at += 1
        marker = data[at]
        at += 1
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # without a length
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2 or marker in (0xD9, 0xDA):  # the end, or a scan before any frame
            raise ValueError
        at += length


def _whole(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise ValueError
    return data


def too_many_pixels(looks: Looks, most: int) -> str:
    """What is wrong with a picture's size, and what is allowed; empty: nothing."""
    if not looks.width or not looks.height:
        return f"is a picture of {looks.width} by {looks.height} pixels; allowed: at least one pixel"
    if looks.num_pixels > most:
        return f"is a picture of {looks.width} by {looks.height} pixels; allowed: at most {most} (--max-media-pixels)"
    return ""
