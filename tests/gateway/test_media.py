"""Pictures of requests: how they are given, what is refused and by which name, what travels, is kept and is charged."""

from __future__ import annotations

import asyncio
import base64
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fakes import TargetServicer, ToyDraft, ToyTarget, expected, request, serving, target_info, until
from support.gateways import PROMPT, gateway
from support.pictures import FORMATS, bomb, data_url, media, part, picture, seeing, seeing_tokenizer

from outrider.client import Client
from outrider.gateway.admission import Admission, AdmissionCost
from outrider.gateway.http.protocol import HttpOptions
from outrider.gateway.media import MediaLimits, load_media
from outrider.gateway.peers.remote import RemoteTargets
from outrider.gateway.peers.routing import affinity_key
from outrider.gateway.settings import GatewaySettings
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.rpc.errors import InvalidArgument, OutriderError, ResourceExhausted
from outrider.rpc.generation_codec import decode_request
from outrider.rpc.media import MAX_MEDIA, Media
from outrider.rpc.messages import Failure
from outrider.rpc.words.request import MediaSource
from outrider.v1 import generation_pb2 as pb

LIMITS = MediaLimits(max_bytes=10_000, max_pixels=10_000)
ONE, OTHER = picture(seed=1), picture("JPEG", seed=2)
CHAT: dict[str, Any] = {"model": "toy", "max_tokens": 5, "temperature": 0}


def asked(*parts: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": list(parts)}]}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("name", FORMATS)
async def test_bytes_and_urls_become_the_same_picture(name: str) -> None:
    data, mime_type = picture(name), FORMATS[name]
    given = [MediaSource(data), MediaSource(data, mime_type=mime_type), MediaSource(url=data_url(data, mime_type))]
    assert await load_media(given, LIMITS) == (Media.of(mime_type, data),) * 3


@pytest.mark.parametrize(
    ("source", "field", "said"),
    [
        (MediaSource(bomb()), "media[1].data", "40000 by 40000 pixels; allowed: at most"),
        (MediaSource(url=data_url(bomb())), "media[1].url", "40000 by 40000 pixels"),
        (MediaSource(picture()[:20]), "media[1].data", "is no picture; allowed: image/png"),
        (MediaSource(b"<svg/>", mime_type="image/svg+xml"), "media[1].data", "is no picture"),
        (MediaSource(OTHER, mime_type="image/png"), "media[1].data", "image/jpeg by its contents"),
        (MediaSource(url=data_url(OTHER, "image/png")), "media[1].url", "image/jpeg by its contents"),
        (MediaSource(bytes(20_000)), "media[1].data", "has 20000 bytes; allowed: at most"),
        (MediaSource(url=data_url(bytes(20_000))), "media[1].url", "bytes; allowed: at most"),
        (MediaSource(url="data:image/png;base64,a*b="), "media[1].url", "is no base64"),
        (MediaSource(url="data:image/png,abc"), "media[1].url", "no data: URL with base64"),
        (MediaSource(url="https://example.com/cat.png"), "media[1].url", "nothing is fetched"),
        (MediaSource(url="HTTP://169.254.169.254/latest"), "media[1].url", "nothing is fetched"),
        (MediaSource(url="ftp://example.com/cat.png"), "media[1].url", "is none that is read"),
        (MediaSource(url="file:///etc/passwd"), "media[1].url", "no --media-folder"),
        (MediaSource(path="cat.png"), "media[1].path", "no --media-folder"),
        (MediaSource(), "media[1].path", "is not set"),
    ],
)
async def test_what_is_none_or_too_much_is_refused_by_its_place(source: MediaSource, field: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await load_media([MediaSource(ONE), source], LIMITS)
    (violation,) = refused.value.violations
    assert violation.field == field and said in violation.problem


async def test_a_request_s_pictures_share_their_bounds() -> None:
    each = MediaSource(picture(width=60, height=60))
    for limits in (MediaLimits(max_bytes=2 * len(each.data or b"")), replace(LIMITS, max_pixels=2 * 3600)):
        assert len(await load_media([each] * 2, limits)) == 2
        with pytest.raises(InvalidArgument, match=r"media\[2\].data"):
            await load_media([each] * 3, limits)
    with pytest.raises(InvalidArgument, match=f"media: has {MAX_MEDIA + 1} entries"):
        await load_media([each] * (MAX_MEDIA + 1), LIMITS)
    with pytest.raises(InvalidArgument, match="this gateway takes media with --max-media-bytes"):
        await load_media([each], MediaLimits())


async def test_files_are_those_below_the_folder_alone(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "outside.png"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "one two.png").write_bytes(ONE)
    outside.write_bytes(OTHER)
    (folder / "inner").symlink_to("deep")
    (folder / "out.png").symlink_to(outside)
    (folder / "ring").symlink_to("ring")
    os.mkfifo(folder / "pipe")
    limits = replace(LIMITS, folder=folder)
    inside = [
        MediaSource(path="deep/one two.png"),
        MediaSource(path="inner/one two.png"),  # a link that stays below
        MediaSource(path=str(folder / "deep" / "one two.png")),
        MediaSource(url=f"file://{folder}/deep/one%20two.png"),
        MediaSource(url=f"file://localhost{folder}/deep/../deep/one%20two.png"),
    ]
    assert await load_media(inside, limits) == (Media.of("image/png", ONE),) * len(inside)
    names = (
        "../outside.png",
        "out.png",
        str(outside),
        "/etc/passwd",
        "ring",
        "deep",
        "pipe",
        "absent",
        "a\0b",
        "x" * 5000,
    )
    said = set()
    for source in [*(MediaSource(path=name) for name in names), MediaSource(url=f"file://{outside}")]:
        with pytest.raises(InvalidArgument) as refused:
            await asyncio.wait_for(load_media([source], limits), 10)
        said.add(refused.value.violations[0].problem)
    assert len(said) == 1, "what is outside is told apart from what is absent"
    (folder / "large.png").write_bytes(ONE + bytes(20_000))
    with pytest.raises(InvalidArgument, match="bytes; allowed"):
        await load_media([MediaSource(path="large.png")], limits)
    with pytest.raises(InvalidArgument, match="another host's"):
        await load_media([MediaSource(url="file://elsewhere/a.png")], limits)


async def test_a_conversation_s_pictures_reach_the_target_and_no_draft() -> None:
    target, draft = ToyTarget(info=seeing()), ToyDraft()
    async with gateway(target, draft, tokenizer=seeing_tokenizer(), media=LIMITS) as served, served.openai() as client:
        answer = await client.chat.completions.create(
            **asked(text("What is"), part(ONE), text("beside"), part(OTHER, "image/jpeg")), n=2
        )
        assert len(answer.choices) == 2
        tokenizer = seeing_tokenizer()
        wanted = tokenizer.encode("user:What is<image>beside<image>\nassistant:", add_special_tokens=False)
        assert [opened.prompt_ids for opened in target.opens] == [tuple(wanted)] * 2
        pictures = (Media.of("image/png", ONE), Media.of("image/jpeg", OTHER))
        assert [opened.media for opened in target.opens] == [pictures] * 2
        assert draft.opens and all(opened.media == () and opened.prompt_ids for opened in draft.opens)
        card = (await client.models.list()).data[0]
        assert (card.model_extra or {})["modalities"] == ["text", "image"]
        text_alone = await client.chat.completions.create(**CHAT, messages=[{"role": "user", "content": "What?"}])
        assert text_alone.usage is not None and target.opens[-1].media == ()
        alone = tokenizer.encode("user:What?\nassistant:", add_special_tokens=False)
        assert target.opens[-1].prompt_ids == tuple(alone)  # as a part, since the template looks for nothing else


async def test_responses_take_pictures_too() -> None:
    target = ToyTarget(info=seeing())
    async with gateway(target, tokenizer=seeing_tokenizer(), media=LIMITS) as served, served.client() as client:
        content = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": data_url(ONE)}]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 5, "temperature": 0}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        assert target.opens[0].media == (Media.of("image/png", ONE),)
        content[1]["image_url"] = "https://example.com/a.png"
        refused = (await client.post("/v1/responses", json=body)).json()["error"]
        assert refused["param"] == "input[0].content[1].image_url.url" and "nothing is fetched" in refused["message"]


@pytest.mark.parametrize(
    ("bad", "param", "said"),
    [
        (part(bomb()), "messages[0].content[1].image_url.url", "pixels"),
        (
            {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}},
            "messages[0].content[1].image_url.url",
            "net",
        ),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[1]", "is no picture; allowed"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[1]", "is no text"),
    ],
)
async def test_over_http_a_refusal_names_the_part(bad: dict[str, Any], param: str, said: str) -> None:
    target = ToyTarget(info=seeing())
    async with gateway(target, tokenizer=seeing_tokenizer(), media=LIMITS) as served, served.client() as client:
        response = await client.post("/v1/chat/completions", json=asked(text("Look:"), bad))
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param and said in error["message"]
        assert not target.opens


async def test_who_takes_none_says_so() -> None:
    for target, limits, said in (
        (ToyTarget(info=target_info()), LIMITS, "toy takes no pictures"),
        (ToyTarget(info=seeing()), MediaLimits(), "takes media with --max-media-bytes"),
    ):
        async with gateway(target, tokenizer=seeing_tokenizer(), media=limits) as served, served.client() as client:
            response = await client.post("/v1/chat/completions", json=asked(part(ONE)))
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == "messages" and said in error["message"]
            assert (await client.get("/v1/models")).json()["data"][0]["modalities"] == ["text"]
    async with gateway(ToyTarget(info=seeing()), media=LIMITS) as served, served.client() as client:
        error = (await client.post("/v1/chat/completions", json=asked(part(ONE)))).json()["error"]
        assert "takes no pictures" in error["message"]  # the template


async def test_over_grpc_they_come_as_bytes_files_or_parts(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(ONE)
    target, limits = ToyTarget(info=seeing()), replace(LIMITS, folder=tmp_path)
    async with (
        gateway(target, tokenizer=seeing_tokenizer(), media=limits) as served,
        Client(served.grpc_address) as client,
    ):
        pictures = (Media.of("image/jpeg", OTHER), Media.of("image/png", ONE))
        given: list[dict[str, Any]] = [
            {"token_ids": PROMPT},
            {"prompt": "<image> and <image>"},
            {"messages": [{"role": "user", "content": [{"type": "image"}, text("and"), {"type": "image"}]}]},
        ]
        for one in given:
            parts = client.generate(**one, media=[OTHER, pb.Media(path="one.png")], max_tokens=5, temperature=0.0)
            ids = [token for part in [part async for part in parts] for token in part.token_ids]
            assert ids == expected(target.opens[-1].prompt_ids, 5) and target.opens[-1].media == pictures
        assert set((await client.info()).media_types) == set(FORMATS.values())

        refused: list[tuple[dict[str, Any], str]] = [
            ({**given[2], "media": [OTHER]}, "media: has 1 entries for 2 pictures in the messages"),
            ({**given[0], "media": [pb.Media(path="../one.png")]}, r"media\[0\].path"),
            ({**given[0], "media": [ONE], "prompt_logprobs": 1}, "sampling.prompt_logprobs: is given with media"),
            ({**given[0], "media": [bomb()]}, r"media\[0\].data: is a picture of 40000 by 40000"),
        ]
        for options, said in refused:
            with pytest.raises(OutriderError, match=said) as caught:
                [part async for part in client.generate(**options, max_tokens=5)]
            assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        odd = pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "a", "parts": [{"text": "b"}]}]})
        with pytest.raises(InvalidArgument, match=r"chat.messages\[0\].parts: is given beside content"):
            decode_request(odd, target.info.model.default_sampling)


async def test_a_picture_goes_with_its_sequence_to_another_target() -> None:
    """Over frames, once for a request's completions, and again where a target is lost."""
    able = [TargetServicer(ToyTarget(info=seeing())) for _ in range(2)]
    blind = TargetServicer(ToyTarget(info=target_info()))  # of the same model, and takes none
    for servicer in able:
        servicer.max_media_bytes = 1 << 20
    pictures = (media(1, size=200_000), media(2))
    async with serving(able[0]) as one, serving(able[1]) as other, serving(blind) as third:
        addresses = [third.address, one.address, other.address]
        async with RemoteTargets(addresses) as targets:
            await until(lambda: all(replica.usable for replica in targets.replicas))
            for number in range(8):  # wherever their pictures send them
                async for _ in speculate(None, targets, request(2, media=(media(number),)), Policy(0)):
                    pass
            assert sum(len(servicer.opens) for servicer in able) == 8 and not blind.opens
            for servicer in able:
                servicer.opens.clear()
            seen = request(60, media=pictures)
            ids: list[int] = []
            async for item in speculate(None, targets, seen, Policy(0, plain_ahead=4)):
                assert isinstance(item, Round)
                ids += item.commit.ids
                if len(ids) == 4:
                    first = 0 if able[0].opens else 1
                    await (one, other)[first].stop(0)
            assert ids == expected(seen.prompt_ids, 60)
    assert [opened.media for opened in able[first].opens] == [pictures] and not blind.opens
    (again,) = able[1 - first].opens
    assert again.media == pictures and again.output_ids


async def test_a_target_s_own_bound_ends_the_request_by_name() -> None:
    servicer = TargetServicer(ToyTarget(info=seeing()))
    servicer.max_media_bytes = 1000
    async with serving(servicer) as server, RemoteTargets([server.address]) as targets:
        await targets.wait_usable()
        with pytest.raises(InvalidArgument, match=r"open.media: has .* bytes; allowed: at most 1000"):
            [item async for item in speculate(None, targets, request(9, media=(media(size=5000),)), Policy(0))]
        assert not servicer.opens
        async for _ in speculate(None, targets, request(9, media=(media(),)), Policy(0)):  # the stream lives
            pass
    assert [opened.media for opened in servicer.opens] == [(media(),)]


async def test_what_is_held_is_charged_to_its_caller() -> None:
    admission = Admission(8, 8, share=0.5, max_bytes=1000)
    await admission.enter(AdmissionCost(1, 10, "a", 700))
    with pytest.raises(ResourceExhausted, match="1100 bytes running and waiting; allowed: at most 1000 bytes"):
        admission.require_room(AdmissionCost(1, 10, "b", 400))
    admission.require_room(AdmissionCost(1, 10, "b", 300))
    admission.require_room(AdmissionCost(1, 10, "b"))  # text goes on
    with pytest.raises(ResourceExhausted, match="its caller would have 800") as refused:
        admission.require_room(AdmissionCost(1, 10, "a", 100))
    assert refused.value.retry_after_ms > 0
    admission.leave(AdmissionCost(1, 10, "a", 700))
    admission.require_room(AdmissionCost(1, 10, "b", 1000))


async def test_a_request_is_charged_until_its_end() -> None:
    target = ToyTarget(info=seeing(), step_s=0.01)
    async with gateway(target, tokenizer=seeing_tokenizer(), media=LIMITS) as served, served.client() as client:
        body = {**asked(part(ONE)), "max_tokens": 50, "n": 2}
        running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(lambda: len(target.opens) == 2)
        held = served.engine.admission._admitted.num_bytes
        assert held == len(ONE) + len(data_url(ONE))
        assert (await running).status_code == 200
        assert served.engine.admission._admitted.num_bytes == 0


async def test_bodies_and_messages_grow_with_the_flag_alone(tmp_path: Path) -> None:
    plain = {"target": ["a:1"], "tokenizer": tmp_path}
    settings = GatewaySettings(**plain)
    assert settings.max_message_bytes == settings.max_body_bytes == settings.max_request_bytes
    larger = GatewaySettings(**plain, max_media_bytes=6 << 20)
    assert larger.max_message_bytes == settings.max_request_bytes + (6 << 20)
    assert larger.max_body_bytes == settings.max_request_bytes + len(base64.b64encode(bytes(6 << 20)))
    for wrong in (
        {"max_media_bytes": 48 << 20, "max_request_bytes": 32 << 20},
        {"media_folder": tmp_path},
        {"media_folder": tmp_path / "absent", "max_media_bytes": 1},
    ):
        with pytest.raises(ValueError, match=f"allowed: (at most {MAX_MESSAGE_BYTES}|a folder)"):
            GatewaySettings(**plain, **wrong)
    options = HttpOptions(max_body_bytes=3 << 20)
    limits = MediaLimits(max_bytes=2 << 20)
    target = ToyTarget(info=seeing())
    config: dict[str, Any] = {"tokenizer": seeing_tokenizer(), "media": limits, "options": options}
    async with gateway(target, **config) as served, served.client() as client:
        large = ONE + bytes((2 << 20) - len(ONE))  # a body that is read beside the event loop
        assert (await client.post("/v1/chat/completions", json=asked(part(large)))).status_code == 200
        assert target.opens[0].media[0].data == large
        assert (await client.post("/v1/chat/completions", json=asked(part(bytes(3 << 20))))).status_code == 413


def test_prompts_with_one_picture_meet_on_one_target() -> None:
    keys = {affinity_key(PROMPT, media=pictures) for pictures in ((), (media(1),), (media(2),), (media(1), media(2)))}
    assert len(keys) == 3  # by the first picture alone
    assert affinity_key(PROMPT) == affinity_key(PROMPT, "", "", ())


async def test_a_target_s_refusal_of_a_picture_is_told_by_its_part() -> None:
    full = Failure(0, 3, "open.media[0]: cannot be decoded (OSError); allowed: a whole picture")
    target = ToyTarget(info=seeing(), full=full)
    async with gateway(target, tokenizer=seeing_tokenizer(), media=LIMITS) as served, served.client() as client:
        response = await client.post("/v1/chat/completions", json=asked(text("Look:"), part(ONE)))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[1].image_url"
