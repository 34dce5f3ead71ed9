"""The gateway's process: `python -m outrider.gateway --target HOST:PORT --draft HOST:PORT --tokenizer DIR`."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from outrider.gateway.admission import MAX_REQUEST_BYTES
from outrider.gateway.auth import Tokens, caller_of
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.media import MediaLimits
from outrider.gateway.peers.addresses import Addresses
from outrider.gateway.peers.canary import Canary
from outrider.gateway.peers.handshake import check_tokenizer, vocabulary_for
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.peers.moving import MovingDrafts
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.peers.untrusted import UntrustedDrafts
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.siblings import Siblings
from outrider.gateway.speculation.backends import Drafter
from outrider.gateway.speculation.schedule import BatchSchedule, ScheduledDrafter
from outrider.gateway.text.reasoning import AUTO, MARKERS, NONE
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.gateway.text.tools.formats import FORMATS
from outrider.gateway.tracing import MAX_TRACED_ROUNDS
from outrider.proposers.registry import (
    METHODS,
    TOKEN_METHODS,
    MethodSettings,
    check_method,
    is_class,
    list_problem,
    make_proposer,
    method_of,
)
from outrider.rpc.channel import MAX_MESSAGE_BYTES
from outrider.rpc.errors import FailedPrecondition, InvalidArgument, OutriderError
from outrider.rpc.hub import ModelNotFound, locate
from outrider.rpc.interceptors import Gate
from outrider.rpc.logs import setup_logging
from outrider.rpc.media import MAX_MEDIA_BYTES, MAX_MEDIA_PIXELS, MOST_PIXELS
from outrider.rpc.messages import MAX_DRAFT_TOKENS, MAX_PATIENCE_MS, DraftInfo, TargetInfo
from outrider.rpc.pair import check_pair
from outrider.rpc.sampling_params import MAX_LOGPROBS
from outrider.rpc.security import ClientTls, ServerTls
from outrider.rpc.server import HealthMonitor, Server, build_server, require_free, serve_until_signal
from outrider.rpc.settings import (
    Address,
    MaxLogprobs,
    Mode,
    NumDraftTokens,
    PeerSettings,
    ServerSettings,
    VllmMetrics,
    is_loopback,
    parse_settings,
)
from outrider.rpc.stream import StreamConfig
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.vocabulary import TokenizerFile

if TYPE_CHECKING:
    from outrider.gateway.http.app import HttpServer
    from outrider.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

ROOM_WAIT_S = 15.0  # where other gateways fill the targets: by its own requests alone one sends no more than they take
AWAY_WAIT_S = 3.0  # a gateway that stood still for seconds finds all its connections ended, and opens them anew
STREAMS_BESIDE = 64  # calls beside generation that are always let in: health, reflection, info


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
        "each address of a name, as in dns:///name:port, is a replica",
    )
    draft: list[str] = Field(
        default_factory=list,
        description="address of a draft service, or several; or what drafts in this process, the default first: "
        f"{', '.join(TOKEN_METHODS)}, package.module.Class",
    )
    tokenizer: Path = Field(description="folder of the target's checkpoint, for its tokenizer, or its hub id: ORG/NAME")
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
    canary_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds between two runs of the canary, a prompt by which targets of equal arithmetic are held "
        "against one another; 0: none",
    )
    vllm_metrics: VllmMetrics = False
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
        """Of a request over gRPC."""
        return self.max_request_bytes + self.max_media_bytes

    @property
    def max_body_bytes(self) -> int:
        """Of one over HTTP, where pictures are in base64."""
        return self.max_request_bytes + (self.max_media_bytes + 2) // 3 * 4

    @property
    def local_methods(self) -> list[str]:
        """Those of `draft` that are no addresses."""
        return _local_methods(self.draft)

    @field_validator("target", "draft")
    @classmethod
    def _check_addresses(cls, given: list[str]) -> list[str]:
        try:
            Addresses([] if _local_methods(given) else given)
        except InvalidArgument as error:
            raise ValueError(error.violations[0].problem) from None
        return given

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
        names = self.local_methods
        if names and (problem := list_problem(names)):
            raise ValueError(f"draft {problem}")
        for name in names:
            if method_of(check_method(name, self.allow_code)).needs_model:
                raise ValueError(f"draft: {name} needs a draft service; in this process: {', '.join(TOKEN_METHODS)}")
        if names and len(names) < sum(text.count(",") + 1 for text in self.draft):
            raise ValueError(
                f"draft: {', '.join(names)} would run in this process; allowed: methods alone, or addresses"
            )
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

    @field_validator("tool_parser")
    @classmethod
    def _check_tool_parser(cls, name: str) -> str:
        if name not in (AUTO, *FORMATS):
            raise ValueError(f"is {name[:100]!r}; allowed: {AUTO}, {', '.join(FORMATS)}")
        return name

    @field_validator("reasoning_parser")
    @classmethod
    def _check_reasoning_parser(cls, name: str) -> str:
        if name not in (AUTO, NONE, *MARKERS):
            raise ValueError(f"is {name[:100]!r}; allowed: {AUTO}, {NONE}, {', '.join(MARKERS)}")
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


def _local_methods(given: Sequence[str]) -> list[str]:
    parts = [part.strip() for text in given for part in text.split(",")]
    return [part for part in parts if part in METHODS or is_class(part)]


def main(argv: Sequence[str] | None = None, prog: str = "outrider gateway") -> int:
    """Runs the gateway until SIGTERM; 2 if the models are no pair or the tokenizer is not theirs."""
    arguments = sys.argv[1:] if argv is None else argv
    return run(parse_settings(GatewaySettings, arguments, prog, "Serves generation over a target and a draft."), prog)


def run(settings: GatewaySettings, prog: str, siblings: Siblings | None = None) -> int:
    """As `main`; with siblings as one of them, else as many processes as the settings say."""
    setup_logging(settings.log_format, "outrider-gateway", shows_pid=settings.processes > 1)
    try:
        if siblings is None and settings.processes > 1:
            from outrider.gateway.supervisor import supervise

            return asyncio.run(supervise(_located(settings)))
        _serve_here(settings, siblings)
    except OutriderError as error:
        sys.stderr.write(f"{prog}: error: {error}\n")
        return 2
    return 0


def _serve_here(settings: GatewaySettings, siblings: Siblings | None) -> None:
    sys.setswitchinterval(0.0005)
    stop_tracing = setup_tracing("outrider-gateway", settings.trace_file, settings.trace_file_mb << 20)
    try:
        asyncio.run(_serve(settings, siblings))
    finally:
        stop_tracing()


async def _serve(settings: GatewaySettings, siblings: Siblings | None) -> None:
    if siblings is None:  # else their supervisor holds the addresses
        require_free(settings.listen, settings.health, settings.metrics, settings.http)
    tokenizer = _load_tokenizer(settings.tokenizer)
    tokenizer.tool_parser = settings.tool_parser
    metrics = _metrics(settings)
    streams = {role: None if metrics is None else metrics.stream_config(role) for role in ("target", "draft")}
    targets = RemoteTargets(
        settings.target,
        lambda info: _check_target(tokenizer, info),
        streams["target"],
        tls=ClientTls.of(settings, settings.target_tls_name),
    )
    drafts = _drafts(settings, tokenizer, targets, streams["draft"])
    if isinstance(drafts, RemoteDrafts):
        targets.on_model = drafts.recheck
    most = max(tokens for _, tokens in settings.schedule.ranges)
    config = EngineConfig(
        num_draft_tokens=most,
        mode=settings.mode,
        schedule=None if settings.schedule.constant else settings.schedule,
        draft_patience_ms=settings.draft_patience_ms,
        max_active=settings.max_active,
        max_waiting=settings.max_waiting,
        max_admitted_tokens=settings.max_admitted_tokens,
        caller_share=settings.caller_share,
        max_running_tokens=lambda: targets.max_open_tokens,
        room_wait_s=ROOM_WAIT_S,
        away_wait_s=AWAY_WAIT_S,
        model_name=settings.model_name,
        max_logprobs=settings.max_logprobs,
        reasoning_parser=settings.reasoning_parser,
        trust_traceparent=settings.trust_traceparent,
        trust_request_chat_template=settings.trust_request_chat_template,
        log_requests=settings.log_requests,
        trace_rounds=settings.trace_rounds,
        media=MediaLimits(settings.max_media_bytes, settings.max_media_pixels, settings.media_folder),
    )
    engine = _engine(settings, tokenizer, targets, drafts, config, metrics)
    tls = ServerTls.of(settings)
    tokens = None if settings.tokens is None else Tokens(settings.tokens)
    server = _build(settings, engine, targets, tls, tokens, reuse_port=siblings is not None)
    http = await _start_http(settings, engine, server, siblings, tls, tokens)
    async with AsyncExitStack() as stack:
        if metrics is not None:
            from outrider.rpc.metrics import exported

            listen = settings.metrics if siblings is None else siblings.metrics
            await stack.enter_async_context(exported(metrics, listen, server.health, "gateway"))
        await stack.enter_async_context(targets)
        if isinstance(drafts, LocalDrafter):
            stack.callback(drafts.close)
        startup = asyncio.create_task(_start_peers(stack, targets, drafts))
        serving = asyncio.create_task(
            serve_until_signal(
                server,
                name="gateway",
                grace_s=settings.grace_s,
                drain_delay_s=settings.drain_delay_s,
                on_drain=None if http is None else http.drain,
                on_stopped=None if http is None else http.stop,
            )
        )
        reporting = [] if siblings is None else [asyncio.create_task(siblings.report(server.health))]
        if settings.canary_s:
            reporting.append(asyncio.create_task(Canary(targets, settings.canary_s).run()))
        try:
            await asyncio.wait((startup, serving), return_when=asyncio.FIRST_COMPLETED)
            if startup.done():
                startup.result()  # raises where the models are no pair
                if siblings is None:  # else its output is its supervisor's
                    print("gateway has its peers", flush=True)
            await serving
        finally:
            for task in (startup, serving, *reporting):
                task.cancel()
            await asyncio.gather(startup, serving, *reporting, return_exceptions=True)
            await server.stop(0)
            if http is not None:
                await http.stop(0)


def _metrics(settings: GatewaySettings) -> GatewayMetrics | None:
    """Metrics are counted, and what counts them is imported, only where they are served."""
    if not (settings.http or settings.metrics):
        return None
    from outrider.gateway.metrics import GatewayMetrics

    return GatewayMetrics()


def _engine(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    targets: RemoteTargets,
    drafts: Drafter | None,
    config: EngineConfig,
    metrics: GatewayMetrics | None,
) -> GenerationEngine:
    if drafts is not None and not settings.schedule.constant:
        drafts = ScheduledDrafter(drafts, settings.schedule, lambda: engine.admission.num_active)
    engine: GenerationEngine
    if metrics is None:
        engine = GenerationEngine(tokenizer, targets, drafts, config)
    else:
        from outrider.gateway.metered import MeteredEngine

        engine = MeteredEngine(tokenizer, targets, drafts, config, metrics=metrics, vllm_names=settings.vllm_metrics)
    return engine


async def _start_http(
    settings: GatewaySettings,
    engine: GenerationEngine,
    server: Server,
    siblings: Siblings | None,
    tls: ServerTls | None,
    tokens: Tokens | None,
) -> HttpServer | None:
    """Nothing of HTTP is imported unless it is served."""
    if not settings.http:
        return None
    from outrider.gateway.http.app import HttpServer
    from outrider.gateway.http.protocol import HttpOptions

    wanted = settings.per_request_spec_decode_metrics
    shows_all = is_loopback(settings.http) if settings.operator_paths is None else settings.operator_paths
    options = HttpOptions(
        settings.max_body_bytes,
        settings.sse_keep_alive_s,
        wanted,
        shows_all,
        settings.stall_s,
        tuple(settings.allowed_origins),
        settings.enable_per_request_metrics,
    )
    http = HttpServer(
        engine,
        settings.http,
        ready=lambda: server.health.ready,
        grace_s=settings.grace_s,
        options=options,
        siblings=siblings,
        tls=tls,
        tokens=tokens,
    )
    await http.start()
    print(f"gateway http on {http.address}", flush=True)
    return http


def _located(settings: GatewaySettings) -> GatewaySettings:
    """With a folder in place of a hub id: what is downloaded is so once, and not by every process."""
    return settings.model_copy(update={"tokenizer": _locate(settings.tokenizer)})


def _locate(folder: Path) -> Path:
    try:
        return locate(folder, weights=False)
    except ModelNotFound as error:
        raise FailedPrecondition(str(error)) from error


def _load_tokenizer(folder: Path) -> Tokenizer:
    located = _locate(folder)
    try:
        return Tokenizer.load(located)
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise FailedPrecondition(f"cannot load a tokenizer from {folder}: {error}") from error


def _build(
    settings: GatewaySettings,
    engine: GenerationEngine,
    targets: RemoteTargets,
    tls: ServerTls | None,
    tokens: Tokens | None,
    *,
    reuse_port: bool,
) -> Server:
    health = HealthMonitor([SERVICE_NAME], probe=targets.wait_usable, is_ready=lambda: targets.usable)
    return build_server(
        settings.listen,
        [SERVICE_NAME],
        GenerationServicer(engine, settings.stall_s).register,
        health=health,
        enable_reflection=settings.reflection,
        max_concurrent_rpcs=settings.max_active + settings.max_waiting + STREAMS_BESIDE,
        caller_share=settings.caller_share,
        caller_of=caller_of,
        max_message_bytes=settings.max_message_bytes,
        max_connection_age_s=settings.max_connection_age_s,
        tls=tls,
        interceptors=() if tokens is None else (Gate(tokens.check_call),),
        health_address=settings.health,
        reuse_port=reuse_port,
    )


def _drafts(
    settings: GatewaySettings, tokenizer: Tokenizer, targets: RemoteTargets, streams: StreamConfig | None
) -> Drafter | None:
    if not settings.draft:
        return None
    if settings.local_methods:
        given = dict(settings)
        names = settings.local_methods
        return LocalDrafter([make_proposer(name, given, settings.allow_code) for name in names], in_turn=True)

    def check(info: DraftInfo) -> None:
        if warning := check_pair(targets.info.model, info.model):
            log.warning("%s", warning)

    def offer(info: DraftInfo) -> TokenizerFile | None:
        return vocabulary_for(info, targets.info.model, tokenizer)

    tls = ClientTls.of(settings, settings.draft_tls_name)
    drafts = UntrustedDrafts if settings.untrusted_draft else MovingDrafts
    return drafts(settings.draft, check, streams, offer=offer, tls=tls)


def _check_target(tokenizer: Tokenizer, info: TargetInfo) -> None:
    if warning := check_tokenizer(tokenizer, info.model):
        log.warning("%s", warning)


async def _start_peers(stack: AsyncExitStack, targets: RemoteTargets, drafts: Drafter | None) -> None:
    """Connects to the drafts once a target can be used, and returns when both can. FailedPrecondition where every
    target, or every draft, answers and none may be used; one among others, or a later one, counts as absent."""
    _require(await targets.wait_admitted())
    if isinstance(drafts, RemoteDrafts):
        await stack.enter_async_context(drafts)
        _require(await drafts.wait_attempted())
        await drafts.wait_usable()


def _require(refusal: FailedPrecondition | None) -> None:
    if refusal is not None:
        raise refusal


if __name__ == "__main__":
    sys.exit(main())
