"""What a gateway is asked for: a GenerationRequest, whole or by keywords, which follow from its fields and from those
of the options in it. A value of the wrong type is refused under its field's name, as the gateway refuses one out of
bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from outrider.rpc.errors import Violations
from outrider.rpc.generation_codec import NOT_SENT, encode_request
from outrider.rpc.messages import MAX_N
from outrider.rpc.words.request import GenerationRequest, ReasoningOptions, SpeculationOptions
from outrider.rpc.words.sampling_params import PARAMETERS, SamplingParams
from outrider.v1 import generation_pb2 as pb

_PROMPTS = ("text", "token_ids", "messages")
# Keywords of options that are parts of a request, by the field's name there.
_SPECULATION = {one.name: one.name for one in fields(SpeculationOptions) if one.name != "greedy_draft"}
_SPECULATION["speculate"] = _SPECULATION.pop("enabled")
_REASONING = {"split_reasoning": "split", "max_reasoning_tokens": "max_tokens", "reasoning_effort": "effort"}
_OWN = {one.name for one in fields(GenerationRequest)} - {"text", "unset", *NOT_SENT}
_CALL = ("timeout", "traceparent")  # of a call, beside the request's

_TRACEPARENT, _AUTHORIZATION = "traceparent", "authorization"


def build_request(prompt: str | GenerationRequest | None = None, **options: Any) -> pb.GenerateRequest:
    """The message of a request, which is given whole, or by keywords: one of prompt, token_ids and messages; whole
    SamplingParams, or single fields of them, of which those not given are the model's defaults; fields of
    SpeculationOptions (`enabled` is called `speculate`), and of ReasoningOptions (split_reasoning,
    max_reasoning_tokens, reasoning_effort). Tools, and calls in messages, have OpenAI's form. `media` are pictures in
    the order in which the prompt has the model's placeholders, or messages have {"type": "image"} among their parts."""
    if not isinstance(prompt, GenerationRequest):
        return encode_request(request_of(prompt, options))
    if options:
        raise TypeError(f"a request is given whole, and beside it {', '.join(sorted(options))}")
    return encode_request(prompt)


def request_of(prompt: str | None, options: Mapping[str, Any]) -> GenerationRequest:
    """The request of these keywords; one that is None is not given. TypeError for what is no keyword."""
    given = {name: value for name, value in options.items() if value is not None}
    own = {name: given.pop(name) for name in _OWN & given.keys()} | ({} if prompt is None else {"text": prompt})
    if sum(name in own for name in _PROMPTS) != 1:
        raise TypeError("exactly one of prompt, token_ids and messages is needed")
    if "chat_template_kwargs" in own and "messages" not in own:
        raise TypeError("chat_template_kwargs is given without messages")
    speculation = {_SPECULATION[name]: given.pop(name) for name in _SPECULATION.keys() & given.keys()}
    reasoning = {_REASONING[name]: given.pop(name) for name in _REASONING.keys() & given.keys()}
    if unknown := sorted(options.keys() - _OWN - _SPECULATION.keys() - _REASONING.keys() - PARAMETERS.keys()):
        raise TypeError(f"unknown options: {', '.join(map(_with_near_miss, unknown))}")
    if given and "sampling" in own:
        raise TypeError(f"sampling is given whole, and beside it {', '.join(sorted(given))}")
    if "sampling" not in own:
        own |= {"sampling": SamplingParams(**given), "unset": tuple(name for name in PARAMETERS if name not in given)}
    if speculation:
        own["speculation"] = SpeculationOptions(**speculation)
    if reasoning:
        own["reasoning"] = ReasoningOptions(**reasoning)
    found = Violations()
    found.integer("n", own.get("n", 1), 1, MAX_N)  # the protocol's 0 is 1
    found.raise_if_any()
    return GenerationRequest(**own)


def _with_near_miss(name: str) -> str:
    known = ("prompt", *sorted(_OWN), *_SPECULATION, *_REASONING, *PARAMETERS, *_CALL)
    near = get_close_matches(name, known, 1)
    return f"{name} (is {near[0]} meant?)" if near else name


def request_metadata(traceparent: str = "", token: str = "") -> tuple[tuple[str, str], ...]:
    """What goes with a request: its trace's context, and who asks."""
    given = ((_TRACEPARENT, traceparent), (_AUTHORIZATION, token and f"Bearer {token}"))
    return tuple((key, value) for key, value in given if value)
