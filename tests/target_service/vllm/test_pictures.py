"""Pictures at a target, without vLLM: what our engine says of them, which are refused before they are decoded, and how
positions on the wire and vLLM's own stand apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import opened
from support.fakes import until
from support.pictures import bomb, media, picture
from target_service.vllm.test_engine import STREAM, FakeLink

from outrider.rpc.errors import InvalidArgument, ResourceExhausted
from outrider.rpc.media import Media
from outrider.rpc.messages import Close, Commit, Credit, DraftTokens, Failure, Load, Open, StepTimings
from outrider.rpc.servicer import Deliver
from outrider.target_service.sequence import TargetLimits, check_open, with_prompt
from outrider.target_service.settings import TargetSettings
from outrider.vllm.source import StepReport
from outrider.vllm.target.engine import VllmEngine
from outrider.vllm.target.pictures import Pictures, checked, placed_prompt
from outrider.vllm.target.requests import check_request
from outrider.vllm.target.self_drafting import SelfDraftingEngine, Unlinked

LIMITS = TargetLimits(97, 64, (2,), num_blocks=8, block_size=16, max_media_bytes=4000)
IDS = [5, 90, 6, 7]  # 90 is a picture's placeholder
PIXELS = 100


def seen(number: int = 7, pictures: Sequence[Media] | None = None, **fields: Any) -> Open:
    pictures = (media(),) if pictures is None else pictures
    return replace(opened(number, IDS, max_tokens=20), media=tuple(pictures), **fields)


def rendered(places: Sequence[tuple[int, int]], tokens: Sequence[int]) -> dict[str, Any]:
    """As vLLM's renderer answers."""
    at = [SimpleNamespace(offset=offset, length=length) for offset, length in places]
    return {"type": "multimodal", "prompt_token_ids": list(tokens), "mm_placeholders": {"image": at}}


class FakeRenderer:
    """Makes four tokens of a placeholder, when it may."""

    def __init__(self) -> None:
        self.may, self.prompts = asyncio.Event(), list[Any]()
        self.mm_processor: Any = None

    async def render_cmpl_async(self, prompts: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
        assert options == {"skip_mm_cache": True}
        await self.may.wait()
        self.prompts += prompts
        ids = prompts[0]["prompt_token_ids"]
        at = ids.index(90)
        return [rendered([(at, 4)], [*ids[:at], 90, 90, 90, 90, *ids[at + 1 :]])]


class FakeLlm:
    """Keeps its requests."""

    errored = False

    def __init__(self) -> None:
        self.requests: list[tuple[Any, Any]] = []

    async def generate(self, prompt: Any, params: Any, name: str, **options: Any) -> AsyncIterator[Any]:
        self.requests.append((prompt, params))
        await asyncio.Event().wait()
        yield


class Harness:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, limits: TargetLimits = LIMITS) -> None:
        module = "outrider.vllm.target"
        monkeypatch.setattr(f"{module}.pictures.decoded", lambda pictures, most: [one.digest for one in pictures])
        monkeypatch.setattr(f"{module}.engine.sampling_of", lambda message, *rest: SimpleNamespace(
            max_tokens=message.sampling.max_tokens - len(message.output_ids), min_tokens=message.sampling.min_tokens
        ))  # fmt: skip
        monkeypatch.setattr(f"{module}.engine.refusals", lambda: (ZeroDivisionError,))
        self.link, self.llm, self.renderer, self.events = FakeLink(), FakeLlm(), FakeRenderer(), list[Any]()
        pictures = Pictures(self.renderer, limits, PIXELS)
        self.engine = VllmEngine(self.llm, self.link, limits, pictures=pictures)

    def send(self, *messages: Any) -> None:
        self.engine.submit(Deliver(STREAM, messages, self.events.append))

    def report(self, *events: Any) -> None:
        timings = StepTimings(verify_us=2000, num_rows=1, num_sequences=len(events))
        self.link.on_event(StepReport(17, 0.002, timings, list(events), Load(1, 0, 5), 0, []))


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    harness = Harness(monkeypatch)
    yield harness
    harness.send(*(Close(number) for number in range(10)))
    await asyncio.sleep(0)


def test_our_engine_refuses_them_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"open.media: has .* takes no pictures \(engine vllm does"):
        check_open(seen(), replace(LIMITS, max_media_bytes=0))
    check_open(seen(), LIMITS)
    with pytest.raises(InvalidArgument, match=r"open.media: has .* allowed: at most 4000"):
        check_open(seen(pictures=[media(size=4000)]), LIMITS)
    with pytest.raises(InvalidArgument, match=r"open.media\[0\].mime_type"):
        check_open(seen(pictures=[replace(media(), mime_type="text/plain")]), LIMITS)
    with pytest.raises(ValueError, match=r"max_media_bytes \(--max-media-bytes\) is for engine vllm"):
        TargetSettings(model="m", max_media_bytes=5)


def test_a_fork_has_its_parents_pictures() -> None:
    child = Open(8, (), opened(8, IDS).sampling, fork_of=7)
    assert with_prompt(child, seen()).media == seen().media
    with pytest.raises(InvalidArgument, match=r"open.media: has 1 entries beside fork_of"):
        check_open(replace(child, media=(media(),)), LIMITS)


def test_log_probabilities_of_a_prompt_with_pictures_are_refused() -> None:
    sampling = replace(seen().sampling, prompt_logprobs=1)
    with pytest.raises(InvalidArgument, match=r"sampling.prompt_logprobs: is given with media"):
        check_request(seen(sampling=sampling), LIMITS)


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (replace(media(), digest=bytes(32)), "another SHA-256"),
        (Media.of("image/png", picture("JPEG")), "is no image/png"),
        (Media.of("image/png", b"<svg/>"), "is no image/png"),
        (Media.of("image/png", bomb()), "40000 by 40000 pixels; allowed: at most 100"),
        (Media.of("image/png", picture(width=11, height=10)), "11 by 10 pixels"),
    ],
)
def test_what_is_none_is_refused_before_it_is_decoded(one: Media, said: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"open.media\[1\]: .*{said}"):
        checked("open.media[1]", one, PIXELS)


def test_only_the_pictures_places_may_change() -> None:
    placed = placed_prompt(IDS, rendered([(1, 4)], [5, 90, 90, 90, 90, 6, 7]))
    assert (placed.length, placed.offset, placed.first) == (7, 3, 1)
    assert [placed.cached(count) for count in range(8)] == [0, 1, 1, 1, 1, 2, 3, 4]
    two = placed_prompt([90, 5, 90], rendered([(0, 2), (3, 2)], [90, 90, 5, 90, 90]))
    assert (two.offset, two.first) == (2, 0)
    for tokens in ([5, 90, 90, 90, 90, 6, 8], [4, 90, 90, 90, 90, 6, 7], [5, 90, 90, 90, 90, 6, 7, 7]):
        with pytest.raises(InvalidArgument, match="other tokens than the pictures' places"):
            placed_prompt(IDS, rendered([(1, 4)], tokens))


async def test_positions_on_the_wire_are_those_of_the_ids_as_sent(harness: Harness) -> None:
    harness.send(seen(), Credit(7, 9, 4), DraftTokens(7, 0, 5, (1, 2)))
    await asyncio.sleep(0.05)
    assert not harness.link.sent  # until the places are known
    harness.renderer.may.set()
    await until(lambda: harness.llm.requests)
    (prompt, params) = harness.llm.requests[0]
    assert prompt["prompt_token_ids"] == [5, 90, 90, 90, 90, 6, 7] and params.max_tokens == 20
    assert harness.link.sent == [Credit(1, 12, 4), DraftTokens(1, 0, 8, (1, 2))]
    (asked,) = harness.renderer.prompts
    assert asked["multi_modal_uuids"] == {"image": [media().digest.hex()]} and "type" not in asked
    harness.send(Credit(7, 10, 4))
    assert harness.link.sent[-1] == Credit(1, 13, 4)
    harness.report(Commit(1, 7, (11,), num_cached_ids=6))
    (commit,) = harness.events
    assert (commit.position, commit.num_cached_ids, commit.sequence_id) == (4, 3, 7)
    stats = harness.engine.stats()
    assert (stats.num_looked_up, stats.num_found) == (4, 3)


async def test_where_vllm_drafts_positions_are_counted_by_ids_anyway(harness: Harness) -> None:
    answers = asyncio.Event()

    async def generate(prompt: Any, params: Any, name: str, **options: Any) -> AsyncIterator[Any]:
        assert prompt["prompt_token_ids"] == [5, 90, 90, 90, 90, 6, 7]
        said = {"logprobs": None, "finish_reason": None, "stop_reason": None, "spec_decode_metrics": None}
        output = SimpleNamespace(token_ids=(11,), **said)
        yield SimpleNamespace(outputs=[output], prompt_logprobs=None, num_cached_tokens=6)
        answers.set()
        await asyncio.Event().wait()

    harness.llm.generate = generate  # type: ignore[method-assign]
    pictures = Pictures(harness.renderer, LIMITS, PIXELS)
    harness.engine = SelfDraftingEngine(harness.llm, Unlinked(), LIMITS, 3, pictures=pictures)
    harness.renderer.may.set()
    harness.send(seen(), Credit(7, 5, 4))
    await asyncio.wait_for(answers.wait(), 10)
    (commit,) = harness.events
    assert (commit.position, commit.ids, commit.num_cached_ids) == (4, (11,), 3)


async def test_a_continuation_has_the_same_offset(harness: Harness) -> None:
    harness.renderer.may.set()
    harness.send(seen(output_ids=(8, 90, 9)), Credit(7, 9, 4))
    await until(lambda: harness.llm.requests)
    prompt, params = harness.llm.requests[0]
    assert prompt["prompt_token_ids"] == [5, 90, 90, 90, 90, 6, 7, 8, 90, 9] and params.max_tokens == 17
    assert harness.link.sent == [Credit(1, 12, 4)]


async def test_the_expanded_prompt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, kind, said in (
        (replace(LIMITS, max_model_len=24), None, ""),
        (replace(LIMITS, max_model_len=24, num_blocks=1), ResourceExhausted, "24 tokens, the key-value cache holds 16"),
    ):
        pictures = Pictures(renderer := FakeRenderer(), limits, PIXELS)
        monkeypatch.setattr("outrider.vllm.target.pictures.decoded", lambda media, most: [None])
        renderer.may.set()
        if kind is None:
            placed = await pictures.placed(seen())
            params = placed.bound(SimpleNamespace(max_tokens=20, min_tokens=19), limits.max_model_len)
            assert (params.max_tokens, params.min_tokens) == (17, 17)  # it ends where the context does
        else:
            with pytest.raises(kind, match=said):
                await pictures.placed(seen())
    tight = Pictures(renderer, replace(LIMITS, max_model_len=7), PIXELS)
    with pytest.raises(InvalidArgument, match=r"open.media: makes a prompt of 7 tokens; allowed: at most 6") as refused:
        await tight.placed(seen())
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_what_the_processor_refuses_is_the_request_s_fault(harness: Harness) -> None:
    harness.renderer.may.set()

    async def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("no placeholder")

    harness.renderer.render_cmpl_async = refuse  # type: ignore[method-assign]
    harness.send(seen(), Credit(7, 9, 4), opened(3, [5, 6]), Credit(3, 9, 4))
    await until(lambda: harness.events)
    (failure,) = harness.events
    assert isinstance(failure, Failure) and failure.code == 3 and failure.sequence_id == 7
    assert failure.message == "open.media: vLLM's processor refuses the prompt with its pictures: no placeholder"
    await until(lambda: harness.llm.requests)  # the other one's


async def test_what_is_open_holds_so_many_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(monkeypatch, replace(LIMITS, max_media_bytes=150, max_sequences=64))
    left, number = 16 * 150, 0
    while (left := left - len(media(number).data)) >= 0:
        harness.send(seen(number, [media(number)]))
        number += 1
    fork = replace(seen(100), prompt_ids=(), media=(), fork_of=0)
    harness.send(fork)  # shares its parent's
    assert not harness.events
    harness.send(seen(101, [media(101)]), opened(102, IDS))
    (full,) = harness.events
    assert full.sequence_id == 101 and full.is_full and f"allowed: {16 * 150}" in full.message
    harness.send(Close(1), seen(103, [media(103)]))
    assert [event.sequence_id for event in harness.events] == [101, 1]


def test_a_model_without_eyes_has_none() -> None:
    blind = SimpleNamespace(renderer=SimpleNamespace(mm_processor=None))
    assert Pictures.of(blind, LIMITS, PIXELS) is None
    for limits in ({}, {"image": 0}, {"audio": 1}):
        info = SimpleNamespace(allowed_mm_limits=limits)
        llm = SimpleNamespace(renderer=SimpleNamespace(mm_processor=SimpleNamespace(info=info)))
        assert Pictures.of(llm, LIMITS, PIXELS) is None
