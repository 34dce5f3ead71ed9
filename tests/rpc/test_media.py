"""What a picture's first bytes say, whoever wrote them, and the bounds."""

from __future__ import annotations

import pytest
from support.pictures import FORMATS, bomb, media, picture

from outrider.rpc.errors import Violations
from outrider.rpc.media import MAX_MEDIA, Looks, Media, check_media, look_at, too_many_bytes, too_many_pixels


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("width", "height"), [(5, 3), (1, 1), (700, 20)])
def test_the_size_is_read_of_every_type(name: str, width: int, height: int) -> None:
    assert look_at(picture(name, width, height)) == Looks(FORMATS[name], width, height)


def test_the_kinds_of_webp_and_jpeg_are_read() -> None:
    for options in ({"lossless": True}, {"lossless": False}, {"exif": b"Exif\0\0" + bytes(40)}):
        assert look_at(picture("WEBP", 33, 17, **options)) == Looks("image/webp", 33, 17)
    for options in ({"progressive": True}, {"comment": b"\xff\xc0" * 100}, {"exif": b"Exif\0\0" + bytes(400)}):
        assert look_at(picture("JPEG", 33, 17, **options)) == Looks("image/jpeg", 33, 17)


def test_what_is_no_picture_or_cut_off_says_nothing() -> None:
    assert look_at(b"") is None and look_at(b"GIF89a") is None and look_at(b"<svg></svg>" * 9) is None
    for name in FORMATS:
        whole = picture(name)
        for length in range(20):
            assert look_at(whole[:length]) is None
        for length in range(20, len(whole)):
            looks = look_at(whole[:length])  # raises nothing, and lies nowhere
            assert looks is None or (looks.width, looks.height) == (5, 3)


def test_a_frame_of_a_gif_beyond_its_screen_counts() -> None:
    whole = bytearray(picture("GIF", 5, 3))
    at = whole.index(b"\x2c")
    whole[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    assert look_at(bytes(whole)) == Looks("image/gif", 65535, 65535)


def test_a_bomb_is_known_by_its_head() -> None:
    looks = look_at(bomb())
    assert looks is not None and len(bomb()) < 1000
    assert "40000 by 40000" in too_many_pixels(looks, 1 << 26)
    assert too_many_pixels(Looks("image/png", 100, 100), 10_000) == ""
    assert "at least one" in too_many_pixels(Looks("image/png", 0, 9), 10_000)


def test_number_type_and_digest_are_judged() -> None:
    found = Violations()
    check_media(found, [media(), Media("image/tiff", b"x", b"short")])
    check_media(found, [media()] * (MAX_MEDIA + 1))
    assert found.count == 3
    good = Violations()
    check_media(good, [media()] * MAX_MEDIA)
    assert not good.count


def test_bytes_are_bounded_and_none_is_none() -> None:
    assert too_many_bytes(5, 5) is None
    beyond, none = too_many_bytes(6, 5), too_many_bytes(0, 0)
    assert beyond is not None and "allowed: at most 5" in beyond.message
    assert none is not None and "takes no pictures (engine vllm" in none.message
