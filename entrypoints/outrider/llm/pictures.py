"""Pictures of prompts as vLLM's users give them: Pillow's images and arrays beside a prompt, and parts of messages. Of
what is in memory a PNG file is made, which loses nothing: caches know a picture by its file's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from outrider.llm.validation import Unsupported
from outrider.rpc.words.request import PICTURE, MediaSource

ALLOWED = "a PIL.Image, an array [height, width, 3] of uint8, or a list of these"
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")  # that a PNG file keeps as they are
URLS = ("image_url", "input_image")
IMAGE_PIL = "image_pil"


def pictures_of(data: Any) -> tuple[MediaSource, ...]:
    """The pictures of a prompt's `multi_modal_data`."""
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise TypeError(f"a prompt's 'multi_modal_data' is a dict such as {{'image': ...}}, got {data!r:.60}")
    if others := [name for name in data if name != "image"]:
        raise Unsupported(f"multi_modal_data[{others[0]!r:.60}] is not supported: models take text and pictures")
    images = data.get("image")
    if images is None:
        return ()
    return tuple(map(_picture, images)) if isinstance(images, list | tuple) else (_picture(images),)


def _picture(image: Any) -> MediaSource:
    from PIL import Image  # who gives pictures has it

    if not isinstance(image, Image.Image):
        interface: Mapping[str, Any] = getattr(image, "__array_interface__", {})
        shape: tuple[int, ...] = interface.get("shape", ())
        if len(shape) != 3 or shape[2] != 3 or interface["typestr"] != "|u1":
            raise Unsupported(f"multi_modal_data['image'] is {type(image).__name__}; allowed: {ALLOWED}")
        image = Image.fromarray(image)
    if image.mode not in PNG_MODES:
        image = image.convert("RGB")
    written = BytesIO()
    image.save(written, "PNG", compress_level=1)
    return MediaSource(written.getvalue(), mime_type="image/png")


def parts_of(content: Sequence[Any]) -> tuple[str | list[dict[str, str]], tuple[MediaSource, ...]]:
    """A message's parts as its template takes them, one text where all are texts; and the pictures among them."""
    parts: list[dict[str, str]] = []
    pictures: list[MediaSource] = []
    for part in content:
        picture = _picture_of(part)
        parts.append({"type": "text", "text": _text_of(part)} if picture is None else dict(PICTURE))
        pictures += [] if picture is None else [picture]
    return (parts, tuple(pictures)) if pictures else ("\n".join(part["text"] for part in parts), ())


def _picture_of(part: Any) -> MediaSource | None:
    """None for a text."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type") or next((name for name in (IMAGE_PIL, "image_url") if name in part), None)
    if kind == IMAGE_PIL:
        return _picture(part.get(IMAGE_PIL))
    if kind not in URLS:
        return None
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise TypeError(f"a message's part of type {kind!r} needs an 'image_url', got {part!r:.100}")
    return MediaSource(url=url)


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text"):
        raise Unsupported(f"a message's part of type {kind!r} is not supported: models take text and pictures")
    text = part.get("text")
    if not isinstance(text, str):
        raise TypeError(f"a message's part needs a 'text', got {part!r:.60}")
    return text
