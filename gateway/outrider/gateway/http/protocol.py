"""What holds for every HTTP request: the application carries it as its state.

A JSON body becomes requests of the gateway: shapes are checked here, values by the one validator that gRPC has, too.

Fields are OpenAI's, vLLM's further ones, and `speculation`. Null is absent. A field that nobody knows is ignored, as by
vLLM, but in `speculation`, which is our own; one that is known and would change the answer, but is not supported, is
refused by name.

The JSON body of a request, and how its fields are read.

Constraints on the text, in OpenAI's form (`response_format`) and vLLM's (`structured_outputs`).

Pieces of answers that both endpoints share: log probabilities, usage, what speculation did."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from outrider.gateway.admission import MAX_REQUEST_BYTES
from outrider.gateway.http.errors import invalid
from outrider.gateway.request import GenerationDelta, GenerationRequest, SpeculationOptions, no_such_model
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.planner.policy import SpeculationTally
from outrider.rpc.messages import PositionLogprobs
from outrider.rpc.sampling_params import (
    DEFAULT_SAMPLING,
    PARAMETERS,
    AcceptanceRule,
    SamplingParams,
    StructuredOutput,
    resolve_sampling,
)
from outrider.rpc.validate import kind, quoted, shown


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Bounds and times of the HTTP interface."""

    max_body_bytes: int = MAX_REQUEST_BYTES
    sse_keep_alive_s: float = 15.0  # silence after which a stream of events says that it lives; 0: never


def options_of(request: Request) -> HttpOptions:
    """The options of the application that the request came to."""
    options: HttpOptions = request.app.state.options
    return options


MAX_SHOWN = 100  # characters of a name that nobody knows


@dataclass(slots=True)
class Body:
    """A JSON object whose nulls are absent."""

    values: Mapping[str, Any]
    where: str = ""  # before the names of fields

    def get(self, name: str, default: Any = None) -> Any:
        """The value, unchecked."""
        value = self.values.get(name)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: a text")
        return value

    def items(self, name: str, allowed: str = "a list") -> tuple[Any, ...]:
        """A list, its entries unchecked."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: {allowed}")
        return tuple(value)

    def inner(self, name: str) -> Body | None:
        """An object inside this one."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(self.where + name, f"is {shown(value)}; allowed: an object")
        return Body(value, f"{self.where}{name}.")

    def only(self, *names: str) -> None:
        """Refuses names that this object does not have."""
        for name in self.values:
            if name not in names:
                raise invalid(f"{self.where}{name[:MAX_SHOWN]}", f"is unknown; allowed: {', '.join(names)}")

    def refuse(self, *names: str, unless: tuple[Any, ...] = (False, "", [], {})) -> None:
        """Fields that are known and not supported; `unless` are values that ask for nothing."""
        for name in names:
            value = self.get(name)
            if value is not None and not any(value == harmless for harmless in unless):
                raise invalid(self.where + name, "is not supported; leave it out")


async def read_body(request: Request) -> Body:
    """The JSON object of a request. 413 for one that is too large. A browser's form is refused: no other page may post
    here."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid("content-type", "is not JSON; allowed: application/json")
    most = options_of(request).max_body_bytes
    too_large = HTTPException(413, f"body: has more than {most} bytes; allowed: at most that many (max_request_bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:  # before it is read
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise too_large
        chunks.append(chunk)
    return parse_body(b"".join(chunks))


def parse_body(raw: bytes) -> Body:
    """The JSON object in some bytes."""
    try:
        values = json.loads(raw)
        if b"\\u" in raw:  # half a surrogate pair is no character: no tokenizer takes it
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise invalid("body", "is no JSON; allowed: a JSON object in UTF-8") from None
    if not isinstance(values, dict):
        raise invalid("body", f"is {kind(values)}; allowed: a JSON object")
    return Body(values)


_FORMATS = ("text", "json_object", "json_schema")


def structured_output(response_format: Body | None, structured_outputs: Body | None) -> StructuredOutput | None:
    """The constraint; None for free text."""
    if structured_outputs is not None:
        if response_format is not None:
            raise invalid("structured_outputs", "is given beside response_format; allowed: one of them")
        return _from_vllm(structured_outputs)
    return None if response_format is None else _from_openai(response_format)


def _from_openai(body: Body) -> StructuredOutput | None:
    kind = body.text("type")
    if kind not in _FORMATS:
        raise invalid(
            "response_format.type", f"is {quoted(kind) if kind else 'missing'}; allowed: {', '.join(_FORMATS)}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    schema = body.inner("json_schema")
    if schema is None or schema.inner("schema") is None:
        raise invalid("response_format.json_schema.schema", "is missing; allowed: a JSON schema")
    return StructuredOutput(json_schema=json.dumps(schema.get("schema")))


def _from_vllm(body: Body) -> StructuredOutput:
    schema = body.get("json")
    return StructuredOutput(
        json_schema=schema if schema is None or isinstance(schema, str) else json.dumps(schema),
        regex=body.get("regex"),
        grammar=body.get("grammar"),
        choice=body.items("choice") if body.get("choice") is not None else None,
        json_object=body.flag("json_object"),
    )


MAX_TIMEOUT_MS = 24 * 3600 * 1000
FINGERPRINT = "fp_"  # before the digest of the model in OpenAI's system_fingerprint

_SPECULATION = ("enabled", "num_draft_tokens", "method", "methods", "acceptance", "mode")
# The protocol's names and HTTP's, where they differ.
NAMES = {
    "token_ids.ids": "prompt", "text": "prompt", "input": "prompt", "prompt": "prompt", "chat": "messages",
    "salt": "cache_salt", "model_digest": "system_fingerprint",
    **{name: row.http for name, row in PARAMETERS.items() if row.http},
}  # fmt: skip
_STRUCTURED = {"structured_output": "structured_outputs", "structured_output.json_schema": "structured_outputs.json"}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
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
    names = [name for name, row in PARAMETERS.items() if row.http == "" and body.get(name) is not None]
    given = {name: _from_json(name, body.get(name)) for name in names}
    given["structured_output"] = structured_output(body.inner("response_format"), body.inner("structured_outputs"))
    return resolve_sampling(given, defaults)


def _from_json(name: str, value: Any) -> Any:
    """A sampling parameter in the shape that the validator judges."""
    default = getattr(DEFAULT_SAMPLING, name)
    if isinstance(default, dict):
        return _biases(name, value)
    if name == "stop":
        if not isinstance(value, str | list):
            raise invalid(name, f"is {shown(value)}; allowed: a text or a list of texts")
        return (value,) if isinstance(value, str) else tuple(value)
    if isinstance(default, tuple):
        if not isinstance(value, list):
            raise invalid(name, f"is {shown(value)}; allowed: a list")
        if name == "allowed_token_ids" and not value:  # in the protocol empty is all; whoever sends a list means some
            raise invalid(name, "is empty; allowed: at least one token id, or leave it out")
        return tuple(value)
    if name == "seed" and isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 0:
        return value + 2**64  # OpenAI's seeds are signed
    return value


def _biases(name: str, given: Any) -> dict[int, Any]:
    """JSON's keys are texts."""
    if not isinstance(given, dict):
        raise invalid(name, f"is {shown(given)}; allowed: an object")
    biases = {}
    for key, value in given.items():
        try:
            biases[int(key)] = value
        except ValueError:
            where = f"{name}[{key[:MAX_SHOWN]}]"
            raise invalid(where, "is for no token id; allowed: whole numbers as texts") from None
    return biases


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
        methods=body.items("methods"),
        acceptance=rules[rule],
        mode=body.text("mode"),
    )


def _timeout_s(body: Body) -> float | None:
    value = body.get("timeout_ms")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TIMEOUT_MS:
        raise invalid("timeout_ms", f"is {shown(value)}; allowed: a whole number, 1 to {MAX_TIMEOUT_MS}")
    return value / 1000


LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class UsageSum:
    """Tokens of a whole answer."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def add(self, delta: GenerationDelta, n: int) -> None:
        """Counts a completion that ended; a prompt counts once, whatever its completions."""
        if delta.usage is None:
            return
        self.completion += delta.usage.completion_tokens
        if delta.index % n == 0:
            self.prompt += delta.usage.prompt_tokens
            self.cached += delta.usage.cached_tokens

    def shape(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def join(deltas: Sequence[GenerationDelta]) -> GenerationDelta:
    """One completion, whole; its last delta has the finish."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        origins=tuple(chain.from_iterable(delta.origins for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
    )


def finish_shape(delta: GenerationDelta) -> dict[str, Any]:
    """Why a completion ended; nulls while it goes on."""
    reason = None if delta.finish_reason is None else delta.finish_reason.name.lower()
    stop = delta.stop_string if delta.stop_string is not None else delta.stop_token_id
    return {"finish_reason": reason, "stop_reason": stop}


def extension_shape(delta: GenerationDelta, speculation: bool, token_ids: bool) -> dict[str, Any]:
    """What goes beyond OpenAI, where it was asked for, and what nobody can ask for."""
    out: dict[str, Any] = {"near_ties": True} if delta.near_ties else {}
    if token_ids:
        out["token_ids"] = list(delta.token_ids)
        out["token_origins"] = [origin.name.lower() for origin in delta.origins]
    if speculation and delta.tally is not None:
        out["speculation"] = tally_shape(delta.tally) | {"acceptance": delta.acceptance.name.lower()}
    return out


def tally_shape(tally: SpeculationTally) -> dict[str, Any]:
    """What the rounds of a completion came to."""
    drafts, drafted = tally.num_drafts, tally.num_draft_tokens
    return {
        "num_rounds": tally.num_rounds,
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": tally.num_accepted_tokens,
        "num_accepted_per_position": tally.accepted_per_position,
        "num_tested_per_position": tally.tested_per_position,
        "acceptance_rate": tally.num_accepted_tokens / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + tally.num_accepted_tokens / drafts if drafts else 1.0,
        "overhead_us": tally.overhead_us,
        "method": tally.method,
        "mode": tally.mode,
        "num_rounds_by_mode": tally.rounds_by_mode,
    }


class TextPlace:
    """A place in a text that grows by tokens, some of which are half a character."""

    def __init__(self) -> None:
        self.offset = 0  # characters before it
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def advance(self, raw: bytes) -> None:
        """Steps over a token's bytes."""
        self.offset += len(self._decode(raw))


class TokenTexts:
    """Tokens as log probabilities name them: their text, or, where they are half a character, their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes

    def raw(self, token_id: int) -> bytes:
        """A token's bytes; none for an id without a token."""
        return (self._bytes[token_id] or b"") if token_id < len(self._bytes) else b""

    def text(self, token_id: int) -> str:
        """A token's name: no two tokens share one, but for ids without a token."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
        """The chat endpoint's form."""
        content = []
        for candidates in positions:
            chosen, *_ = candidates
            top = sorted(candidates, key=lambda entry: entry.rank)[:count]
            content.append({
                **self._entry(chosen.id, chosen.logprob),
                "top_logprobs": [self._entry(entry.id, entry.logprob) for entry in top],
            })  # fmt: skip
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": list(self.raw(token_id))}

    def completion(self, positions: Sequence[PositionLogprobs], place: TextPlace, count: int) -> dict[str, Any]:
        """The completions endpoint's form; `place` is where in the text these tokens begin."""
        tokens, values, tops, offsets = [], [], [], []
        for candidates in positions:
            chosen, *_ = candidates
            tokens.append(self.text(chosen.id))
            values.append(finite(chosen.logprob))
            tops.append({self.text(entry.id): finite(entry.logprob) for entry in candidates} if count else None)
            offsets.append(place.offset)
            place.advance(self.raw(chosen.id))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def finite(logprob: float) -> float:
    """A value that JSON can hold."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
