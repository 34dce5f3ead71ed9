"""`outrider colocated`: the gateway with draft and target in its own process. The classical arrangement, where draft
and verification take turns, served as the services serve: what they are to be compared with."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from outrider.cli.arguments import parse
from outrider.draft_service.settings import DraftSettings
from outrider.gateway.admission import MAX_REQUEST_BYTES
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.handshake import check_tokenizer
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import locate
from outrider.rpc.logs import setup_logging
from outrider.rpc.pair import check_pair
from outrider.rpc.security import ServerTls
from outrider.rpc.server import HealthMonitor, build_server, serve_until_signal
from outrider.rpc.settings import Address, ModelSettings, NumDraftTokens, ServerSettings
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.vocabulary import has_tokenizer
from outrider.target_service.settings import TargetSettings

if TYPE_CHECKING:
    from outrider.llm.services import LocalDraft, LocalTarget

log = logging.getLogger(__name__)

# What one process takes of the settings of a service.
OF_TARGET = ("model", "quantization", "expand", "trust_remote_code", "batch_invariant", *ModelSettings.model_fields)
OF_DRAFT = ("model", "quantization", *ModelSettings.model_fields)
DESCRIPTION = "Serve clients from one process that holds both models: draft and verification take turns."
NO_DRAFT = "give --draft.model DIR, the folder of the draft's checkpoint"
STREAMS_BESIDE = 64  # calls beside generation that are always let in


class ColocatedSettings(ServerSettings):
    """What the command line sets: of each model what its own service would be told, and how clients are served."""

    section: ClassVar[str] = "colocated"
    subjects: ClassVar[Mapping[str, str]] = {"listen": "serving", "num_draft_tokens": "speculation and admission"}
    first: ClassVar[tuple[str, ...]] = (
        "target.model", "draft.model", "listen", "num_draft_tokens", "target.device", "draft.device", "target.threads",
        "draft.threads", "max_active", "max_waiting",
    )  # fmt: skip
    decided: ClassVar[frozenset[str]] = frozenset(
        [f"target.{name}" for name in TargetSettings.model_fields.keys() - set(OF_TARGET)]
        + [f"draft.{name}" for name in DraftSettings.model_fields.keys() - set(OF_DRAFT)]
    )
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "target": ("target.model",),
        "draft": ("draft.model",),
        "threads": ("target.threads", "draft.threads"),
        "device": ("target.device", "draft.device"),
        "expand": ("target.expand",),
    }

    listen: Address = "127.0.0.1:50050"
    num_draft_tokens: NumDraftTokens = 4
    max_active: int = Field(64, ge=1, description="sequences that run at once")
    max_waiting: int = Field(960, ge=0, description="sequences that may wait; more are refused")
    target: TargetSettings
    draft: DraftSettings

    @model_validator(mode="before")
    @classmethod
    def _require_models(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        if not (given.get("draft") or {}).get("model"):
            raise ValueError(NO_DRAFT)
        return {"target": {}, **given}


def main(argv: Sequence[str] | None = None, prog: str = "outrider colocated") -> int:
    """Serves until SIGTERM or SIGINT; 2 for settings or models that cannot be served."""
    settings = parse(ColocatedSettings, argv, prog, DESCRIPTION)
    setup_logging(settings.log_format, "outrider-colocated")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch
    from outrider.engine.models.base import UnsupportedModel

    stop_tracing = setup_tracing("outrider-colocated", settings.trace_file, settings.trace_file_mb << 20)
    try:
        asyncio.run(_serve(settings))
    except (UnsupportedModel, OutriderError, FileNotFoundError, ValueError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    finally:
        stop_tracing()
    return 0


async def _serve(settings: ColocatedSettings) -> None:
    from outrider.engine.worker import set_switch_interval

    set_switch_interval()
    settings = located(settings)
    target, draft = await _load(settings)
    try:
        tokenizer = Tokenizer.load(settings.target.model)
        for warning in (check_tokenizer(tokenizer, target.info.model), check_pair(target.info.model, draft.info.model)):
            if warning:
                log.warning("%s", warning)
        config = EngineConfig(
            num_draft_tokens=settings.num_draft_tokens,
            mode="sequential",
            max_active=settings.max_active,
            max_waiting=settings.max_waiting,
        )
        server = build_server(
            settings.listen,
            [SERVICE_NAME],
            GenerationServicer(GenerationEngine(tokenizer, target, draft, config)).register,
            health=HealthMonitor([SERVICE_NAME], is_alive=lambda: target.thread.is_alive and draft.thread.is_alive),
            enable_reflection=settings.reflection,
            max_concurrent_rpcs=settings.max_active + settings.max_waiting + STREAMS_BESIDE,
            max_message_bytes=MAX_REQUEST_BYTES,
            tls=ServerTls.of(settings),
        )
        await serve_until_signal(server, name="colocated", grace_s=settings.grace_s)
    finally:
        for peer in (target, draft):
            await asyncio.to_thread(peer.stop)


def located(settings: ColocatedSettings) -> ColocatedSettings:
    """With folders in place of hub ids. Raises ValueError without a draft's model, ModelNotFound."""
    target, draft = settings.target, settings.draft
    if draft.model is None:
        raise ValueError(NO_DRAFT)
    model = locate(target.model)
    small = locate(draft.model, drafts_by="draft_model")
    mapped = [model] if has_tokenizer(model, small) else []
    found = {
        "target": target.model_copy(update={"model": model}),
        "draft": draft.model_copy(update={"model": small, "target_tokenizer": mapped}),
    }
    return settings.model_copy(update=found)


async def _load(settings: ColocatedSettings) -> tuple[LocalTarget, LocalDraft]:
    """Both engines, each on a device thread."""
    from outrider.draft_service.boot import load_draft
    from outrider.llm.services import LocalDraft, LocalTarget
    from outrider.target_service.boot import load

    large = await asyncio.to_thread(load, settings.target)
    small = await asyncio.to_thread(load_draft, settings.draft)
    loop = asyncio.get_running_loop()
    target = LocalTarget(settings.target, large, loop)
    try:
        return target, LocalDraft(settings.draft, small, loop)
    except BaseException:
        target.stop()
        raise
