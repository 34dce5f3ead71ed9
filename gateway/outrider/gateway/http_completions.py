"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.generation import GenerationDelta, GenerationRequest
from outrider.gateway.http_answer import answer
from outrider.gateway.http_body import Body, read_body
from outrider.gateway.http_errors import invalid
from outrider.gateway.http_request import Ask, names_in, read_common, read_sampling, reads_stream
from outrider.gateway.http_shapes import TextPlace, TokenTexts, extension_shape, finish_shape
from outrider.gateway.service import GenerationEngine
from outrider.wire.checks import kind

MAX_PROMPTS = 256
_UNSUPPORTED = ("suffix", "echo", "prompt_logprobs", "use_beam_search", "logits_processors", "prompt_embeds")


class CompletionsEndpoint:
    """Completions of texts or token ids."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    async def create(self, request: Request) -> Response:
        """One answer to one or several prompts."""
        ask = read_completion(await read_body(request), request, self._engine)
        return await answer(request, self._engine, ask, CompletionFace(ask, TokenTexts(self._engine.tokenizer)))


def read_completion(body: Body, request: Request | None, engine: GenerationEngine) -> Ask:
    """What was asked for; a field in its wrong shape is refused here, a value out of range by the engine."""
    body.refuse(*_UNSUPPORTED)
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        raise invalid("best_of", "is not n, and choosing among more is not supported; leave it out")
    stream, include_usage = reads_stream(body)
    common = read_common(body, request, engine.model_name)
    defaults = engine.verifier.info.model.default_sampling
    logprobs, max_tokens = body.get("logprobs"), body.get("max_tokens")
    sampling = replace(read_sampling(body, defaults), logprobs=_as_count(logprobs))
    if max_tokens is not None:
        sampling = replace(sampling, max_tokens=max_tokens)
    common = replace(common, sampling=sampling, max_tokens_given=max_tokens is not None)
    prompts = _prompts(body, common)
    places = [""] if len(prompts) == 1 else [f"[{place}]" for place in range(len(prompts))]
    return Ask(
        requests=prompts,
        model=engine.model_name,
        stream=stream,
        include_usage=include_usage,
        reports_speculation=body.get("speculation") is not None,
        returns_token_ids=body.flag("return_token_ids"),
        num_logprobs=sampling.logprobs,
        names=tuple(_names(body, place) for place in places),
    )


class CompletionFace:
    """The text_completion objects."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, ask: Ask, texts: TokenTexts) -> None:
        self._ask, self._texts = ask, texts
        self._places: dict[int, TextPlace] = {}

    def opening(self, index: int) -> None:
        """A stream of text begins with text."""

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """A whole completion, or a chunk of it: the two have one shape."""
        ask, logprobs = self._ask, None
        if ask.num_logprobs is not None:
            place = self._places.setdefault(delta.index, TextPlace())
            logprobs = self._texts.completion(delta.logprobs, place, ask.num_logprobs)
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            **finish_shape(delta),
            **extension_shape(delta, ask.reports_speculation, ask.returns_token_ids),
        }

    def piece(self, delta: GenerationDelta) -> dict[str, Any] | None:
        """Nothing for half a character."""
        asked = self._ask.num_logprobs is not None or self._ask.returns_token_ids
        silent = not delta.text and delta.finish_reason is None
        return None if silent and not (asked and delta.token_ids) else self.choice(delta)


def _as_count(logprobs: Any) -> Any:
    """vLLM's clients may send true for 1."""
    return int(logprobs) if isinstance(logprobs, bool) and logprobs else logprobs


def _prompts(body: Body, common: GenerationRequest) -> tuple[GenerationRequest, ...]:
    """A text, several, a list of token ids, or several."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (replace(common, text=prompt),)
    if not isinstance(prompt, list) or not prompt:
        problem = "is missing" if prompt is None else "is empty" if prompt == [] else f"is {kind(prompt)}"
        raise invalid("prompt", f"{problem}; allowed: a text, token ids, or a list of either")
    if isinstance(prompt[0], int | float):
        return (replace(common, token_ids=tuple(prompt)),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} entries; allowed: at most {MAX_PROMPTS} prompts")
    return tuple(_one_prompt(common, place, value) for place, value in enumerate(prompt))


def _one_prompt(common: GenerationRequest, place: int, value: Any) -> GenerationRequest:
    if common.request_id:
        common = replace(common, request_id=f"{common.request_id}-{place}")
    if isinstance(value, str):
        return replace(common, text=value)
    if isinstance(value, list):
        return replace(common, token_ids=tuple(value))
    raise invalid(f"prompt[{place}]", f"is {kind(value)}; allowed: a text or a list of token ids")


def _names(body: Body, place: str) -> dict[str, str]:
    return {name: here + place if here == "prompt" else here for name, here in names_in(body).items()}
