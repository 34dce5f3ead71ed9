"""Pictures of a prompt for vLLM: decoded within bounds beside the event loop, and placed by vLLM's own processor, which
makes many tokens of one placeholder. On the wire positions stay those of the ids as they were sent: what is between the
two is a sequence's offset."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outrider.rpc.errors import TOO_LONG, InvalidArgument, OutriderError, ResourceExhausted, Violation
from outrider.rpc.media import Looks, Media, look_at, too_many_pixels
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.target_service.sequence import TargetLimits
from outrider.vllm.target.requests import prompt_of

log = logging.getLogger(__name__)

AT_ONCE = 2  # requests whose pictures are decoded or placed; others wait, and hold their files alone
MODALITY = "image"  # vLLM's word
MAX_TOLD = 300  # characters of vLLM's own words
FIELD = "open.media"


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt whose pictures have their places."""

    prompt: dict[str, Any]  # as vLLM's engine takes it
    length: int  # of the prompt, and of what was generated before
    offset: int  # tokens that it has more than ids were sent
    first: int  # where the first picture begins

    def cached(self, num_cached: int) -> int:
        """How many of the ids as they were sent are certainly among so many cached tokens."""
        return num_cached if num_cached <= self.first else max(self.first, num_cached - self.offset)

    def bound(self, params: Any, max_model_len: int) -> Any:
        """vLLM's SamplingParams, of which the completion ends where the context does: only now its length is known."""
        params.max_tokens = min(params.max_tokens, max_model_len - self.length)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        return params

    def shifted(self, command: Credit | DraftTokens) -> Credit | DraftTokens:
        """A message by vLLM's positions."""
        if isinstance(command, Credit):
            command.until += self.offset
        else:
            command.position += self.offset
        return command


class Pictures:
    """What decodes and places them, for one event loop; `renderer` is that of vLLM's AsyncLLM."""

    def __init__(self, renderer: Any, limits: TargetLimits, max_pixels: int) -> None:
        self._renderer, self._limits, self._max_pixels = renderer, limits, max_pixels
        self._threads = ThreadPoolExecutor(AT_ONCE, "pictures")
        self._turns = asyncio.Semaphore(AT_ONCE)

    @classmethod
    def of(cls, llm: Any, limits: TargetLimits, max_pixels: int) -> Pictures | None:
        """None where the model takes none."""
        processor = llm.renderer.mm_processor
        if processor is None or not processor.info.allowed_mm_limits.get(MODALITY, 0):
            return None
        return cls(llm.renderer, limits, max_pixels)

    async def placed(self, message: Open) -> PlacedPrompt:
        """An Open's prompt. Raises InvalidArgument for pictures that are none, are too large, or have no places, and
        for a prompt that is too long with them; ResourceExhausted where it does not fit the cache."""
        loop = asyncio.get_running_loop()
        async with self._turns:
            images = await loop.run_in_executor(self._threads, decoded, message.media, self._max_pixels)
            made = await self._rendered(message, images)
        placed = placed_prompt(prompt_of(message)["prompt_token_ids"], made)
        self._check_length(message, placed)
        return placed

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _rendered(self, message: Open, images: Sequence[Any]) -> dict[str, Any]:
        prompt = {name: value for name, value in prompt_of(message).items() if name != "type"}
        prompt["multi_modal_data"] = {MODALITY: list(images)}
        prompt["multi_modal_uuids"] = {MODALITY: [media.digest.hex() for media in message.media]}
        try:
            # Of what this process has told vLLM's engine it remembers nothing: pictures always travel.
            (made,) = await self._renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        except Exception as error:  # it asserts, too, that there is a place for each
            log.warning("vLLM's processor refuses the pictures of a request: %s: %s", type(error).__name__, error)
            told = str(error)[:MAX_TOLD] or type(error).__name__
            raise _invalid(FIELD, f"vLLM's processor refuses the prompt with its pictures: {told}") from error
        placed: dict[str, Any] = made
        return placed

    def _check_length(self, message: Open, placed: PlacedPrompt) -> None:
        most, room = self._limits.max_model_len, self._limits.num_blocks * self._limits.block_size
        if placed.length >= most:
            problem = f"makes a prompt of {placed.length} tokens; allowed: at most {most - 1}"
            raise _invalid(FIELD, problem, TOO_LONG)
        length = min(most, placed.length + message.sampling.max_tokens - len(message.output_ids))
        if length > room:
            problem = f"prompt, with its pictures, and max_tokens are {length} tokens, the key-value cache holds {room}"
            raise ResourceExhausted(problem, reason="DOES_NOT_FIT")


def placed_prompt(ids: Sequence[int], made: dict[str, Any]) -> PlacedPrompt:
    """What vLLM made of ids. InvalidArgument where it has changed others than the pictures' places: nobody would know
    their positions."""
    tokens = made["prompt_token_ids"]
    places = made["mm_placeholders"][MODALITY]
    first, end = min(place.offset for place in places), max(place.offset + place.length for place in places)
    rest = len(tokens) - end
    if list(tokens[:first]) != list(ids[:first]) or list(tokens[end:]) != list(ids[len(ids) - rest :]):
        raise _invalid(FIELD, "makes vLLM's processor change other tokens than the pictures' places; allowed: none")
    return PlacedPrompt(made, len(tokens), len(tokens) - len(ids), first)


def decoded(media: Sequence[Media], max_pixels: int) -> list[Any]:
    """Pillow's images, in RGB, as vLLM's own servers make them; `max_pixels` are those of all. Raises InvalidArgument,
    which says which is none."""
    left = max_pixels
    for place, one in enumerate(media):  # before any is decoded
        left -= checked(f"{FIELD}[{place}]", one, left).num_pixels
    return [_decoded(f"{FIELD}[{place}]", one) for place, one in enumerate(media)]


def checked(field: str, media: Media, max_pixels: int) -> Looks:
    """What a picture's head says, within the bound. Its digest is held against it: caches know the picture by that."""
    if hashlib.sha256(media.data).digest() != media.digest:
        raise _invalid(field, "has another SHA-256 than is said of it; allowed: its own")
    looks = look_at(media.data)
    if looks is None or looks.mime_type != media.mime_type:
        raise _invalid(field, f"is no {media.mime_type}; allowed: a picture of the type that is said")
    if problem := too_many_pixels(looks, max_pixels):
        raise _invalid(field, problem)
    return looks


def _decoded(field: str, media: Media) -> Any:
    from vllm.multimodal.media import ImageMediaIO

    try:
        return ImageMediaIO().load_bytes(media.data)
    except MemoryError:
        raise ResourceExhausted(f"{field}: no memory to decode it", reason="NO_MEMORY", retry_after_ms=1000) from None
    except Exception as error:  # Pillow's plugins raise what they like
        raise _invalid(field, f"cannot be decoded ({type(error).__name__}); allowed: a whole picture") from error


def _invalid(field: str, problem: str, reason: str = "") -> OutriderError:
    return InvalidArgument.of([Violation(field, problem, reason)])
