"""Builds the parts of a gateway's process from its settings, and connects them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.gateway.auth import Tokens, caller_of
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.media import MediaLimits
from outrider.gateway.models import Models, ServedModels, UniqueNames
from outrider.gateway.peers.draft_trials import DraftTrials
from outrider.gateway.peers.handshake import check_tokenizer, vocabulary_for
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.peers.moving import MovingDrafts
from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.peers.untrusted import UntrustedDrafts
from outrider.gateway.processes import GatewayProcess
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.settings import GatewaySettings, by_model
from outrider.gateway.speculation.backends import Drafter
from outrider.gateway.speculation.schedule import ScheduledDrafter
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.proposers.registry import make_proposer
from outrider.rpc.errors import FailedPrecondition
from outrider.rpc.hub import ModelNotFound, locate
from outrider.rpc.interceptors import Gate
from outrider.rpc.messages import DraftInfo, TargetInfo
from outrider.rpc.pair import check_pair
from outrider.rpc.security import ClientTls, ServerTls
from outrider.rpc.server import HealthMonitor, Server, build_server
from outrider.rpc.settings import is_loopback
from outrider.rpc.stream import StreamConfig
from outrider.rpc.vocabulary import TokenizerFile

if TYPE_CHECKING:  # nothing of HTTP or of metrics is imported unless it is served
    from outrider.gateway.http.server import HttpServer
    from outrider.gateway.metrics import GatewayMetrics
    from outrider.rpc.metrics import Metrics

log = logging.getLogger(__name__)

ROOM_WAIT_S = 15.0  # where other gateways fill the targets: by its own requests alone one sends no more than they take
AWAY_WAIT_S = 3.0  # a gateway that stood still for seconds finds all its connections ended, and opens them anew
STREAMS_BESIDE = 64  # calls beside generation that are always let in: health, reflection, info


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What one model is served by."""

    engine: GenerationEngine
    targets: RemoteTargets
    drafts: Drafter | None
    trials: DraftTrials | None

    async def connect(self, stack: AsyncExitStack) -> None:
        """Connects to the drafts once a target can be used, and returns when both can. FailedPrecondition where every
        target, or every draft, answers and none may be used; one among others, or a later one, counts as absent."""
        _require(await self.targets.wait_admitted())
        if isinstance(self.drafts, RemoteDrafts):
            await stack.enter_async_context(self.drafts)
            _require(await self.drafts.wait_attempted())
            await self.drafts.wait_usable()


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of one process, built and not yet started."""

    models: Sequence[ModelParts]
    metrics: Metrics | None
    server: Server
    http: HttpServer | None

    async def connect(self, stack: AsyncExitStack) -> None:
        """Connects each model's; those of one wait for no other's."""
        await asyncio.gather(*(model.connect(stack) for model in self.models))


def build_gateway(settings: GatewaySettings, process: GatewayProcess | None) -> GatewayParts:
    """The parts, connected with one another. `process` is this one among several behind the same addresses."""
    names = settings.models
    counted = {name: _new_metrics(settings, alone=len(names) == 1) for name in names}
    unique = UniqueNames()
    parts = [
        build_model(settings.of_model(name), counted[name], partial(unique.check, place))
        for place, name in enumerate(names)
    ]
    unique.engines = engines = [one.engine for one in parts]
    models = engines[0] if len(engines) == 1 else ServedModels(engines, has_default=not names[0])
    metrics = _joined({settings.of_model(name).model_name: one for name, one in counted.items()})
    tls = ServerTls.of(settings)
    tokens = None if settings.tokens is None else Tokens(settings.tokens)
    targets = [one.targets for one in parts]
    server = _new_server(settings, models, targets, tls, tokens, reuse_port=process is not None)
    http = _new_http(settings, models, server, metrics, process, tls, tokens)
    return GatewayParts(parts, metrics, server, http)


def build_model(
    settings: GatewaySettings, metrics: GatewayMetrics | None, check_names: Callable[[TargetInfo], None]
) -> ModelParts:
    """One model's parts; the settings name no other. `check_names` refuses a target for what it calls its adapters."""
    tokenizer = load_tokenizer(settings.tokenizer[0])
    tokenizer.tool_parser = settings.tool_parser
    targets = _new_targets(settings, tokenizer, metrics, check_names)
    trials = None
    if settings.draft and not settings.local_methods and settings.draft_trial != "off":
        trials = DraftTrials(targets, tokenizer.encode, settings.draft_trial)
    drafts = _new_drafts(settings, tokenizer, targets, metrics, trials)
    engine = _new_engine(settings, tokenizer, targets, drafts, metrics)
    if trials is not None:
        engine.draft_trials = trials.found
    return ModelParts(engine, targets, drafts, trials)


def locate_tokenizers(settings: GatewaySettings) -> GatewaySettings:
    """The settings with folders in place of hub ids. FailedPrecondition for one that cannot be found."""
    found = by_model(map(str, settings.tokenizer), settings.models)
    located = [(name, locate_tokenizer(Path(folder))) for name, folders in found.items() for folder in folders]
    folders = [Path(f"{name}={folder}") if name else folder for name, folder in located]
    return settings.model_copy(update={"tokenizer": folders})


def locate_tokenizer(folder: Path) -> Path:
    """The folder of a tokenizer that is given by its folder or its hub id."""
    try:
        return locate(folder, weights=False)
    except ModelNotFound as error:
        raise FailedPrecondition(str(error)) from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder or a hub id. FailedPrecondition where it cannot be read."""
    located = locate_tokenizer(folder)
    try:
        return Tokenizer.load(located)
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise FailedPrecondition(f"cannot load a tokenizer from {folder}: {error}") from error


def _new_metrics(settings: GatewaySettings, alone: bool) -> GatewayMetrics | None:
    """Metrics are counted, and what counts them is imported, only where they are served."""
    if not (settings.http or settings.metrics):
        return None
    from outrider.gateway.metrics import GatewayMetrics

    return GatewayMetrics(alone)


def _joined(counted: Mapping[str, GatewayMetrics | None]) -> Metrics | None:
    """The series of all models."""
    by_name = {name: metrics for name, metrics in counted.items() if metrics is not None}
    if len(by_name) < 2:
        return next(iter(by_name.values()), None)
    from outrider.gateway.metrics import ModelsMetrics

    return ModelsMetrics(by_name)


def _streams(metrics: GatewayMetrics | None, role: str) -> StreamConfig | None:
    return None if metrics is None else metrics.stream_config(role)


def _new_targets(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    metrics: GatewayMetrics | None,
    check_names: Callable[[TargetInfo], None],
) -> RemoteTargets:
    def check(info: TargetInfo) -> None:
        check_names(info)
        if warning := check_tokenizer(tokenizer, info.model):
            log.warning("%s", warning)

    tls = ClientTls.of(settings, settings.target_tls_name)
    return RemoteTargets(settings.target, check, _streams(metrics, "target"), tls=tls)


def _new_drafts(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    targets: RemoteTargets,
    metrics: GatewayMetrics | None,
    trials: DraftTrials | None,
) -> Drafter | None:
    if not settings.draft:
        return None
    if names := settings.local_methods:
        given = dict(settings)
        return LocalDrafter([make_proposer(name, given, settings.allow_code) for name in names], in_turn=True)

    def check(info: DraftInfo) -> None:
        if warning := check_pair(targets.info.model, info.model):
            log.warning("%s", warning)
        if trials is not None:
            trials.check(info)

    def offer(info: DraftInfo) -> TokenizerFile | None:
        return vocabulary_for(info, targets.info.model, tokenizer)

    tls = ClientTls.of(settings, settings.draft_tls_name)
    kind = UntrustedDrafts if settings.untrusted_draft else MovingDrafts
    drafts = kind(settings.draft, check, _streams(metrics, "draft"), offer=offer, tls=tls, model=settings.model_name)
    targets.on_model = drafts.recheck
    return drafts


def _new_engine(
    settings: GatewaySettings,
    tokenizer: Tokenizer,
    targets: RemoteTargets,
    drafts: Drafter | None,
    metrics: GatewayMetrics | None,
) -> GenerationEngine:
    if drafts is not None and not settings.schedule.constant:
        drafts = ScheduledDrafter(drafts, settings.schedule, lambda: engine.admission.num_active)
    engine = GenerationEngine(tokenizer, targets, drafts, _engine_config(settings, targets))
    if metrics is not None:
        from outrider.gateway.request_metrics import measure

        measure(engine, metrics, settings.vllm_metrics, settings.gen_ai_metrics)
    return engine


def _engine_config(settings: GatewaySettings, targets: RemoteTargets) -> EngineConfig:
    return EngineConfig(
        num_draft_tokens=max(tokens for _, tokens in settings.schedule.ranges),
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


def _new_server(
    settings: GatewaySettings,
    models: Models,
    targets: Sequence[RemoteTargets],
    tls: ServerTls | None,
    tokens: Tokens | None,
    *,
    reuse_port: bool,
) -> Server:
    async def probe() -> None:
        """Answers once any model can be served."""
        waiting = [asyncio.ensure_future(one.wait_usable()) for one in targets]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    health = HealthMonitor([SERVICE_NAME], probe=probe, is_ready=lambda: any(one.usable for one in targets))
    num_requests = len(models.engines) * (settings.max_active + settings.max_waiting)
    return build_server(
        settings.listen,
        [SERVICE_NAME],
        GenerationServicer(models, settings.stall_s).register,
        health=health,
        enable_reflection=settings.reflection,
        max_concurrent_rpcs=num_requests + STREAMS_BESIDE,
        caller_share=settings.caller_share,
        caller_of=caller_of,
        max_message_bytes=settings.max_message_bytes,
        max_connection_age_s=settings.max_connection_age_s,
        tls=tls,
        interceptors=() if tokens is None else (Gate(tokens.check_call),),
        health_address=settings.health,
        reuse_port=reuse_port,
    )


def _new_http(
    settings: GatewaySettings,
    models: Models,
    server: Server,
    metrics: Metrics | None,
    process: GatewayProcess | None,
    tls: ServerTls | None,
    tokens: Tokens | None,
) -> HttpServer | None:
    if not settings.http:
        return None
    from outrider.gateway.http.protocol import HttpOptions
    from outrider.gateway.http.server import HttpServer

    shows_all = is_loopback(settings.http) if settings.operator_paths is None else settings.operator_paths
    options = HttpOptions(
        settings.max_body_bytes,
        settings.sse_keep_alive_s,
        settings.per_request_spec_decode_metrics,
        shows_all,
        settings.stall_s,
        tuple(settings.allowed_origins),
        settings.enable_per_request_metrics,
    )
    return HttpServer(
        models,
        settings.http,
        ready=lambda: server.health.ready,
        grace_s=settings.grace_s,
        options=options,
        series=process or metrics,
        shares_port=process is not None,
        tls=tls,
        tokens=tokens,
    )


def _require(refusal: FailedPrecondition | None) -> None:
    if refusal is not None:
        raise refusal
