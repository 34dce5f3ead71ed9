"""A JSON body becomes requests of the gateway: shapes are checked here, values by the one validator that gRPC has, too.

Fields are OpenAI's, vLLM's further ones, and `speculation`. Null is absent. A field that nobody knows is ignored, as by
vLLM, but in `speculation`, which is our own; one that is known and would change the answer, but is not supported, is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from outrider.gateway.generation import GenerationRequest, SpeculationOptions
from outrider.gateway.http_body import MAX_SHOWN, Body
from outrider.gateway.http_errors import invalid, no_such_model
from outrider.gateway.http_structured import structured_output
from outrider.wire.checks import quoted, shown
from outrider.wire.sampling import AcceptanceRule, SamplingParams

MAX_TIMEOUT_MS = 24 * 3600 * 1000
FINGERPRINT = "fp_"  # before the digest of the model in OpenAI's system_fingerprint

_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "seed",
)  # fmt: skip
_SPECULATION = ("enabled", "num_draft_tokens", "method", "acceptance", "mode")
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
# What of the model's own defaults has no absence in the protocol: it is empty where a request does not give it.
_EMPTY: dict[str, Any] = {
    "min_tokens": 0, "ignore_eos": False, "include_stop_str_in_output": False, "logit_bias": {}, "stop": (),
    "stop_token_ids": (), "allowed_token_ids": (), "bad_words": (), "bad_words_ids": (), "structured_output": None,
}  # fmt: skip
# The protocol's names and HTTP's, where they differ.
NAMES = {
    "token_ids.ids": "prompt", "text": "prompt", "input": "prompt", "prompt": "prompt", "chat": "messages",
    "salt": "cache_salt", "structured_output": "response_format", "model_digest": "system_fingerprint",
}  # fmt: skip
_STRUCTURED = {"structured_output": "structured_outputs", "structured_output.json_schema": "structured_outputs.json"}


@dataclass(frozen=True, slots=True)
class Ask:
    """What was asked for over HTTP: one request for each prompt, and the shape of the answer."""

    requests: tuple[GenerationRequest, ...]
    model: str
    stream: bool = False
    include_usage: bool = False
    reports_speculation: bool = False  # speculation was given
    returns_token_ids: bool = False
    num_logprobs: int | None = None  # None: no log probabilities in the answer
    names: tuple[Mapping[str, str], ...] = ()  # by prompt, for errors

    @property
    def n(self) -> int:
        """Completions a prompt."""
        return self.requests[0].n


def read_sampling(body: Body, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters that both endpoints know, the rest from the model's defaults."""
    given: dict[str, Any] = {name: body.get(name) for name in _PLAIN if body.get(name) is not None}
    given.update({name: body.items(name) for name in _LISTS})
    if body.get("allowed_token_ids") == []:  # empty in the protocol is all; whoever sends a list means some
        raise invalid("allowed_token_ids", "is empty; allowed: at least one token id, or leave it out")
    stop = body.get("stop", [])
    given["stop"] = (stop,) if isinstance(stop, str) else body.items("stop", "a text or a list of texts")
    given["logit_bias"] = _logit_bias(body)
    given["structured_output"] = structured_output(body.inner("response_format"), body.inner("structured_outputs"))
    if not isinstance(given.get("min_tokens", 0), int):
        raise invalid("min_tokens", f"is {shown(given['min_tokens'])}; allowed: a whole number")
    seed = given.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        given["seed"] = seed + 2**64  # OpenAI's seeds are signed
    return replace(defaults, **{**_EMPTY, "seed": None, "logprobs": None, "prompt_logprobs": None, **given})


def read_common(body: Body, request: Request | None, served: str) -> GenerationRequest:
    """All of a request but its prompt and its sampling parameters."""
    model = body.text("model", served)
    if model != served:
        raise no_such_model(model, served)
    headers: Mapping[str, str] = {} if request is None else request.headers
    return GenerationRequest(
        speculation=_speculation(body.inner("speculation")),
        request_id=body.text("request_id", headers.get("x-request-id", "")),
        n=body.get("n", 1),
        priority=body.get("priority", 0),
        salt=body.text("cache_salt"),
        model_digest=body.text("system_fingerprint").removeprefix(FINGERPRINT),
        timeout_s=_timeout_s(body),
        traceparent=headers.get("traceparent", ""),
    )


def reads_stream(body: Body) -> tuple[bool, bool]:
    """Whether to stream, and whether usage comes last."""
    stream, options = body.flag("stream"), body.inner("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options", "is given without stream; allowed: only with stream true")
    return stream, options is not None and options.flag("include_usage")


def names_in(body: Body) -> dict[str, str]:
    """NAMES as this body has them: a constraint has two."""
    own = {} if body.get("structured_outputs") is None else _STRUCTURED
    return {**NAMES, **own}


def _speculation(body: Body | None) -> SpeculationOptions:
    if body is None:
        return SpeculationOptions()
    body.only(*_SPECULATION)
    rule = body.text("acceptance", "auto")
    rules = {rule.name.lower(): rule for rule in AcceptanceRule}
    if rule not in rules:
        raise invalid("speculation.acceptance", f"is {quoted(rule)}; allowed: {', '.join(rules)}")
    return SpeculationOptions(
        enabled=body.flag("enabled", True),
        num_draft_tokens=body.get("num_draft_tokens"),
        method=body.text("method"),
        acceptance=rules[rule],
        mode=body.text("mode"),
    )


def _logit_bias(body: Body) -> dict[int, Any]:
    """JSON's keys are texts."""
    given = body.inner("logit_bias")
    if given is None:
        return {}
    biases = {}
    for key, value in given.values.items():
        try:
            biases[int(key)] = value
        except ValueError:
            where = f"logit_bias[{key[:MAX_SHOWN]}]"
            raise invalid(where, "is for no token id; allowed: whole numbers as texts") from None
    return biases


def _timeout_s(body: Body) -> float | None:
    value = body.get("timeout_ms")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TIMEOUT_MS:
        raise invalid("timeout_ms", f"is {shown(value)}; allowed: a whole number, 1 to {MAX_TIMEOUT_MS}")
    return value / 1000
