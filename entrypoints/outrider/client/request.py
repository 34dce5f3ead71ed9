"""What a gateway is asked for: `build_request` makes the message from what a caller gave. A value of the wrong type is
refused under its field's name, as the gateway refuses one out of bounds; protobuf's own words often leave the name
out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.rpc.errors import InvalidArgument, Violation, Violations, kind, quoted, shown
from outrider.rpc.messages import MAX_N
from outrider.rpc.sampling_params import (
    AcceptanceRule,
    LogprobsMode,
    SamplingParams,
    encode_logprobs_mode,
    encode_structured_output,
)
from outrider.v1 import generation_pb2 as pb

_WORDS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number, 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number, 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a text of whole characters",
}


def _token_ids(lists: Iterable[Sequence[int]]) -> list[pb.TokenIds]:
    return [pb.TokenIds(ids=ids) for ids in lists]


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prediction(guess: str | Sequence[int]) -> pb.Prediction:
    return pb.Prediction(text=guess) if isinstance(guess, str) else pb.Prediction(token_ids=pb.TokenIds(ids=guess))


def _media(given: Iterable[Any]) -> list[pb.Media]:
    if isinstance(given, bytes | str):
        raise TypeError("one picture is no list")
    return [one if isinstance(one, pb.Media) else pb.Media(data=one) for one in given]


# Fields whose message is not what a caller gives: how it becomes one, and what may be given.
_SPECIAL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "token_ids": (lambda ids: pb.TokenIds(ids=ids), "a list of token ids"),
    "prediction": (_prediction, "a text or a list of token ids"),
    "output_ids": (_token_ids, "a list of lists of token ids"),
    "bad_words_ids": (_token_ids, "a list of lists of token ids"),
    "prompt_logprob_token_ids": (_token_ids, "a list of lists of token ids"),
    "logit_bias": (lambda bias: bias, "an object of token ids and numbers"),
    "logprobs_mode": (
        lambda mode: encode_logprobs_mode(LogprobsMode(mode)),
        "LogprobsMode." + ", ".join(mode.name for mode in LogprobsMode),
    ),
    "acceptance": (
        lambda rule: int(AcceptanceRule(rule)),
        "AcceptanceRule." + ", ".join(rule.name for rule in AcceptanceRule),
    ),
    "structured_output": (encode_structured_output, "a StructuredOutput"),
    "stop": (_texts, "a text or a list of texts"),
    "bad_words": (_texts, "a text or a list of texts"),
    "methods": (_texts, "a text or a list of texts"),
    "tools": (lambda tools: _tools(tools), "a list of tools, as objects or JSON texts"),
    "tool_choice": (
        lambda choice: choice if isinstance(choice, str) else _json(choice),
        "auto, none, required, or an object that names a function",
    ),
    "chat_template_kwargs": (lambda variables: _json(variables), "an object"),
    "media": (
        _media,
        "a list of pictures, each a file's bytes, or a Media",
    ),
}


def put(out: Message, name: str, value: Any, where: str = "", called: str = "") -> None:
    """Sets a field; None leaves it out. `where` stands before its name in an error, or `called` instead of it."""
    if value is None:
        return
    try:
        _write(out, name, value)
    except (TypeError, ValueError, AttributeError):
        given = quoted(value) if name in ("acceptance", "logprobs_mode") else shown(value)
        allowed = _SPECIAL[name][1] if name in _SPECIAL else _allowed(out, name)
        raise refusal(called or where + name, f"is {given}", allowed) from None


def put_messages(out: pb.GenerateRequest, messages: Sequence[Mapping[str, Any]], omit_generation_prompt: bool) -> None:
    """A conversation as the prompt."""
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise refusal("messages", f"is {kind(messages)}", "a list of messages")
    out.chat.omit_generation_prompt = omit_generation_prompt
    for place, message in enumerate(messages):
        try:
            _put_message(out.chat.messages.add(), message)
        except (TypeError, ValueError, KeyError, AttributeError):
            allowed = (
                "an object with role and content, both texts (or parts, of types text and image); tool_calls, "
                "tool_call_id and name in OpenAI's form"
            )
            raise refusal(f"messages[{place}]", "has not the shape of a message", allowed) from None


def _put_message(out: pb.ChatMessage, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls") or ()
    content = (message.get("content") or "") if calls else message["content"]
    if isinstance(content, list | tuple):
        content = _put_parts(out, content)
    out.role, out.content = message["role"], content
    out.tool_call_id, out.name = message.get("tool_call_id") or "", message.get("name") or ""
    out.reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    for call in calls:
        function = call["function"]
        given = function.get("arguments") or "{}"
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        out.tool_calls.add(id=call.get("id") or "", name=function["name"], arguments=arguments)


def _put_parts(out: pb.ChatMessage, content: Sequence[Mapping[str, Any]]) -> str:
    """Texts and places of pictures; returns the text where there are no pictures."""
    parts = [None if part["type"] == "image" else part["text"] for part in content]
    if None not in parts:
        return "\n".join(text for text in parts if text is not None)
    for text in parts:
        out.parts.add(image=True) if text is None else out.parts.add(text=text)
    return ""


def _tools(tools: Iterable[Any]) -> list[str]:
    if isinstance(tools, str | Mapping):
        raise TypeError("one tool is no list of tools")
    return [tool if isinstance(tool, str) else _json(tool) for tool in tools]


def _json(value: Mapping[str, Any]) -> str:
    if not isinstance(value, Mapping):
        raise TypeError("no object")
    return json.dumps(value, ensure_ascii=False)


def refusal(field: str, problem: str, allowed: str) -> InvalidArgument:
    """The error about one field."""
    return InvalidArgument.of([Violation(field, f"{problem}; allowed: {allowed}")])


def _write(out: Any, name: str, value: Any) -> None:
    if name in _SPECIAL:
        value = _SPECIAL[name][0](value)
    field = getattr(out, name)
    if hasattr(field, "extend"):
        field.extend(value)
    elif hasattr(field, "update"):
        field.update(value)
    elif isinstance(field, Message):
        field.CopyFrom(value)
    else:
        setattr(out, name, value)


def _is_list(out: Message, name: str) -> bool:
    return hasattr(getattr(out, name), "extend")


def _allowed(out: Message, name: str) -> str:
    one = _WORDS.get(out.DESCRIPTOR.fields_by_name[name].cpp_type, "a message")
    return f"a list, each entry {one}" if _is_list(out, name) else one


_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


def build_request(
    prompt: str | None = None,
    *,
    token_ids: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any] | str] = (),
    tool_choice: str | Mapping[str, Any] = "",
    parallel_tool_calls: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    sampling: SamplingParams | None = None,
    n: int = 1,
    prediction: str | Sequence[int] | None = None,
    speculate: bool | None = None,
    num_draft_tokens: int | None = None,
    method: str = "",
    methods: str | Sequence[str] = (),
    acceptance: AcceptanceRule = AcceptanceRule.AUTO,
    mode: str = "",
    draft_confidence: float = 0.0,
    request_id: str = "",
    priority: int = 0,
    output_ids: Sequence[Sequence[int]] = (),
    model_digest: str = "",
    salt: str = "",
    model: str = "",
    adapter: str = "",
    media: Sequence[bytes | pb.Media] = (),
    split_reasoning: bool | None = None,
    max_reasoning_tokens: int | None = None,
    reasoning_effort: str = "",
    **sampling_fields: Any,
) -> pb.GenerateRequest:
    """A request: one of prompt, token_ids and messages; whole SamplingParams, or single fields of them, of which those
    not given are the model's defaults. Tools, and calls in messages, have OpenAI's form. A prediction, text or token
    ids, is a guess at the whole output: where it holds, tokens come sooner. `media` are pictures in the order in which
    the prompt has the model's placeholders, or messages have {"type": "image"} among their parts. Reasoning is told
    apart from the text where `split_reasoning` says so, None: of messages."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise TypeError("exactly one of prompt, token_ids and messages is needed")
    found = Violations()
    found.integer("n", n, 1, MAX_N)  # the protocol's 0 is 1
    found.raise_if_any()
    request = pb.GenerateRequest(n=n, sampling=_encode_sampling(sampling, sampling_fields))
    put(request, "text", prompt, called="prompt")
    put(request, "token_ids", token_ids)
    put(request, "prediction", prediction)
    if messages is not None:
        put_messages(request, messages, not add_generation_prompt)
        put(request.chat, "chat_template_kwargs", chat_template_kwargs)
    elif chat_template_kwargs is not None:
        raise TypeError("chat_template_kwargs is given without messages")
    request.speculation.SetInParent()
    put(request.speculation, "enabled", speculate, called="speculate")
    asked: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "method": method,
        "methods": methods,
        "acceptance": acceptance,
        "mode": mode,
        "draft_confidence": draft_confidence,
    }
    for name, value in asked.items():
        put(request.speculation, name, value, "speculation.")
    reasoning = {"split": split_reasoning, "max_tokens": max_reasoning_tokens, "effort": reasoning_effort or None}
    for name, value in reasoning.items():
        put(request.reasoning, name, value, "reasoning.")
    rest: dict[str, Any] = {
        "request_id": request_id,
        "priority": priority,
        "output_ids": output_ids,
        "model_digest": model_digest,
        "salt": salt,
        "model": model,
        "adapter": adapter,
        "media": media,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
    }
    for name, value in rest.items():
        put(request, name, value)
    return request


def _encode_sampling(sampling: SamplingParams | None, given: Mapping[str, Any]) -> pb.SamplingParams:
    """Whole parameters are sent whole; single fields leave the others to the gateway."""
    if unknown := sorted(given.keys() - set(_SAMPLING_FIELDS)):
        raise TypeError(f"unknown options: {', '.join(map(_with_near_miss, unknown))}")
    if sampling is not None and given:
        raise TypeError(f"sampling is given whole, and beside it {', '.join(sorted(given))}")
    if sampling is not None:
        given = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
    out = pb.SamplingParams()
    for name, value in given.items():
        put(out, name, value, "sampling.")
    return out


def _with_near_miss(name: str) -> str:
    own = (known for known, one in signature(build_request).parameters.items() if one.kind is not Parameter.VAR_KEYWORD)
    near = get_close_matches(name, (*_SAMPLING_FIELDS, *own, "timeout", "traceparent"), 1)
    return f"{name} (is {near[0]} meant?)" if near else name


_TRACEPARENT, _AUTHORIZATION = "traceparent", "authorization"


def request_metadata(traceparent: str = "", token: str = "") -> tuple[tuple[str, str], ...]:
    """What goes with a request: its trace's context, and who asks."""
    given = ((_TRACEPARENT, traceparent), (_AUTHORIZATION, token and f"Bearer {token}"))
    return tuple((key, value) for key, value in given if value)
