"""A request and its answer between their dataclasses and protobuf: what clients and gateways send each other
(`generation.proto`). A field that has the same name in both is read and written by it; here stand the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from outrider.rpc.errors import InvalidArgument, Violation
from outrider.rpc.field_codec import PLAIN, BadField, Codec, by_fields, each, message_of
from outrider.rpc.json_values import ALLOWED, parse_json
from outrider.rpc.sampling_codec import (
    ID_LISTS,
    TEXTS,
    TOKEN_IDS,
    absent_in,
    decode_acceptance,
    decode_sampling,
    encode_sampling,
)
from outrider.rpc.words.answer import (
    GenerationDelta,
    MethodStats,
    PositionLogprobs,
    SpeculationStats,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from outrider.rpc.words.checks import kind
from outrider.rpc.words.request import PICTURE, GenerationRequest, MediaSource, ReasoningOptions, SpeculationOptions
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason, SamplingParams, TokenOrigin
from outrider.v1 import generation_pb2 as pb

# What a request says in its own process alone, or what its call says of it.
NOT_SENT = (
    "continue_final_message",
    "chat_template",
    "documents",
    "add_special_tokens",
    "truncation_side",
    "among_long",
    "whole",
    "caller",
    "peer",
    "timeout_s",
    "goals",
    "traceparent",
    "call",
)
KNOWN_BY_THE_GATEWAY = ("num_reasoning", "round")  # of a delta
_CHAT = ("messages", "add_generation_prompt", "chat_template_kwargs")  # fields of another message
_RESOLVED = ("sampling", "unset")  # which need the model's defaults
_CALLED = {"text": "prompt", "speculation.enabled": "speculate"}  # in errors, as the client's keywords
_MESSAGE = (
    "an object with role and content, both texts (or parts, of types text and image); tool_calls, tool_call_id and "
    "name in OpenAI's form"
)


def encode_request(request: GenerationRequest) -> pb.GenerateRequest:
    """The message. InvalidArgument names the first field that holds something of another type."""
    try:
        out = _REQUEST.encode(request)
        if request.sampling is not None:
            out.MergeFrom(message_of(pb.GenerateRequest, {"sampling": request}, {"sampling": _SAMPLING}))
        if request.messages is not None:
            _write_chat(out.chat, request)
    except BadField as error:
        name = _CALLED.get(error.field, error.field)
        raise InvalidArgument.of([Violation(name, f"{error.problem}; allowed: {error.allowed}")]) from None
    return out


def decode_request(message: pb.GenerateRequest, defaults: SamplingParams) -> GenerationRequest:
    """The request, what it leaves open taken from the model's defaults. InvalidArgument for an enum's number that only
    a newer client knows."""
    request = _REQUEST.decode(message)
    chat: dict[str, Any] = {}
    if message.HasField("chat"):
        chat["messages"] = tuple(
            _decode_message(f"chat.messages[{place}]", one) for place, one in enumerate(message.chat.messages)
        )
        chat["add_generation_prompt"] = not message.chat.omit_generation_prompt
        if message.chat.chat_template_kwargs:
            chat["chat_template_kwargs"] = _decode_json("chat_template_kwargs", message.chat.chat_template_kwargs)
    sampling = decode_sampling(message.sampling, defaults)
    return replace(request, sampling=sampling, unset=absent_in(message.sampling), **chat)


def encode_delta(delta: GenerationDelta) -> pb.GenerateResponse:
    """One response."""
    out = _DELTA.encode(delta)
    if isinstance(delta.stop_reason, str):
        out.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        out.stop_token_id = delta.stop_reason
    return out


def decode_delta(message: pb.GenerateResponse) -> GenerationDelta:
    """What one response adds."""
    delta, stop = _DELTA.decode(message), message.WhichOneof("stop_reason")
    if stop is not None:
        delta.stop_reason = getattr(message, stop)
    return delta


def _encode_position(position: PositionLogprobs) -> pb.PositionLogprobs:
    """One position's candidates. Fields set one by one take a third of the time of a message built and copied."""
    out = pb.PositionLogprobs()
    add = out.candidates.add
    for token, logprob, rank in position:
        candidate = add()
        candidate.id, candidate.logprob, candidate.rank = token, logprob, rank
    return out


def _decode_position(message: pb.PositionLogprobs) -> PositionLogprobs:
    """One position's candidates."""
    return tuple([TokenLogprob(entry.id, entry.logprob, entry.rank) for entry in message.candidates])


def _write_chat(out: pb.Chat, request: GenerationRequest) -> None:
    """A conversation as the prompt."""
    messages: Any = request.messages
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise BadField("messages", f"is {kind(messages)}", "a list of messages")
    out.omit_generation_prompt = not request.add_generation_prompt
    for place, message in enumerate(messages):
        try:
            _write_message(out.messages.add(), message)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise BadField(f"messages[{place}]", "has not the shape of a message", _MESSAGE) from None
    if request.chat_template_kwargs:
        out.MergeFrom(message_of(pb.Chat, {"chat_template_kwargs": request.chat_template_kwargs}, _VARIABLES))


def _write_message(out: pb.ChatMessage, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls") or ()
    content = (message.get("content") or "") if calls else message["content"]
    if isinstance(content, list | tuple):
        content = _write_parts(out, content)
    out.role, out.content = message["role"], content
    out.tool_call_id, out.name = message.get("tool_call_id") or "", message.get("name") or ""
    out.reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    for call in calls:
        function = call["function"]
        given = function.get("arguments") or "{}"
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        out.tool_calls.add(id=call.get("id") or "", name=function["name"], arguments=arguments)


def _write_parts(out: pb.ChatMessage, content: Sequence[Mapping[str, Any]]) -> str:
    """Texts and places of pictures; returns the text where there are no pictures."""
    parts = [None if part["type"] == "image" else part["text"] for part in content]
    if None not in parts:
        return "\n".join(text for text in parts if text is not None)
    for text in parts:
        out.parts.add(image=True) if text is None else out.parts.add(text=text)
    return ""


def _decode_message(where: str, message: pb.ChatMessage) -> dict[str, Any]:
    """A message as chat templates take it. InvalidArgument for parts that are none."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    further = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    further |= {"reasoning_content": message.reasoning}  # as templates call it
    content = _decode_parts(where, message) if message.parts else message.content or (None if calls else "")
    return {"role": message.role, "content": content, **{name: value for name, value in further.items() if value}}


def _decode_parts(where: str, message: pb.ChatMessage) -> list[dict[str, str]]:
    if message.content:
        raise InvalidArgument.of([Violation(f"{where}.parts", "is given beside content; allowed: one of them")])
    parts = []
    for place, part in enumerate(message.parts):
        if part.WhichOneof("part") == "text":
            parts.append({"type": "text", "text": part.text})
        elif part.image:
            parts.append(dict(PICTURE))
        else:
            problem = "sets neither text nor image; allowed: one of them"
            raise InvalidArgument.of([Violation(f"{where}.parts[{place}]", problem)])
    return parts


def _json(value: Any) -> str:
    """The JSON text of an object; one that is a text already stays."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise TypeError("no object")
    return json.dumps(value, ensure_ascii=False)


def _decode_json(field: str, text: str) -> Any:
    """The JSON of a field. InvalidArgument names it."""
    try:
        return parse_json(text)
    except ValueError:
        raise InvalidArgument.of([Violation(field, f"is no JSON; allowed: {ALLOWED}")]) from None


def _encode_tools(tools: Iterable[Any]) -> list[str]:
    if isinstance(tools, str | Mapping):
        raise TypeError("one tool is no list of tools")
    return [_json(tool) for tool in tools]


def _decode_tools(texts: Iterable[str]) -> tuple[Any, ...]:
    return tuple(_decode_json(f"tools[{place}]", text) for place, text in enumerate(texts))


def _decode_choice(text: str) -> Any:
    return _decode_json("tool_choice", text) if text.startswith("{") else text or None


def _encode_prediction(guess: str | Sequence[int]) -> pb.Prediction:
    return pb.Prediction(text=guess) if isinstance(guess, str) else pb.Prediction(token_ids=pb.TokenIds(ids=guess))


def _decode_prediction(message: pb.Prediction) -> str | tuple[int, ...]:
    """Its text or ids; one without either is empty."""
    return TOKEN_IDS.decode(message.token_ids) if message.HasField("token_ids") else message.text


def _encode_media(given: Iterable[Any]) -> list[pb.Media]:
    if isinstance(given, bytes | str):
        raise TypeError("one picture is no list")
    return list(map(_encode_picture, given))


def _encode_picture(one: MediaSource | pb.Media | bytes) -> pb.Media:
    """A caller's bytes, too, or its message."""
    if isinstance(one, pb.Media):
        return one
    if not isinstance(one, MediaSource):
        return pb.Media(data=one)
    if one.url:
        raise TypeError("nothing is read of a URL here")
    if one.data is None:
        return pb.Media(mime_type=one.mime_type, path=one.path)
    return pb.Media(mime_type=one.mime_type, data=one.data)


def _decode_picture(message: pb.Media) -> MediaSource:
    return MediaSource(message.data if message.HasField("data") else None, "", message.path, message.mime_type)


def _decode_rule(number: int) -> AcceptanceRule:
    """A rule that only a newer gateway knows reads as unspecified."""
    return AcceptanceRule(number) if number in set(AcceptanceRule) else AcceptanceRule.AUTO


def _encode_methods(by_method: Mapping[str, MethodStats]) -> list[pb.MethodStats]:
    names = _METHOD_FIELDS
    return [
        pb.MethodStats(method=method, **{name: getattr(did, name) for name in names})
        for method, did in by_method.items()
    ]


def _decode_methods(messages: Iterable[pb.MethodStats]) -> dict[str, MethodStats]:
    return {one.method: MethodStats(*[getattr(one, name) for name in _METHOD_FIELDS]) for one in messages}


_METHOD_FIELDS = tuple(one.name for one in fields(MethodStats))
_SAMPLING: Codec[GenerationRequest, Any] = Codec(
    lambda request: encode_sampling(request.sampling, request.unset),  # type: ignore[arg-type]  # it is there
    PLAIN.decode,
)
_VARIABLES: dict[str, Codec[Any, Any]] = {"chat_template_kwargs": Codec(_json, PLAIN.decode, "an object")}
_RULES = "AcceptanceRule." + ", ".join(rule.name for rule in AcceptanceRule)
_REQUEST = by_fields(
    GenerationRequest,
    pb.GenerateRequest,
    without=(*NOT_SENT, *_CHAT, *_RESOLVED),
    token_ids=TOKEN_IDS,
    prediction=Codec(_encode_prediction, _decode_prediction, "a text or a list of token ids"),
    speculation=by_fields(
        SpeculationOptions,
        pb.SpeculationParams,
        without=("greedy_draft",),
        methods=TEXTS,
        acceptance=Codec(
            lambda rule: int(AcceptanceRule(rule)),
            lambda number: decode_acceptance(number, "speculation.acceptance"),
            _RULES,
            is_name=True,
        ),
    ),
    reasoning=by_fields(ReasoningOptions, pb.ReasoningParams),
    n=Codec(PLAIN.encode, lambda number: number or 1),
    output_ids=ID_LISTS,
    media=Codec(
        _encode_media,
        lambda messages: tuple(map(_decode_picture, messages)),
        "a list of pictures, each a file's bytes, or a Media",
    ),
    tools=Codec(_encode_tools, _decode_tools, "a list of tools, as objects or JSON texts"),
    tool_choice=Codec(_json, _decode_choice, "auto, none, required, or an object that names a function"),
)
POSITIONS = each(Codec(_encode_position, _decode_position))
FINISH: Codec[FinishReason | None, int] = Codec(
    lambda reason: int(reason or 0), lambda number: FinishReason(number) if number else None
)
_DELTA = by_fields(
    GenerationDelta,
    pb.GenerateResponse,
    without=(*KNOWN_BY_THE_GATEWAY, "stop_reason"),
    tool_calls=each(by_fields(ToolCallDelta, pb.ToolCallDelta, without=("num_before",))),
    origins=Codec(lambda origins: [*map(int, origins)], lambda numbers: tuple(map(TokenOrigin, numbers))),
    logprobs=POSITIONS,
    prompt_logprobs=POSITIONS,
    finish_reason=FINISH,
    usage=by_fields(Usage, pb.Usage),
    speculation=by_fields(
        SpeculationStats,
        pb.SpeculationStats,
        acceptance=Codec(int, _decode_rule),
        num_rounds_by_mode=Codec(dict, dict),
        by_method=Codec(_encode_methods, _decode_methods),
    ),
)
