"""What a gateway is told at start: by flags, variables or a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from outrider.gateway.admission import MAX_REQUEST_BYTES
from outrider.gateway.peers.addresses import Addresses
from outrider.gateway.speculation.schedule import BatchSchedule
from outrider.gateway.text.reasoning import AUTO, MARKERS, NONE
from outrider.gateway.text.tools.formats import FORMATS
from outrider.gateway.tracing import MAX_TRACED_ROUNDS
from outrider.proposers.registry import (
    METHODS,
    TOKEN_METHODS,
    MethodSettings,
    check_method,
    is_class,
    list_problem,
    method_of,
)
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.rpc.errors import InvalidArgument
from outrider.rpc.media import MAX_MEDIA_BYTES, MAX_MEDIA_PIXELS, MOST_PIXELS
from outrider.rpc.messages import MAX_DRAFT_TOKENS, MAX_PATIENCE_MS
from outrider.rpc.settings import Address, MaxLogprobs, Mode, NumDraftTokens, PeerSettings, ServerSettings, VllmMetrics
from outrider.rpc.words.sampling_params import MAX_LOGPROBS

# No address has an equals sign behind such characters alone.
_NAMED = re.compile(r"([A-Za-z0-9][\w.\-/]{0,127})=(.+)", re.DOTALL)


class GatewaySettings(ServerSettings, PeerSettings, MethodSettings):
    """What a gateway is told at start, besides what all services are."""

    section: ClassVar[str] = "gateway"
    exposed: ClassVar[tuple[str, ...]] = ("listen", "http")
    subjects: ClassVar[Mapping[str, str]] = {
        "target": "peers",
        "listen": "serving",
        "operator_paths": "HTTP",
        "tokens": "callers",
        "num_draft_tokens": "speculation",
        "max_active": "admission",
        "max_logprobs": "what requests may ask for",
        "model_name": "model and text",
        "log_requests": "traces and logs",
        "canary_s": "watching",
        "target_tls_name": "TLS to what is called",
    }
    first: ClassVar[tuple[str, ...]] = (
        "target", "draft", "tokenizer", "listen", "http", "tokens", "num_draft_tokens", "mode", "max_waiting",
        "metrics",
    )  # fmt: skip

    target: list[str] = Field(
        min_length=1,
        description="address of a target service, or several with commas: host:port, unix:path, ipv4:a:port,b:port; "
        "each address of a name, as in dns:///name:port, is a replica; with NAME= before it, of a model that requests "
        "ask by that name",
    )
    draft: list[str] = Field(
        default_factory=list,
        description="address of a draft service, or several; or what drafts in this process, the default first: "
        f"{', '.join(TOKEN_METHODS)}, package.module.Class; with NAME= before it, for the model of that name",
    )
    tokenizer: list[Path] = Field(
        min_length=1,
        description="folder of the target's checkpoint, for its tokenizer, or its hub id: ORG/NAME; with NAME= before "
        "it, of the model of that name",
    )
    listen: Address = "127.0.0.1:50050"
    http: str = Field(
        default="",
        description="address of the OpenAI-compatible HTTP interface, /metrics and the live page; empty: none",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=256,
        description="gateway processes behind the same addresses, a core for each; bounds of sequences and requests "
        "hold for every one of them",
    )
    max_connection_age_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds after which a gRPC connection takes no new calls, so that its client connects again; "
        "0: never",
    )
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds after SIGTERM, before grace-s, in which new requests are still taken though readiness is "
        "off, until balancers know",
    )
    stall_s: float = Field(
        default=60.0, gt=0, description="seconds that a client may read nothing while more is held back for it"
    )
    operator_paths: bool | None = Field(
        default=None,
        description="the live page and /metrics at the HTTP address, too (default: if this machine alone reaches it)",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="sites whose pages may ask over HTTP, as https://app.example.com, or several with commas; *: all; "
        "not given: none",
    )
    sse_keep_alive_s: float = Field(
        default=15.0, ge=0, description="seconds of silence after which a stream over HTTP gets a comment; 0: never"
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        default="none", description="say in each answer over HTTP, as vLLM does, what became of its drafts"
    )
    enable_per_request_metrics: bool = Field(
        default=False, description="say in each answer over HTTP, as vLLM does, when its tokens came"
    )
    trust_request_chat_template: bool = Field(
        default=False,
        description="take chat templates that requests over HTTP bring; who writes one writes control tokens, too",
    )
    tokens: Path | None = Field(
        default=None, description="YAML file of callers and their bearer tokens: without one nobody is served"
    )
    num_draft_tokens: NumDraftTokens = 4
    draft_tokens_by_batch: str = Field(
        default="", description="tokens drafted by the number of running sequences, as in 1-4:8,5-16:4,17-64:0"
    )
    disable_by_batch_size: int | None = Field(
        default=None, ge=1, description="running sequences above which nothing is drafted"
    )
    mode: Mode = "auto"
    draft_patience_ms: int = Field(
        default=500, ge=0, le=MAX_PATIENCE_MS, description="milliseconds that a round waits for its draft, at most"
    )
    untrusted_draft: bool = Field(
        default=False,
        description="believe no draft: under rejection its weights are ignored, and it is not told the request's seed",
    )
    max_active: int = Field(default=64, ge=1, description="sequences (prompts times n) that run at once")
    max_waiting: int = Field(default=960, ge=0, description="sequences that may wait; more are refused")
    max_admitted_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens of prompts and max_tokens that run and wait together; not given: half a context for each "
        "sequence that may",
    )
    caller_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="how much one caller may take of the sequences, tokens and gRPC calls that others leave; callers "
        "are told apart by their credential (see tokens), else by their salt (not of calls), else by their host",
    )
    max_request_bytes: int = Field(
        default=MAX_REQUEST_BYTES, ge=1024, le=MAX_MESSAGE_BYTES, description="largest request, over gRPC or HTTP"
    )
    max_logprobs: MaxLogprobs = MAX_LOGPROBS
    max_media_bytes: int = Field(
        default=0,
        ge=0,
        le=MAX_MEDIA_BYTES,
        description="most bytes of a request's pictures, beside what max_request_bytes allows; 0: none are taken",
    )
    max_media_pixels: int = Field(
        default=MAX_MEDIA_PIXELS, ge=1, le=MOST_PIXELS, description="most pixels of a request's pictures, all together"
    )
    media_folder: Path | None = Field(
        default=None, description="folder below which requests may name files as their pictures (not given: none)"
    )
    model_name: str = Field(default="", description="name that the model is served under; empty: the target's")
    tool_parser: str = Field(
        default=AUTO,
        description=f"how the model writes calls of tools; auto: as its chat template does; or {', '.join(FORMATS)}",
    )
    reasoning_parser: str = Field(
        default=AUTO,
        description="how the model's reasoning is told from its answer: auto: by what its tokenizer has; none; or by "
        f"name: {', '.join(MARKERS)}",
    )
    log_requests: Literal["off", "counts", "prompts"] = Field(
        default="off",
        description="a line of the log for each request at its end: id, trace, counts and outcome; prompts: and its "
        "prompt",
    )
    trace_rounds: int = Field(
        default=MAX_TRACED_ROUNDS,
        ge=0,
        description="rounds of a completion that have spans of their own in its trace; one span sums up all further",
    )
    trust_traceparent: bool = Field(
        default=False, description="go on with a client's trace, and record what it says is recorded"
    )
    draft_trial: Literal["refuse", "warn", "off"] = Field(
        default="refuse",
        description="what becomes of a draft's model of whose tokens the target keeps no more than of a guess, on "
        "short texts when the two meet: it is not used, or is with a warning; off: it is not tried",
    )
    canary_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds between two runs of the canary, a prompt by which targets of equal arithmetic are held "
        "against one another; 0: none",
    )
    vllm_metrics: VllmMetrics = False
    gen_ai_metrics: bool = Field(
        default=False,
        description="with metrics: what OpenTelemetry's GenAI conventions have servers measure, also under their names",
    )
    target_tls_name: str = Field(
        default="", description="name (SAN) that the targets' certificates must have (default: the host of the address)"
    )
    draft_tls_name: str = Field(
        default="", description="name (SAN) that the drafts' certificates must have (default: the host of the address)"
    )

    @property
    def schedule(self) -> BatchSchedule:
        """Tokens drafted by batch size. ValueError where the flag cannot be read."""
        most = MAX_DRAFT_TOKENS if self.draft_tokens_by_batch else self.num_draft_tokens
        return BatchSchedule.parse(self.draft_tokens_by_batch, most, self.disable_by_batch_size)

    @property
    def max_message_bytes(self) -> int:
        """The largest request over gRPC, pictures included."""
        return self.max_request_bytes + self.max_media_bytes

    @property
    def max_body_bytes(self) -> int:
        """The largest request over HTTP, where pictures are in base64."""
        return self.max_request_bytes + (self.max_media_bytes + 2) // 3 * 4

    @property
    def models(self) -> list[str]:
        """The names of the models, the default first, whose name is empty."""
        return sorted(by_model(self.target), key=bool)

    def of_model(self, name: str) -> GatewaySettings:
        """What one of several models is told, as if it were the only one."""
        own: dict[str, object] = {"target": by_model(self.target)[name]}
        own["draft"] = by_model(self.draft).get(name, [])
        own["tokenizer"] = [Path(folder) for folder in by_model(map(str, self.tokenizer), self.models)[name]]
        return self.model_copy(update=own | {"model_name": name or self.model_name})

    @property
    def local_methods(self) -> list[str]:
        """The entries of `draft` that are methods, and no addresses."""
        return _local_methods(self.draft)

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _one_tokenizer(cls, given: object) -> object:
        return [given] if isinstance(given, str | Path) else given

    @field_validator("target", "draft")
    @classmethod
    def _check_addresses(cls, given: list[str]) -> list[str]:
        for addresses in by_model(given).values():
            try:
                Addresses([] if _local_methods(addresses) else addresses)
            except InvalidArgument as error:
                raise ValueError(error.violations[0].problem) from None
        return given

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        names = self.models
        if self.model_name in names and self.model_name:
            raise ValueError(f"model_name is {self.model_name}, as a model of target is called; allowed: another name")
        if strange := [name for name in by_model(self.draft) if name not in names]:
            shown = ", ".join(name or "the default" for name in names)
            raise ValueError(f"draft: {strange[0] or 'the default'} is no model of target; allowed: {shown}")
        folders = by_model(map(str, self.tokenizer), names)
        for name in names:
            if len(folders.get(name, [])) != 1:
                number = "several are" if folders.get(name) else "none is"
                model = f" for the model {name}" if name else ""
                raise ValueError(f"tokenizer: {number} given{model}; allowed: one, as {name + '=' if name else ''}DIR")
        if unused := [name for name in folders if name not in names]:
            raise ValueError(f"tokenizer: {unused[0] or 'the default'} is no model of target; leave it out")
        return self

    @field_validator("allowed_origins")
    @classmethod
    def _split_origins(cls, given: list[str]) -> list[str]:
        origins = [part.strip() for text in given for part in text.split(",")]
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s*?#@]+", origin):
                raise ValueError(f"is {origin[:100]!r}; allowed: scheme and host, as https://app.example.com, or *")
        return origins

    @model_validator(mode="after")
    def _check_methods(self) -> Self:
        for given in by_model(self.draft).values():
            _check_local(given, self.allow_code)
        return self

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        if self.max_message_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"max_media_bytes is {self.max_media_bytes} beside max_request_bytes of {self.max_request_bytes}; "
                f"allowed: at most {MAX_MESSAGE_BYTES} together"
            )
        if self.media_folder is not None and not (self.max_media_bytes and self.media_folder.is_dir()):
            problem = "is no folder" if self.max_media_bytes else "is given without max_media_bytes"
            raise ValueError(f"media_folder {problem}; allowed: a folder, with max_media_bytes above 0")
        return self

    @field_validator("tool_parser", "reasoning_parser")
    @classmethod
    def _check_parser(cls, name: str, info: ValidationInfo) -> str:
        allowed = (AUTO, *FORMATS) if info.field_name == "tool_parser" else (AUTO, NONE, *MARKERS)
        if name not in allowed:
            raise ValueError(f"is {name[:100]!r}; allowed: {', '.join(allowed)}")
        return name

    @field_validator("draft_tokens_by_batch")
    @classmethod
    def _check_schedule(cls, text: str) -> str:
        BatchSchedule.parse(text, MAX_DRAFT_TOKENS, None)
        return text

    @model_validator(mode="after")
    def _check_processes(self) -> Self:
        if self.processes > 1 and self.listen.startswith("unix:"):
            raise ValueError(f"processes: {self.processes} cannot share {self.listen}; allowed: HOST:PORT or :PORT")
        if self.processes > 1 and sys.platform != "linux":
            raise ValueError(f"processes: {self.processes} share a port on Linux alone; allowed here: 1")
        return self


def by_model(given: Iterable[str], names: Collection[str] | None = None) -> dict[str, list[str]]:
    """Values by the name that stands before them and an equals sign, of these alone if `names` are given; without a
    name they are the default's, whose name is empty."""
    found: dict[str, list[str]] = {}
    for text in given:
        named = _NAMED.fullmatch(text)
        if named is not None and (names is None or named[1] in names):
            found.setdefault(named[1], []).append(named[2])
        else:
            found.setdefault("", []).append(text)
    return found


def _local_methods(given: Sequence[str]) -> list[str]:
    parts = [part.strip() for text in given for part in text.split(",")]
    return [part for part in parts if part in METHODS or is_class(part)]


def _check_local(draft: Sequence[str], allow_code: bool) -> None:
    """ValueError where what drafts in the gateway's process cannot, or stands among addresses."""
    names = _local_methods(draft)
    if names and (problem := list_problem(names)):
        raise ValueError(f"draft {problem}")
    for name in names:
        if method_of(check_method(name, allow_code)).needs_model:
            raise ValueError(f"draft: {name} needs a draft service; in this process: {', '.join(TOKEN_METHODS)}")
    if names and len(names) < sum(text.count(",") + 1 for text in draft):
        raise ValueError(f"draft: {', '.join(names)} would run in this process; allowed: methods alone, or addresses")
