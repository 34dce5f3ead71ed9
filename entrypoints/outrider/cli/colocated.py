"""`outrider colocated`: the gateway with draft and target in its own process. The classical arrangement, where draft
and verification take turns, served as the services serve: what they are to be compared with."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from outrider.gateway.admission import MAX_REQUEST_BYTES
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.peers.handshake import check_tokenizer
from outrider.gateway.servicer import SERVICE_NAME, GenerationServicer
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.errors import OutriderError
from outrider.rpc.hub import locate
from outrider.rpc.logs import setup_logging
from outrider.rpc.messages import MAX_DRAFT_TOKENS
from outrider.rpc.pair import check_pair
from outrider.rpc.security import ServerTls
from outrider.rpc.server import HealthMonitor, build_server, serve_until_signal
from outrider.rpc.settings import Address, ServerSettings, parse_settings
from outrider.rpc.telemetry import setup_tracing
from outrider.rpc.vocabulary import has_tokenizer

if TYPE_CHECKING:
    from outrider.llm.local import LocalDraft, LocalTarget


log = logging.getLogger(__name__)

DESCRIPTION = "Serve clients from one process that holds both models: draft and verification take turns."
STREAMS_BESIDE = 64  # calls beside generation that are always let in


class ColocatedSettings(ServerSettings):
    """What the command line sets, besides what all services are told."""

    section: ClassVar[str] = "colocated"

    target: Path = Field(description="folder of the target's checkpoint, and of the tokenizer, or a hub id: ORG/NAME")
    draft: Path = Field(description="folder of the draft's checkpoint, or a hub id: ORG/NAME")
    listen: Address = "127.0.0.1:50050"
    num_draft_tokens: int = Field(4, ge=0, le=MAX_DRAFT_TOKENS, description="tokens drafted a round")
    threads: int | None = Field(None, ge=1, le=256, description="threads for each model's products (default: torch's)")
    device: str = Field("cpu", description="where both models run")
    expand: bool = Field(
        False, description="compute the same function by a network of about 300M parameters (Llama; for demonstrations)"
    )
    max_active: int = Field(64, ge=1, description="sequences that run at once")
    max_waiting: int = Field(960, ge=0, description="sequences that may wait; more are refused")


def main(argv: Sequence[str] | None = None, prog: str = "outrider colocated") -> int:
    """Serves until SIGTERM or SIGINT; 2 for settings or models that cannot be served."""
    settings = parse_settings(ColocatedSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION)
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
    folders = {"target": locate(settings.target), "draft": locate(settings.draft, drafts_by="draft_model")}
    settings = settings.model_copy(update=folders)
    target, draft = await _load(settings)
    try:
        tokenizer = Tokenizer.load(settings.target)
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


async def _load(settings: ColocatedSettings) -> tuple[LocalTarget, LocalDraft]:
    """Both engines, each on a device thread."""
    from outrider.draft_service.settings import DraftSettings
    from outrider.engine.loader import load_model
    from outrider.llm.local import LocalDraft, LocalTarget
    from outrider.target_service.boot import load
    from outrider.target_service.settings import TargetSettings

    common = {"device": settings.device, "threads": settings.threads}
    of_target = TargetSettings.model_validate({**common, "model": settings.target, "expand": settings.expand})
    targets = [settings.target] if has_tokenizer(settings.target, settings.draft) else []
    of_draft = DraftSettings.model_validate({**common, "model": settings.draft, "target_tokenizer": targets})
    large = await asyncio.to_thread(load, of_target)
    small = await asyncio.to_thread(load_model, settings.draft, device=settings.device, lone_file=True)
    loop = asyncio.get_running_loop()
    target = LocalTarget(of_target, large, loop)
    try:
        return target, LocalDraft(of_draft, small, loop)
    except BaseException:
        target.stop()
        raise


if __name__ == "__main__":
    sys.exit(main())
