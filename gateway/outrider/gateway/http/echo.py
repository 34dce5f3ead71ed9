"""`echo` of /v1/completions: answers that begin with their prompt, and their log probabilities with the prompt's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from outrider.gateway.auth import CALLER
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.field_names import renamed
from outrider.gateway.http.protocol import EchoedPrompt, OpenAIRequest
from outrider.gateway.http.token_texts import TextPlace, TokenTexts, finite
from outrider.gateway.prepare import encoded, num_long_chars
from outrider.gateway.text.tokenizer import LONG_TEXT, in_thread
from outrider.rpc.errors import OutriderError
from outrider.rpc.words.answer import GenerationDelta, PositionLogprobs
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import FinishReason


async def with_prompts(openai_request: OpenAIRequest, engine: GenerationEngine) -> OpenAIRequest:
    """The request with its prompts as ids, and what is to be repeated of them: a text as it was given, ids decoded."""
    pairs = [
        await _echoed(request, engine, names)
        for request, names in zip(openai_request.requests, openai_request.names, strict=True)
    ]
    requests, prompts = zip(*pairs, strict=True)
    return replace(openai_request, requests=requests, echoed=prompts)


async def _echoed(
    request: GenerationRequest, engine: GenerationEngine, names: Any
) -> tuple[GenerationRequest, EchoedPrompt]:
    longest = engine.verifier.info.model.max_model_len
    caller = CALLER.get()
    account = (request if caller is None else caller.own(request)).account
    try:
        async with engine.text_turn(account, num_long_chars(request)):
            _, ids = await encoded(request, engine.tokenizer, longest)
    except OutriderError as error:
        raise renamed(error, names, longest) from error
    kept = request.truncated(ids)
    text = request.text
    if text is None or kept != ids:
        is_taken = len(kept) < longest and not {int}.symmetric_difference(map(type, kept))
        shown = kept if is_taken else ()  # others are refused later
        known = [token for token in shown if 0 <= token < engine.tokenizer.num_tokens]
        text = await in_thread(len(known) > LONG_TEXT, engine.tokenizer.decode, known)
    return replace(request, text=None, token_ids=ids), EchoedPrompt(text, kept)


async def echoed(
    openai_request: OpenAIRequest, deltas: AsyncGenerator[GenerationDelta, None]
) -> AsyncGenerator[GenerationDelta, None]:
    """The deltas, of which the first of every completion has all log probabilities of its prompt: the target tells them
    to one completion, and what the others have is held back until then."""
    prompts, n = openai_request.echoed, openai_request.n
    found: list[list[PositionLogprobs]] = [[] for _ in prompts]
    held: list[list[GenerationDelta]] = [[] for _ in prompts]
    begun: set[int] = set()

    def released(place: int) -> list[GenerationDelta]:
        out = []
        for delta in held[place]:
            logprobs = () if delta.index in begun else tuple(found[place])
            begun.add(delta.index)
            out.append(replace(delta, prompt_logprobs=logprobs))
        held[place].clear()
        return [_without_output(delta) for delta in out] if openai_request.prompt_only else out

    async with aclosing(deltas):
        async for delta in deltas:
            place = delta.index // n
            found[place] += delta.prompt_logprobs
            held[place].append(delta)
            if openai_request.num_prompt_logprobs is None or len(found[place]) >= len(prompts[place].ids):
                for one in released(place):
                    yield one
    for place in range(len(prompts)):  # a target that does not tell them
        for one in released(place):
            yield one


def _without_output(delta: GenerationDelta) -> GenerationDelta:
    """The deltas of an answer that is its prompt alone."""
    usage = None if delta.usage is None else replace(delta.usage, completion_tokens=0)
    reason = None if delta.finish_reason is None else FinishReason.LENGTH
    return replace(delta, text="", token_ids=(), origins=(), logprobs=(), usage=usage, finish_reason=reason)


def echoed_logprobs(
    texts: TokenTexts, prompt: EchoedPrompt, positions: Sequence[PositionLogprobs], place: TextPlace, count: int
) -> dict[str, list[Any]]:
    """The log probabilities of a prompt as the completions endpoint has them; its first token has none."""
    values: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for _, candidates in zip_longest(prompt.ids[1:], positions[1:], fillvalue=()):
        values.append(finite(candidates[0].logprob) if candidates else None)
        kept = [entry for at, entry in enumerate(candidates) if count < 0 or not at or entry.rank <= count]
        tops.append({texts.name(entry.id): finite(entry.logprob) for entry in kept} or None)
    offsets = []
    for token_id in prompt.ids:
        offsets.append(place.offset)
        if not texts.is_special(token_id) or prompt.text.startswith(texts.text(token_id), place.offset):
            place.advance(texts.raw(token_id))  # else the tokenizer has added it
    tokens = [texts.name(token_id) for token_id in prompt.ids]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
