"""From an OpenAIRequest to its response: a gateway request a prompt, their deltas merged, whole or as a stream, in the
shapes of chat completions and completions."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.admission import Admission, AdmissionCost
from outrider.gateway.auth import CALLER
from outrider.gateway.engine import GenerationEngine, merge
from outrider.gateway.field_names import renamed
from outrider.gateway.http import sse
from outrider.gateway.http.echo import echoed, echoed_logprobs, with_prompts
from outrider.gateway.http.errors import error_body
from outrider.gateway.http.json_text import answer
from outrider.gateway.http.protocol import (
    FINGERPRINT,
    ChatBody,
    CompletionBody,
    EchoedPrompt,
    HttpOptions,
    OpenAIRequest,
    StreamOptions,
    options_of,
    read_body,
)
from outrider.gateway.http.token_texts import TextPlace, TokenTexts
from outrider.gateway.models import Models, require_allowed
from outrider.gateway.off_loop import SLOW_LOGPROBS, written
from outrider.gateway.request_record import RequestObserver
from outrider.gateway.spec_decode_metrics import AnswerRecorder
from outrider.gateway.text.tools.calls import join_calls
from outrider.rpc.errors import InvalidArgument, OutriderError, ResourceExhausted
from outrider.rpc.words.answer import GenerationDelta, SpeculationStats, ToolCallDelta


def endpoint(
    models: Models,
    read: Callable[[Mapping[str, Any], Request | None, GenerationEngine], OpenAIRequest],
    builder: type[ResponseBuilder],
) -> Callable[[Request], Awaitable[Response]]:
    """What answers a POST: `read` says what its body asks for, `builder` what the answer looks like."""

    async def create(request: Request) -> Response:
        engine, openai_request = await read_body(request, lambda values: _read(models, read, values, request))
        if isinstance(openai_request.body, CompletionBody) and openai_request.body.echo:
            openai_request = await with_prompts(openai_request, engine)
        texts = TokenTexts(engine.tokenizer, openai_request.body.return_tokens_as_token_ids)
        return await respond(request, engine, openai_request, builder(openai_request, texts))

    return create


def _read(
    models: Models,
    read: Callable[[Mapping[str, Any], Request | None, GenerationEngine], OpenAIRequest],
    values: Mapping[str, Any],
    request: Request,
) -> tuple[GenerationEngine, OpenAIRequest]:
    engine = engine_of(models, values)
    return engine, read(values, request, engine)


def engine_of(models: Models, values: Mapping[str, Any]) -> GenerationEngine:
    """Whose model a body names. What is no name is left for its reader to refuse."""
    name = values.get("model")
    return require_allowed(models.called(name if isinstance(name, str) else None))


async def respond(
    request: Request, engine: GenerationEngine, openai_request: OpenAIRequest, builder: ResponseBuilder
) -> Response:
    """The response. An error before the first token has a status of its own, unless the stream was kept alive before
    it; one after that is an event."""
    options, recorder = options_of(request), recorder_of(options_of(request), openai_request)
    deltas = generate(engine, openai_request, recorder, whole=not openai_request.body.stream)
    if openai_request.echoed:
        deltas = echoed(openai_request, deltas)
    if not openai_request.body.stream:
        return await sse.unless_gone(request.receive, _whole(engine, openai_request, builder, deltas, recorder))
    keep_alive_s = options.sse_keep_alive_s
    deltas = await begun(request, deltas, keep_alive_s)
    return sse.EventStream(_events(engine, openai_request, builder, deltas, recorder), keep_alive_s)


def recorder_of(options: HttpOptions, openai_request: OpenAIRequest) -> AnswerRecorder:
    """What observes the requests of one answer, for its `metrics`."""
    is_one = len(openai_request.requests) == 1 and openai_request.n == 1
    return AnswerRecorder(options.spec_decode_metrics, shows_times=options.request_metrics and is_one)


async def begun(
    request: Request, deltas: AsyncGenerator[GenerationDelta, None], keep_alive_s: float
) -> AsyncGenerator[GenerationDelta, None]:
    """The same deltas once the first has come, or, where it is slow, a sign of life is due. An error before is raised
    here."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        await sse.unless_gone(request.receive, asyncio.wait((first,), timeout=keep_alive_s or None))
    except BaseException:
        await sse.end(first)
        raise
    if first.done():
        first.result()
    return _chained(first, deltas)


class AdmissionGroup:
    """Requests that are admitted or refused as one, as the prompts of one HTTP request are: who comes last decides for
    all. Each then waits for its own turn, and leaves by itself."""

    def __init__(self, admission: Admission, num_requests: int) -> None:
        self._admission, self._num_missing = admission, num_requests
        self._work = AdmissionCost()
        self._decided = asyncio.Event()
        self._refusal: InvalidArgument | ResourceExhausted | None = None

    async def enter(self, work: AdmissionCost, priority: int = 0) -> None:
        """Waits for all requests of the group, then as Admission does."""
        self._work += work
        self._num_missing -= 1
        if not self._num_missing:
            self._decide()
        try:
            await self._decided.wait()
        except asyncio.CancelledError:
            if not self._decided.is_set():
                self._work -= work
            elif self._refusal is None:
                self._admission.give_back(work)
            raise
        if self._refusal is not None:
            raise self._refusal
        await self._admission.wait_turn(work, priority)

    def _decide(self) -> None:
        try:
            self._admission.reserve(self._work)
        except (InvalidArgument, ResourceExhausted) as error:
            self._refusal = error
        self._decided.set()


async def generate(
    engine: GenerationEngine, openai_request: OpenAIRequest, *observers: RequestObserver, whole: bool = False
) -> AsyncGenerator[GenerationDelta, None]:
    """The deltas of all prompts, admitted or refused as one; completion j of prompt i has the index i * n + j. `whole`:
    nobody sees any before the last."""
    if whole:
        openai_request = replace(
            openai_request, requests=tuple(replace(one, whole=True) for one in openai_request.requests)
        )
    places = range(len(openai_request.requests))
    group = AdmissionGroup(engine.admission, len(places))
    async with aclosing(merge([_one(engine, openai_request, place, group, observers) for place in places])) as deltas:
        async for delta in deltas:
            yield delta


async def _one(
    engine: GenerationEngine,
    openai_request: OpenAIRequest,
    place: int,
    group: AdmissionGroup,
    observers: Sequence[RequestObserver],
) -> AsyncGenerator[GenerationDelta, None]:
    request, caller = openai_request.requests[place], CALLER.get()
    if caller is not None:
        request = caller.own(request)
    try:
        async with aclosing(engine.generate(request, group, observers)) as deltas:
            async for delta in deltas:
                yield replace(delta, index=place * openai_request.n + delta.index) if place else delta
    except OutriderError as error:
        longest = engine.verifier.info.model.max_model_len
        raise renamed(error, openai_request.names[place], longest) from error


async def _whole(
    engine: GenerationEngine,
    openai_request: OpenAIRequest,
    builder: ResponseBuilder,
    deltas: AsyncGenerator[GenerationDelta, None],
    recorder: AnswerRecorder,
) -> Response:
    completions: dict[int, list[GenerationDelta]] = {}
    usage, num_logprobs = UsageSum(), 0
    async with aclosing(deltas):
        async for delta in deltas:
            completions.setdefault(delta.index, []).append(delta)
            usage.add(delta, openai_request.n)
            num_logprobs += delta.num_logprobs

    def body() -> Response:
        envelope = _envelope(openai_request, builder.prefix, completions[0][0], builder.whole_object)
        choices = builder.whole([join(completions[index]) for index in sorted(completions)])
        said = {**envelope, **choices, "usage": usage.shape(), **recorder.shape(engine.num_draft_tokens)}
        return answer(said, is_long=num_logprobs > SLOW_LOGPROBS)

    return await written(num_logprobs, body)


async def _events(
    engine: GenerationEngine,
    openai_request: OpenAIRequest,
    builder: ResponseBuilder,
    deltas: AsyncGenerator[GenerationDelta, None],
    recorder: AnswerRecorder,
) -> AsyncGenerator[str, None]:
    """The chunks. Usage, where it is asked for, comes last, and is null before, or what a choice has so far; and with
    it, or alone, the answer's metrics."""
    envelope: dict[str, Any] = {}
    options = openai_request.body.stream_options or StreamOptions()
    include_usage = options.include_usage
    usage, so_far = UsageSum(), dict[int, UsageSum]()
    async with aclosing(deltas):
        try:
            async for delta in deltas:
                if not envelope:
                    no_usage = {"usage": None} if include_usage else {}
                    envelope = {**_envelope(openai_request, builder.prefix, delta, builder.chunk_object), **no_usage}
                usage.add(delta, openai_request.n)
                opens = delta.index not in so_far
                of_choice = so_far.setdefault(delta.index, UsageSum(prompt=len(delta.prompt_token_ids)))
                of_choice.completion += len(delta.token_ids)
                if options.continuous_usage_stats:
                    envelope["usage"] = of_choice.shape()
                for chunk in await written(delta.num_logprobs, _chunks, builder, delta, opens, envelope):
                    yield chunk
            last = {"usage": usage.shape()} if include_usage else {}
            last |= recorder.shape(engine.num_draft_tokens)
            if last:
                yield sse.data({**envelope, "choices": [], **last})
        except (Exception, asyncio.CancelledError) as error:
            yield sse.data(error_body(sse.told(error)))
        yield sse.DONE


def _chunks(builder: ResponseBuilder, delta: GenerationDelta, opens: bool, envelope: dict[str, Any]) -> list[str]:
    """What a stream says of a delta; `opens`: the first of its completion."""
    opening = builder.opening(delta.index) if opens else None
    choices = [opening, None if builder.is_silent(delta) else builder.piece(delta)]
    is_long, beside = delta.num_logprobs > SLOW_LOGPROBS, builder.beside(delta) if opens else {}
    said = [choice for choice in choices if choice is not None]
    return [
        sse.data({**envelope, "choices": [choice], **({} if place else beside)}, is_long=is_long)
        for place, choice in enumerate(said)
    ]


async def _chained(
    first: asyncio.Future[GenerationDelta], rest: AsyncGenerator[GenerationDelta, None]
) -> AsyncGenerator[GenerationDelta, None]:
    async with aclosing(rest):
        yield await first
        async for delta in rest:
            yield delta


def _envelope(openai_request: OpenAIRequest, prefix: str, first: GenerationDelta, kind: str) -> dict[str, Any]:
    """The fingerprint names the model that a seed's answer depends on."""
    return {
        "id": f"{prefix}-{first.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": openai_request.model,
        "system_fingerprint": FINGERPRINT + first.model_digest,
    }


@dataclass(slots=True)
class UsageSum:
    """Tokens of a whole answer."""

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    predicted: tuple[int, int] | None = None  # tokens of a prediction in the answer, and not in it
    cached_by_prompt: dict[int, int] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        """Tokens of all prompts that the target's prefix cache had."""
        return sum(self.cached_by_prompt.values())

    def add(self, delta: GenerationDelta, n: int) -> None:
        """Counts a completion that ended; a prompt counts once, whatever its completions. What it had in the cache is
        what the one found that computed it: the others found its own rows, too."""
        if delta.usage is None:
            return
        self.completion += delta.usage.completion_tokens
        self.reasoning += delta.usage.reasoning_tokens
        accepted, rejected = delta.usage.accepted_prediction_tokens, delta.usage.rejected_prediction_tokens
        if accepted or rejected:
            before = self.predicted or (0, 0)
            self.predicted = before[0] + accepted, before[1] + rejected
        prompt, cached = delta.index // n, delta.usage.cached_tokens
        self.cached_by_prompt[prompt] = min(cached, self.cached_by_prompt.get(prompt, cached))
        if delta.index % n == 0:
            self.prompt += delta.usage.prompt_tokens

    def shape(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        shape: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
        details = {} if self.predicted is None else dict(zip(names, self.predicted, strict=True))
        if self.reasoning:
            details["reasoning_tokens"] = self.reasoning
        return {**shape, "completion_tokens_details": details} if details else shape


def join(deltas: Sequence[GenerationDelta]) -> GenerationDelta:
    """One completion, whole; its last delta has the finish."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        num_reasoning=sum(delta.num_reasoning for delta in deltas),
        seed=deltas[0].seed,
        prompt_token_ids=deltas[0].prompt_token_ids,
        origins=tuple(chain.from_iterable(delta.origins for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in deltas)),  # a long one's in slices
        tool_calls=join_calls(chain.from_iterable(delta.tool_calls for delta in deltas)),
    )


def finish_shape(delta: GenerationDelta) -> dict[str, Any]:
    """Why a completion ended; nulls while it goes on."""
    reason = None if delta.finish_reason is None else delta.finish_reason.name.lower()
    return {"finish_reason": reason, "stop_reason": delta.stop_reason}


def extension_shape(delta: GenerationDelta, speculation: bool, token_ids: bool) -> dict[str, Any]:
    """What goes beyond OpenAI, where it was asked for, and what nobody can ask for."""
    out: dict[str, Any] = {"near_ties": True} if delta.near_ties else {}
    if token_ids:
        out |= {} if delta.seed is None else {"seed": delta.seed}  # to be sent with `output_ids`
        out["token_ids"] = list(delta.token_ids)
        out["token_origins"] = [origin.name.lower() for origin in delta.origins]
    if speculation and delta.speculation is not None:
        out["speculation"] = stats_shape(delta.speculation)
    return out


def stats_shape(stats: SpeculationStats) -> dict[str, Any]:
    """What the rounds of a completion came to."""
    return {
        **{one.name: getattr(stats, one.name) for one in fields(SpeculationStats)},
        "acceptance": stats.acceptance.name.lower(),
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "by_method": {method: asdict(did) for method, did in stats.by_method.items()},
    }


class ResponseBuilder(ABC):
    """What an endpoint's answers look like."""

    prefix: ClassVar[str]  # of ids
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, openai_request: OpenAIRequest, texts: TokenTexts) -> None:
        self._openai_request, self._texts = openai_request, texts

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a completion's stream begins with; None: it begins with text."""
        return None

    def whole(self, completions: Sequence[GenerationDelta]) -> dict[str, Any]:
        """The choices of a whole answer, and what stands beside them."""
        return {"choices": [self.choice(completion) for completion in completions]}

    @abstractmethod
    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """The choice of a whole completion, as the completions endpoint has it."""

    @abstractmethod
    def piece(self, delta: GenerationDelta) -> dict[str, Any]:
        """What a stream says of a delta."""

    def beside(self, delta: GenerationDelta) -> dict[str, Any]:
        """What a completion's first chunk says of the prompt, beside the choices."""
        return {}

    def is_silent(self, delta: GenerationDelta) -> bool:
        """Whether a stream says nothing of a delta: half a character that nobody asked to see as a token, or reasoning
        that is left out."""
        asked = self._openai_request.num_logprobs is not None or self._openai_request.body.return_token_ids
        says = delta.text or self.reasoning(delta) or delta.tool_calls or delta.finish_reason is not None
        return not says and not (asked and delta.token_ids)

    def reasoning(self, delta: GenerationDelta) -> dict[str, str]:
        """Reasoning by vLLM's older and newer name; nothing where it is not asked for."""
        body = self._openai_request.body
        if not delta.reasoning or not (isinstance(body, ChatBody) and body.include_reasoning):
            return {}
        return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}

    def prompt_logprobs(self, delta: GenerationDelta) -> dict[str, Any]:
        """The prompt's log probabilities as vLLM names them; nothing where they are not asked for."""
        if self._openai_request.body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self._texts.prompt(delta.prompt_logprobs)}

    def prompt_ids(self, delta: GenerationDelta) -> dict[str, Any]:
        """The prompt's ids as vLLM names them; nothing where they are not asked for."""
        wanted = self._openai_request.body.return_token_ids and delta.prompt_token_ids
        return {"prompt_token_ids": list(delta.prompt_token_ids)} if wanted else {}

    def rest(self, delta: GenerationDelta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """What both endpoints say beside the text."""
        body = self._openai_request.body
        extension = extension_shape(delta, body.speculation is not None, body.return_token_ids)
        return {"logprobs": logprobs, **finish_shape(delta), **extension}


class ChatResponseBuilder(ResponseBuilder):
    """The chat.completion objects."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk says who speaks."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": self._openai_request.body.continued_text},
            "logprobs": None,
            "finish_reason": None,
        }

    def whole(self, completions: Sequence[GenerationDelta]) -> dict[str, Any]:
        """All choices have one prompt, of which the first tells."""
        return {**super().whole(completions), **self.prompt_logprobs(completions[0]), **self.beside(completions[0])}

    def beside(self, delta: GenerationDelta) -> dict[str, Any]:
        """Its ids, where they are asked for."""
        return self.prompt_ids(delta)

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """The choice of a whole message, as the chat endpoint has it."""
        reasoning, text = self.reasoning(delta), self._openai_request.body.continued_text + delta.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **reasoning}
        if delta.tool_calls:
            message["tool_calls"] = [call_shape(call) for call in delta.tool_calls]
        if delta.tool_calls or reasoning:
            message["content"] = text or None
        return {"index": delta.index, "message": message, **self.rest(delta, self._logprobs(delta))}

    def piece(self, delta: GenerationDelta) -> dict[str, Any]:
        """A part of a message."""
        content: dict[str, Any] = self.reasoning(delta)
        if delta.text or (delta.token_ids and not delta.tool_calls and not content):
            content["content"] = delta.text
        if delta.tool_calls:
            content["tool_calls"] = [{"index": call.index, **call_shape(call)} for call in delta.tool_calls]
        return {"index": delta.index, "delta": content, **self.rest(delta, self._logprobs(delta))}

    def _logprobs(self, delta: GenerationDelta) -> dict[str, Any] | None:
        count = self._openai_request.num_shown
        return None if count is None else self._texts.chat(delta.logprobs, count)


def call_shape(call: ToolCallDelta) -> dict[str, Any]:
    """A call, or what a delta adds to one: its first part says which it is."""
    function = {"arguments": call.arguments}
    return (
        {"id": call.id, "type": "function", "function": {"name": call.name, **function}}
        if call.id
        else {"function": function}
    )


class CompletionResponseBuilder(ResponseBuilder):
    """The text_completion objects; a whole one and a chunk have one shape."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, openai_request: OpenAIRequest, texts: TokenTexts) -> None:
        super().__init__(openai_request, texts)
        self._places: dict[int, TextPlace] = {}

    def whole(self, completions: Sequence[GenerationDelta]) -> dict[str, Any]:
        """Every choice says what is known of its prompt."""
        n = self._openai_request.n
        choices = [
            {**self.choice(completion), **self.prompt_logprobs(completions[index // n * n])}
            for index, completion in enumerate(completions)
        ]
        return {"choices": choices}

    def choice(self, delta: GenerationDelta) -> dict[str, Any]:
        """A whole completion, or a chunk of it."""
        count, logprobs, opens = self._openai_request.num_logprobs, None, delta.index not in self._places
        if opens:
            self._places[delta.index] = self._place(delta)
        place = self._places[delta.index]
        prompt = self._prompt(delta) if opens else None
        if count is not None:
            before = {} if prompt is None else echoed_logprobs(self._texts, prompt, delta.prompt_logprobs, place, count)
            after = self._texts.completion(delta.logprobs, place)
            logprobs = {name: before.get(name, []) + values for name, values in after.items()}
        text = delta.text if prompt is None else prompt.text + delta.text
        return {"index": delta.index, "text": text, **self.rest(delta, logprobs), **self.prompt_ids(delta)}

    piece = choice

    def is_silent(self, delta: GenerationDelta) -> bool:
        """Nor is it where the prompt is to be said."""
        says_prompt = bool(self._openai_request.echoed) and delta.index not in self._places
        return not says_prompt and super().is_silent(delta)

    def _place(self, delta: GenerationDelta) -> TextPlace:
        """Where a completion's text begins: behind what the client has."""
        place, n = TextPlace(), self._openai_request.n
        for ids in self._openai_request.requests[delta.index // n].output_ids[delta.index % n :][:1]:
            for token_id in ids:
                place.advance(self._texts.raw(token_id))
        return place

    def _prompt(self, delta: GenerationDelta) -> EchoedPrompt | None:
        """What a completion begins with, if it is asked for."""
        echoed = self._openai_request.echoed
        return echoed[delta.index // self._openai_request.n] if echoed else None
