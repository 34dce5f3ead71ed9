"""Pictures of prompts in the forms that vLLM's users know, without vLLM: what becomes of them, and what is said where a
model takes none."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.fakes import ToyDraft, ToyTarget, expected
from support.gateways import over_grpc
from support.models import train_byte_level
from support.pictures import SEEING, data_url, drawn, picture, seeing

from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.media import MediaLimits
from outrider.gateway.servicer import GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm import LLM, SamplingParams, Unsupported
from outrider.llm.arguments import EngineArguments
from outrider.llm.engine_choice import lacks
from outrider.llm.inputs import parse_prompts
from outrider.llm.pictures import parts_of, pictures_of
from outrider.rpc.media import look_at
from outrider.rpc.words.request import MediaSource

QUIET: dict[str, Any] = {"use_tqdm": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def opened(source: MediaSource) -> Image.Image:
    assert source.data is not None
    return Image.open(BytesIO(source.data))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "LA"])
def test_an_image_is_kept_to_the_pixel(mode: str) -> None:
    image = drawn(9, 7, 3).convert(mode)
    (source,) = pictures_of({"image": image})
    kept = opened(source)
    assert kept.mode == mode and kept.tobytes() == image.tobytes()
    assert pictures_of({"image": image}) == (source,)  # caches know it by its bytes


def test_lists_arrays_and_other_modes() -> None:
    array = np.asarray(drawn(9, 7, 3))
    one, other = pictures_of({"image": [array, drawn(4, 4).convert("CMYK")]})
    assert np.array_equal(np.asarray(opened(one)), array)
    assert opened(other).mode == "RGB" and opened(other).size == (4, 4)
    nothings: tuple[dict[str, Any] | None, ...] = (None, {}, {"image": None}, {"image": []})
    for nothing in nothings:
        assert pictures_of(nothing) == ()
    for wrong, error in (
        ({"video": 1}, Unsupported),
        ({"image": object()}, Unsupported),
        ({"image": array.astype(float)}, Unsupported),
        ({"image": array[..., 0]}, Unsupported),
        ([drawn()], TypeError),
    ):
        with pytest.raises(error, match="multi_modal_data"):
            pictures_of(wrong)
    for name in ("multi_modal_uuids", "mm_processor_kwargs"):
        with pytest.raises(Unsupported, match=name):
            parse_prompts({"prompt": "a", name: {"image": ["x"]}})


def test_parts_of_a_message() -> None:
    url = data_url(picture())
    content = [
        "A",
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "B"},
        {"image_url": url},
        {"type": "image_pil", "image_pil": drawn()},
    ]
    parts, pictures = parts_of(content)
    image = {"type": "image"}
    assert parts == [{"type": "text", "text": "A"}, image, {"type": "text", "text": "B"}, image, image]
    assert [source.url for source in pictures[:2]] == [url, url] and look_at(pictures[2].data or b"") is not None
    assert parts_of(["A", {"type": "text", "text": "B"}]) == ("A\nB", ())
    with pytest.raises(Unsupported, match="'video_url'"):
        parts_of([{"type": "video_url", "video_url": {"url": "x"}}])
    with pytest.raises(TypeError, match="needs an 'image_url'"):
        parts_of([{"type": "image_url", "image_url": {}}])


def test_keywords_of_pictures(tmp_path: Path) -> None:
    arguments = EngineArguments.of({"model": tmp_path, "limit_mm_per_prompt": {"image": 2}})
    assert arguments.limit_mm_per_prompt == {"image": 2} and arguments.allowed_local_media_path == ""
    given = EngineArguments.of({"model": tmp_path, "allowed_local_media_path": tmp_path})
    assert given.allowed_local_media_path == str(tmp_path)
    for name, value in (("limit_mm_per_prompt", 2), ("allowed_local_media_path", str(tmp_path / "absent"))):
        with pytest.raises(ValueError, match=name):
            EngineArguments.of({"model": tmp_path, name: value})
    assert lacks({"vision_config": {}}) == "takes pictures" and not lacks({}) and not lacks({"vision_config": None})


def test_our_engine_says_what_takes_them(llm: LLM) -> None:
    with pytest.raises(
        ValueError, match=r"multi_modal_data: has 1 entries, and .* takes no pictures; .*outrider\[vllm\]"
    ):
        llm.generate({"prompt": "the <image>", "multi_modal_data": {"image": drawn()}}, GREEDY, **QUIET)
    (output,) = llm.generate({"prompt": "the", "multi_modal_data": None}, GREEDY, **QUIET)
    assert output.finished  # whoever is refused harms nobody


async def test_over_a_gateway_they_travel_as_files(tmp_path: Path) -> None:
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(SEEING)
    target = ToyTarget(info=seeing())
    config = EngineConfig(media=MediaLimits(100_000))
    engine = GenerationEngine(Tokenizer.load(tmp_path), target, ToyDraft(), config)

    def use(address: str) -> None:
        with LLM(gateway=address, tokenizer=tmp_path) as made:
            prompt = {"prompt_token_ids": [11, 12], "multi_modal_data": {"image": [drawn(seed=1), drawn(seed=2)]}}
            (output,) = made.generate(prompt, GREEDY, **QUIET)
            assert output.outputs[0].token_ids == expected([11, 12], 6)
            content = [
                {"type": "text", "text": "What"},
                {"type": "image_url", "image_url": {"url": data_url(picture())}},
            ]
            (said,) = made.chat([{"role": "user", "content": content}], GREEDY, **QUIET)
            assert said.prompt == "user:What<image>\nassistant:"
            with pytest.raises(ValueError, match="nothing is fetched"):
                content[1] = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
                made.chat([{"role": "user", "content": content}], GREEDY, **QUIET)

    async with over_grpc(GenerationServicer(engine)) as address:
        await asyncio.to_thread(use, address)
    first, second = target.opens
    assert [np.array_equal(np.asarray(Image.open(BytesIO(one.data))), np.asarray(drawn(seed=seed)))
            for seed, one in enumerate(first.media, start=1)] == [True, True]  # fmt: skip
    assert [one.data for one in second.media] == [picture()]
