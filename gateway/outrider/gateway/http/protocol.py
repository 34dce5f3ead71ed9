"""The bodies of OpenAI's API as pydantic models, and how one becomes requests of the gateway.

A model holds a body's shape; values are judged by the one validator that gRPC has, too, so their fields are `Any` here.
Fields are OpenAI's, vLLM's further ones, and `speculation`. Null is absent. A field that nobody knows is ignored, as by
vLLM, but in `speculation`, which is our own; one that is known and would change the answer, but is not supported, is
refused by name. Sampling parameters are not named here: they are the table's in `words.sampling_params`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from outrider.gateway.admission import MAX_REQUEST_BYTES, SLOW_REQUEST_BYTES
from outrider.gateway.engine import GenerationEngine
from outrider.gateway.field_names import renamed
from outrider.gateway.goals import goals_of
from outrider.gateway.http.errors import http_status, invalid
from outrider.gateway.http.shares import client_of
from outrider.gateway.prepare import TRUNCATION_SIDES
from outrider.gateway.text.chat import check_num_messages
from outrider.gateway.text.tokenizer import LONG_TEXT
from outrider.rpc import telemetry as names
from outrider.rpc.errors import Cancelled, InvalidArgument, OutriderError, Violation, Violations, kind, quoted, shown
from outrider.rpc.json_values import ALLOWED, RepeatedKey, parse_json
from outrider.rpc.logs import OnceWarnings
from outrider.rpc.messages import MAX_N
from outrider.rpc.sampling_codec import resolve_sampling
from outrider.rpc.server_calls import HTTP_OK
from outrider.rpc.words.checks import ALL_LOGPROBS
from outrider.rpc.words.request import (
    PICTURE,
    DraftOptions,
    GenerationRequest,
    MediaSource,
    ReasoningOptions,
    ServerCall,
    SpeculationOptions,
    options_for_draft,
)
from outrider.rpc.words.sampling_params import DEFAULT_SAMPLING, PARAMETERS, AcceptanceRule, SamplingParams
from outrider.rpc.words.structured import StructuredOutput

T = TypeVar("T")
MAX_SHOWN = 100  # characters of a name that nobody knows
MAX_TIMEOUT_MS = 24 * 3600 * 1000
MAX_PROMPTS = 256
_PICTURES = ("image_url", "input_image")  # types of parts
BODY_S = 60.0  # in which a request's body has to be there
TO_THE_CONTEXT_S_END = 2**31 - 1  # where max_tokens is not given; the gateway cuts it to what is left
FINGERPRINT = "fp_"  # before the digest of the model in OpenAI's system_fingerprint
# The protocol's names and HTTP's, where they differ.
NAMES = {
    "token_ids.ids": "prompt", "text": "prompt", "input": "prompt", "prompt": "prompt", "chat": "messages",
    "reasoning.effort": "reasoning_effort", "reasoning.max_tokens": "max_reasoning_tokens",
    "prediction.text": "prediction.content", "salt": "cache_salt", "model_digest": "system_fingerprint",
    **{name: row.http for name, row in PARAMETERS.items() if row.http},
}  # fmt: skip
_ID = re.compile(r"0|-?[1-9][0-9]{0,9}")  # as a key, in one form alone; the validator knows which are there
_FURTHER = tuple(name for name, row in PARAMETERS.items() if row.http == "")  # sampling parameters by their own names
VERBOSITIES = ("low", "medium", "high")
BUDGET = "thinking_token_budget"
NO_BUDGET = -1
_NOT_EMPTY = ("allowed_token_ids", "logprob_token_ids")
# Of guided_*: structured_outputs' name and the protocol's.
_GUIDED = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
_deprecated = OnceWarnings("deprecated, use structured_outputs: %s")
_STRUCTURED = {"structured_output": "structured_outputs", "structured_output.json_schema": "structured_outputs.json"}
_ALLOWED = {  # by pydantic's name of what is wrong
    "bool_type": "true or false", "string_type": "a text", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Bounds and times of the HTTP interface; the application carries them as its state."""

    max_body_bytes: int = MAX_REQUEST_BYTES
    sse_keep_alive_s: float = 15.0  # silence after which a stream of events says that it lives; 0: never
    spec_decode_metrics: str = "none"  # what an answer says of its drafts: none, summary or detailed
    operator_paths: bool = True  # the live page and /metrics, which are not for clients
    stall_s: float = 60.0  # that a client may read nothing while more is held back for it
    allowed_origins: tuple[str, ...] = ()  # of other sites, whose pages may ask, too; "*": of all
    request_metrics: bool = False  # an answer says when it was scheduled and its tokens came


def options_of(request: Request) -> HttpOptions:
    """The options of the application that the request came to."""
    options: HttpOptions = request.app.state.options
    return options


async def read_body(request: Request, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of a request's JSON object; of a large one beside the event loop. 413 for what is too large,
    408 for what is too slow, 429 where too much is under way. A browser's form is refused: no other page may post."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid("content-type", "is not JSON; allowed: application/json")
    most = options_of(request).max_body_bytes
    too_large = HTTPException(413, f"body: has more than {most} bytes; allowed: at most that many (max_request_bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:  # before it is read
        raise too_large
    chunks, size, bodies = [], 0, request.app.state.bodies
    with bodies.holding(client_of(request)) as take:
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > most:
                        raise too_large
                    take(len(chunk))
                    chunks.append(chunk)
        except ClientDisconnect:
            raise Cancelled("the client went away") from None
        except TimeoutError:
            raise HTTPException(408, f"body: has not come within {BODY_S:g} s") from None
        raw = b"".join(chunks)
        if size > SLOW_REQUEST_BYTES:
            return await asyncio.to_thread(lambda: read(parse_body(raw)))
        return read(parse_body(raw))


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in some bytes."""
    try:
        values = parse_json(raw.decode("utf-8-sig"), unique_keys=True)
    except RepeatedKey as error:
        raise invalid("body", f"has the key {quoted(str(error))} twice; allowed: each key of an object once") from None
    except ValueError:
        raise invalid("body", f"is no JSON; allowed: {ALLOWED}, in UTF-8") from None
    if not isinstance(values, dict):
        raise invalid("body", f"is {kind(values)}; allowed: a JSON object")
    return values


def refusal(problem: str) -> PydanticCustomError:
    """An error in our own words; pydantic adds the field."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem})


def one_of(names: Sequence[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise refusal(f"is {quoted(value) if value else 'missing'}; allowed: {', '.join(names)}")
        return value

    return AfterValidator(check)


def whole(low: int, high: int) -> BeforeValidator:
    """A whole number in a closed range."""

    def check(value: Any) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise refusal(f"is {shown(value)}; allowed: a whole number, {low} to {high}")
        return value

    return BeforeValidator(check)


def _unsupported(*harmless: Any) -> BeforeValidator:
    """A field that is known and not supported; `harmless` values ask for nothing."""

    def check(value: Any) -> Any:
        if not any(value == one for one in harmless):
            raise refusal("is not supported; leave it out")
        return value

    return BeforeValidator(check)


Unsupported = Annotated[Any, _unsupported(None, False, "", [], {})]


class Body(BaseModel):
    """A JSON object whose nulls are absent."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Body):
    """What a stream ends with, and what its pieces say beside."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


_OF_DRAFTS: dict[str, Any] = {name: (Any, value) for name, value in options_for_draft(DraftOptions()).items()}
_ForDrafts: Any = create_model("_ForDrafts", __base__=Body, **_OF_DRAFTS)


class SpeculationBody(_ForDrafts):  # whose fields are made of a table
    """How to draft: ours, so that a name that is not known is refused."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    num_draft_tokens: Any = None
    method: str = ""
    methods: Annotated[list[Any], Field(default_factory=list)]
    acceptance: Annotated[str, one_of([rule.name.lower() for rule in AcceptanceRule])] = "auto"
    mode: str = ""

    def options(self) -> SpeculationOptions:
        """The speculation options as the gateway has them."""
        rule = AcceptanceRule[self.acceptance.upper()]
        return SpeculationOptions(**{**dict(self), "methods": tuple(self.methods), "acceptance": rule})


class ResponseFormat(Body):
    """A constraint on the text in OpenAI's form."""

    type: Annotated[str, one_of(["text", "json_object", "json_schema", "structural_tag"])] = Field(
        "", validate_default=True
    )
    json_schema: dict[str, Any] = {}
    object_schema: dict[str, Any] | None = Field(None, alias="schema")  # llama.cpp's, of a JSON object
    value: dict[str, Any] | None = None  # TGI's name of the same
    format: dict[str, Any] | None = None  # of a structural tag; the next two are its older form
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    def constraint(self) -> StructuredOutput | None:
        """What constrains the answer; None for free text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self._object()
        if self.type == "structural_tag":
            told = self.model_dump(include={"type", "format", "structures", "triggers"}, exclude_none=True)
            return StructuredOutput(structural_tag=json.dumps(told))
        schema = self.json_schema.get("schema")
        if not isinstance(schema, dict):
            problem = "missing" if schema is None else shown(schema)
            raise invalid("response_format.json_schema.schema", f"is {problem}; allowed: a JSON schema")
        return StructuredOutput(json_schema=json.dumps(schema))

    def _object(self) -> StructuredOutput:
        if self.object_schema and self.value:
            raise invalid("response_format.value", "is given beside schema; allowed: one of them")
        schema = self.object_schema or self.value
        return StructuredOutput(json_schema=json.dumps(schema)) if schema else StructuredOutput(json_object=True)


class StructuredOutputs(Body):
    """A constraint on the text in vLLM's form."""

    schema_or_text: Any = Field(None, alias="json")
    regex: Any = None
    grammar: Any = None
    choice: list[Any] | None = None
    json_object: bool = False
    structural_tag: Any = None

    def constraint(self) -> StructuredOutput:
        """The constraint as it was given; the validator wants exactly one."""
        schema, tag, choice = self.schema_or_text, self.structural_tag, self.choice
        return StructuredOutput(
            json_schema=schema if schema is None or isinstance(schema, str) else json.dumps(schema),
            structural_tag=tag if tag is None or isinstance(tag, str) else json.dumps(tag),
            regex=self.regex,
            grammar=self.grammar,
            choice=None if choice is None else tuple(choice),
            json_object=self.json_object,
        )


def _parts(content: Any) -> Any:
    """A content as a list of parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise refusal(f"is {kind(content)}; allowed: a text or a list of parts")
    return content


def _part(part: Any) -> str | MediaSource:
    """A text or a picture, in OpenAI's form or vLLM's shorter one."""
    name = part.get("type") if isinstance(part, dict) else None
    if name not in _PICTURES:
        return _text(part)
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url:
        raise refusal(
            'is no picture; allowed: {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        )
    return MediaSource(url=url)


def _text(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise refusal('is no text; allowed: {"type": "text", "text": ...}')
    return str(part["text"])


class Prediction(Body):
    """A guess at the answer, in OpenAI's form."""

    type: Annotated[str, one_of(["content"])] = Field("", validate_default=True)
    content: Annotated[list[Annotated[str, BeforeValidator(_text)]], FailFast(), BeforeValidator(_parts)] = []

    @property
    def text(self) -> str:
        """The parts, one after the other."""
        return "".join(self.content)


class OpenAIBody(Body):
    """What both endpoints know. Sampling parameters stand among the further fields."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        """What nobody knows is not held while the request is."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name in cls.model_fields or name in _FURTHER}

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None  # these four are older vLLM's words for structured_outputs
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: list[Any] | None = None
    speculation: SpeculationBody | None = None
    prediction: Prediction | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # how log probabilities name tokens
    truncation_side: Annotated[str, one_of(TRUNCATION_SIDES)] = "left"
    add_special_tokens: bool | None = None  # None: to a text, and not to what a chat template has written
    max_reasoning_tokens: Any = None
    thinking_token_budget: Any = None  # vLLM's name of it
    output_ids: list[Any] = []  # resumes: what the client has of each completion; of one alone its ids
    request_id: str | None = None
    n: Any = 1
    priority: Any = 0
    cache_salt: str = ""
    system_fingerprint: str = ""
    timeout_ms: Annotated[int | None, whole(1, MAX_TIMEOUT_MS)] = None
    prompt_logprobs: Any = None

    use_beam_search: Unsupported = None
    logits_processors: Unsupported = None
    watermarking: Unsupported = None
    repetition_detection: Unsupported = None
    return_token_offsets: Unsupported = None
    return_prompt_text: Unsupported = None
    prompt_embeds: Unsupported = None
    vllm_xargs: Unsupported = None
    kv_transfer_params: Unsupported = None
    ec_transfer_params: Unsupported = None
    media_io_kwargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None

    @property
    def continued_text(self) -> str:
        """The text of a message that is there already, and that the answer begins with."""
        return ""

    def _reasoning(self, effort: str) -> ReasoningOptions | None:
        """None where nothing is said of it."""
        most = self.max_reasoning_tokens
        if self.thinking_token_budget is not None:
            if most is not None:
                raise invalid(BUDGET, "is given beside max_reasoning_tokens; allowed: one of them")
            most = None if self.thinking_token_budget == NO_BUDGET else self.thinking_token_budget
        return ReasoningOptions(max_tokens=most, effort=effort) if effort or most is not None else None

    @property
    def names(self) -> dict[str, str]:
        """NAMES as this body has them: a constraint has three, and what was generated before is one list or several."""
        places = [f"[{place}]" for place in range(len(self.output_ids))][:MAX_N] if self._has_lists else [""]
        names = NAMES | {f"output_ids[{place}].ids": f"output_ids{own}" for place, own in enumerate(places)}
        if self.thinking_token_budget is not None:
            names["reasoning.max_tokens"] = BUDGET
        if self.structured_outputs is not None:
            return {**names, **_STRUCTURED}
        kind = next(iter(self._guided), None)
        if kind is None:
            return names
        return {**names, "structured_output": f"guided_{kind}", f"structured_output.{_GUIDED[kind]}": f"guided_{kind}"}

    @property
    def _has_lists(self) -> bool:
        return any(isinstance(one, list) for one in self.output_ids)

    def _resumed(self) -> tuple[tuple[Any, ...], ...]:
        """What the client has, by completion."""
        if not self._has_lists:
            return (tuple(self.output_ids),) if self.output_ids else ()
        for place, ids in enumerate(self.output_ids):
            if not isinstance(ids, list):
                raise invalid(f"output_ids[{place}]", f"is {kind(ids)}; allowed: a list of token ids")
        return tuple(map(tuple, self.output_ids))

    @property
    def _guided(self) -> dict[str, Any]:
        """What older bodies of vLLM say, by structured_outputs' names."""
        given = {kind: getattr(self, f"guided_{kind}") for kind in _GUIDED}
        return {kind: value for kind, value in given.items() if value is not None}

    def request(self, request: Request | None, engine: GenerationEngine, effort: str = "") -> GenerationRequest:
        """All of a request but its prompt; what the endpoints read differently is theirs to set. `effort`: how much to
        reason; empty: as the model does by itself."""
        adapter = engine.adapter_called(self.model)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is given without stream; allowed: only with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "is given with stream; allowed: only without it, as with vLLM")
        headers: Mapping[str, str] = {} if request is None else request.headers
        return GenerationRequest(
            sampling=self._sampling(engine.verifier.info.model.default_sampling),
            truncation_side=self.truncation_side,
            add_special_tokens=self.add_special_tokens,
            reasoning=self._reasoning(effort),
            prediction=None if self.prediction is None else self.prediction.text,
            speculation=SpeculationOptions() if self.speculation is None else self.speculation.options(),
            request_id=headers.get("x-request-id", "") if self.request_id is None else self.request_id,
            n=self.n,
            priority=self.priority,
            salt=self.cache_salt,
            peer="" if request is None or request.client is None else request.client.host,
            output_ids=self._resumed(),
            model_digest=self.system_fingerprint.removeprefix(FINGERPRINT),
            adapter=adapter,
            timeout_s=None if self.timeout_ms is None else self.timeout_ms / 1000,
            goals=goals_of(headers),
            traceparent=headers.get("traceparent", ""),
            call=None if request is None else _call(request, self.stream),
        )

    def _sampling(self, defaults: SamplingParams) -> SamplingParams:
        further = self.model_extra or {}
        given = {name: _from_json(name, further[name]) for name in _FURTHER if name in further}
        given |= {"structured_output": self._constraint(), "prompt_logprobs": self.prompt_logprobs}
        return resolve_sampling(given, defaults)

    def _constraint(self) -> StructuredOutput | None:
        guided = self._guided
        if guided:
            _deprecated.warn(", ".join(f"guided_{kind}" for kind in guided))
        asked = {
            "response_format": self.response_format,
            "structured_outputs": self.structured_outputs,
            **{f"guided_{kind}": StructuredOutputs(**{kind: value}) for kind, value in guided.items()},
        }
        names = [name for name, one in asked.items() if one is not None]
        if len(names) > 1:
            raise invalid(names[1], f"is given beside {names[0]}; allowed: one of them")
        one = asked[names[0]] if names else None
        return None if one is None else one.constraint()


def _call(request: Request, streams: bool) -> ServerCall:
    """What the request's span says of it. A stream that has begun has its status."""

    def status_of(error: OutriderError | None, answered: bool) -> int:
        return HTTP_OK if error is None or (streams and answered) else http_status(error)

    path = request.url.path  # no path of these has parameters: it is the route, too
    attributes = {
        names.HTTP_REQUEST_METHOD: request.method,
        names.HTTP_ROUTE: path,
        names.URL_PATH: path,
        names.URL_SCHEME: request.url.scheme,
    }
    return ServerCall(attributes, names.HTTP_RESPONSE_STATUS_CODE, status_of)


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
        if name in _NOT_EMPTY and not value:  # in the protocol empty is all, or none; whoever sends a list means some
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
        if not _ID.fullmatch(key):
            where = f"{name}[{key[:MAX_SHOWN]}]"
            raise invalid(where, "is for no token id; allowed: whole numbers as texts")
        biases[int(key)] = value
    return biases


class CalledFunction(Body):
    """The function of a call, and its arguments as a JSON text or an object."""

    name: str = Field(None, validate_default=True)
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    """A call that an assistant's message made."""

    model_config = ConfigDict(extra="allow")

    id: str = ""
    type: Annotated[str, one_of(["function"])] = "function"
    function: CalledFunction = Field(None, validate_default=True)


class ChatMessage(Body):
    """A message; what else it holds is the chat template's."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(None, validate_default=True)
    content: Annotated[list[Annotated[Any, BeforeValidator(_part)]], FailFast(), BeforeValidator(_parts)] = []
    tool_calls: Annotated[list[ToolCall], FailFast()] = []
    function_call: Unsupported = None

    def rendered(self) -> dict[str, Any]:
        """The message as a template takes it: the content is one text, or nothing beside calls; with pictures it has
        parts."""
        extra = self.model_extra or {}
        if "reasoning" in extra and "reasoning_content" not in extra:  # vLLM's newer name of what templates know
            extra = {**extra, "reasoning_content": extra["reasoning"]}
        message = {**extra, "role": self.role, "content": self._content()}
        if not self.tool_calls:
            return message
        calls = [call.model_dump() for call in self.tool_calls]
        given = "content" in self.model_fields_set
        return {**message, "content": message["content"] if given else None, "tool_calls": calls}

    @property
    def text(self) -> str:
        """Its parts that are texts."""
        return "\n".join(part for part in self.content if isinstance(part, str))

    def _content(self) -> str | list[dict[str, str]]:
        if all(isinstance(part, str) for part in self.content):
            return self.text
        return [{"type": "text", "text": part} if isinstance(part, str) else dict(PICTURE) for part in self.content]


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field([], min_length=1, validate_default=True)
    add_generation_prompt: bool = True
    echo: bool = False
    max_tokens: Any = None
    max_completion_tokens: Any = None  # OpenAI's newer name
    logprobs: bool = False
    top_logprobs: Any = None

    tools: list[Any] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    modalities: Annotated[Any, _unsupported(None, ["text"])] = None
    web_search_options: Unsupported = None
    reasoning_effort: str = ""
    include_reasoning: bool = True
    verbosity: Annotated[str | None, one_of(VERBOSITIES)] = None
    continue_final_message: bool = False
    chat_template: str | None = None
    documents: list[dict[str, Any]] = []

    @property
    def opens_answer(self) -> bool:
        """Whether the answer is a new message."""
        opens = self.add_generation_prompt
        if self.continue_final_message and opens and "add_generation_prompt" in self.model_fields_set:
            raise invalid("continue_final_message", "is given with add_generation_prompt; allowed: one of them")
        return opens and not self.continue_final_message

    @property
    def continued_text(self) -> str:
        """The text of the last message, where it is the assistant's and `echo` asks for it."""
        return self.messages[-1].text if self.echo and self.messages[-1].role == "assistant" else ""


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool = False
    best_of: Any = None
    logprobs: Any = None

    suffix: Unsupported = None


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that an answer repeats."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """What was asked for over HTTP: one request for each prompt, and the body, which shapes the answer."""

    requests: tuple[GenerationRequest, ...]
    body: OpenAIBody
    model: str  # by name: the adapter that was asked for, else the model itself
    num_logprobs: int | None  # None: no log probabilities in the answer
    names: tuple[Mapping[str, str], ...]  # by prompt, for errors
    prompt_only: bool = False  # nothing follows an echoed prompt: the one token that is generated is left out
    echoed: tuple[EchoedPrompt, ...] = ()  # what answers begin with, by prompt; empty: with the output

    @property
    def n(self) -> int:
        """How many completions each prompt gets."""
        return self.requests[0].n

    @property
    def num_shown(self) -> int | None:
        """How many of the candidates that come for each token are shown; all, where ids were listed."""
        sampling = self.requests[0].sampling
        return ALL_LOGPROBS if sampling is not None and sampling.logprob_token_ids else self.num_logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many log probabilities of each of a prompt's tokens are told; None: the target tells none."""
        sampling = self.requests[0].sampling
        return None if sampling is None else sampling.prompt_logprobs


B = TypeVar("B", bound=Body)


def validated(model: type[B], values: Mapping[str, Any]) -> B:
    """InvalidArgument, in the validator's words, for a body in another shape."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InvalidArgument.of(map(_violation, error.errors(include_url=False))) from None


def _violation(error: ErrorDetails) -> Violation:
    place = [f"[{part}]" if isinstance(part, int) else f".{part[:MAX_SHOWN]}" for part in error["loc"]]
    match error["type"]:
        case "refused":
            problem = error["msg"]
        case "extra_forbidden":
            problem = f"is unknown; allowed: {', '.join(SpeculationBody.model_fields)}"
        case "too_short":
            problem = "is missing or empty; allowed: at least one message"
        case other:
            given = "missing" if error["input"] is None else shown(error["input"])
            problem = f"is {given}; allowed: {_ALLOWED.get(other, error['msg'])}"
    return Violation("".join(place).removeprefix("."), problem)


def read_chat(values: Mapping[str, Any], request: Request | None, engine: GenerationEngine) -> OpenAIRequest:
    """What was asked for; a field in its wrong shape is refused here, a value out of range by the engine."""
    _check_num_messages(values.get("messages"), engine.verifier.info.model.max_model_len)
    body = validated(ChatBody, values)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "is given without logprobs; allowed: only with logprobs true")
    if body.chat_template and not engine.config.trust_request_chat_template:
        problem = "is given, and this gateway takes none from requests; allowed: leave it out"
        raise invalid("chat_template", f"{problem} (--trust-request-chat-template)")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, limit_name)
    verbosity = {} if body.verbosity is None else {"verbosity": body.verbosity}
    pictures = {
        f"messages[{place}].content[{part}].image_url": source
        for place, message in enumerate(body.messages)
        for part, source in enumerate(message.content)
        if isinstance(source, MediaSource)
    }
    chat = body.request(request, engine, body.reasoning_effort)
    chat = replace(
        chat,
        messages=tuple(message.rendered() for message in body.messages),
        add_generation_prompt=body.opens_answer,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template or None,
        documents=tuple(body.documents),
        sampling=replace(
            chat.sampling or DEFAULT_SAMPLING,
            max_tokens=TO_THE_CONTEXT_S_END if max_tokens is None else max_tokens,
            logprobs=num_logprobs,
        ),
        unset=("max_tokens",) if max_tokens is None else (),
        tools=tuple(body.tools),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=verbosity | body.chat_template_kwargs,
        media=tuple(pictures.values()),
    )
    names = {**body.names, "logprobs": "top_logprobs", "max_tokens": limit_name, "media": "messages"}
    names |= {f"media[{number}]": place for number, place in enumerate(pictures)}
    return OpenAIRequest((chat,), body, chat.adapter or engine.model_name, num_logprobs, (names,))


def _check_num_messages(given: Any, max_model_len: int) -> None:
    """Before each becomes an object."""
    found = Violations()
    check_num_messages(found, len(given) if isinstance(given, list) else 0, max_model_len)
    try:
        found.raise_if_any()
    except InvalidArgument as error:
        raise renamed(error, NAMES, max_model_len) from error


def read_completion(values: Mapping[str, Any], request: Request | None, engine: GenerationEngine) -> OpenAIRequest:
    """What was asked for; a field in its wrong shape is refused here, a value out of range by the engine."""
    body = validated(CompletionBody, values)
    if body.best_of not in (None, body.n):
        raise invalid("best_of", "is not n, and choosing among more is not supported; leave it out")
    num_logprobs = 1 if body.logprobs is True else body.logprobs  # vLLM's clients may send true for 1
    common = body.request(request, engine)
    sampling = replace(common.sampling or DEFAULT_SAMPLING, logprobs=num_logprobs)
    prompt_only = body.echo and sampling.max_tokens == 0
    if body.echo:
        most = 1 if prompt_only else sampling.max_tokens
        of_prompt = num_logprobs if body.prompt_logprobs is None else body.prompt_logprobs
        sampling = replace(sampling, prompt_logprobs=of_prompt, max_tokens=most)
    common = replace(
        common,
        sampling=sampling,
        unset=() if "max_tokens" in (body.model_extra or {}) else ("max_tokens",),
    )
    prompts = _prompts(body.prompt, common)
    for name, is_given in (("prediction", body.prediction is not None), ("output_ids", bool(body.output_ids))):
        if is_given and len(prompts) > 1:
            raise invalid(name, f"is given beside {len(prompts)} prompts; allowed: one prompt")
    if body.output_ids and body.echo:
        raise invalid("output_ids", "is given with echo, and the prompt was said; allowed: without echo")
    places = [""] if len(prompts) == 1 else [f"[{place}]" for place in range(len(prompts))]
    names = [{name: own + place if own == "prompt" else own for name, own in body.names.items()} for place in places]
    called = common.adapter or engine.model_name
    return OpenAIRequest(prompts, body, called, num_logprobs, tuple(names), prompt_only)


def _prompts(prompt: Any, common: GenerationRequest) -> tuple[GenerationRequest, ...]:
    """A text, several, a list of token ids, or several."""
    if isinstance(prompt, str):
        return (replace(common, text=prompt),)
    if not isinstance(prompt, list) or not prompt:
        problem = "is missing" if prompt is None else "is empty" if prompt == [] else f"is {kind(prompt)}"
        raise invalid("prompt", f"{problem}; allowed: a text, token ids, or a list of either")
    if isinstance(prompt[0], int | float):
        return (replace(common, token_ids=tuple(prompt)),)
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"has {len(prompt)} entries; allowed: at most {MAX_PROMPTS} prompts")
    num_chars = sum(len(value) for value in prompt if isinstance(value, str))
    common = replace(common, among_long=num_chars > LONG_TEXT)
    return tuple(_one_prompt(common, place, value) for place, value in enumerate(prompt))


def _one_prompt(common: GenerationRequest, place: int, value: Any) -> GenerationRequest:
    if common.request_id:
        common = replace(common, request_id=f"{common.request_id}-{place}")
    if isinstance(value, str):
        return replace(common, text=value)
    if isinstance(value, list):
        return replace(common, token_ids=tuple(value))
    raise invalid(f"prompt[{place}]", f"is {kind(value)}; allowed: a text or a list of token ids")
