"""`outrider serve`: draft (or a head), target and gateway on this machine, until it is ended."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from outrider.cli.arguments import fail, parse
from outrider.cli.local_services import LOOPBACK, Service, ServiceFailed, Services, leave_on_signals
from outrider.cli.local_settings import METHOD_NAMES, LocalSettings
from outrider.cli.terminal import Advance, Painter, make_painter, steps
from outrider.proposers.registry import method_of
from outrider.rpc.errors import OutriderError
from outrider.rpc.server import require_free
from outrider.rpc.settings import TlsSettings, is_loopback

DESCRIPTION = (
    "Serve a target (the bare argument) with a draft or a head on this machine: start the draft, if there is one, the "
    "target and a gateway, and end them with this process, on Ctrl-C, SIGTERM, or when the target or the gateway ends. "
    "Without any model the embedded pair is served."
)
HTTP = re.compile(r"^gateway http on (\S+)$", re.MULTILINE)
METRICS = re.compile(r"^\S+ metrics on (\S+)$", re.MULTILINE)
WATCH_S = 0.2


class ServeSettings(LocalSettings):
    """Which models are served, where they run, where clients come in, and which of them."""

    section: ClassVar[str] = "serve"
    first: ClassVar[tuple[str, ...]] = (
        "target.model", "draft.model", "draft.method", "target.head", "gateway.listen", "gateway.http", "device",
        "target.threads", "gateway.num_draft_tokens", "metrics",
    )  # fmt: skip
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **LocalSettings.aliases,
        "target": ("target.model",),
        "draft": ("draft.model",),
        "model_name": ("target.name", "gateway.model_name"),
        "max_model_len": ("target.max_model_len", "draft.max_model_len"),
        "max_logprobs": ("target.max_logprobs", "gateway.max_logprobs"),
        "draft_device": ("draft.device",),
        "draft_adapter": ("draft.draft_adapter",),
        "draft_quantization": ("draft.quantization",),
        "draft_threads": ("draft.threads",),
        "draft_cache_mb": ("draft.cache_mb",),
        **{
            name: (f"target.{name}",)
            for name in ("adapter", "allow_adapter_changes", "cache_mb", "batch_invariant", "trust_remote_code")
        },
        **{
            name: (f"gateway.{name}",)
            for name in ("listen", "http", "allowed_origins", "tokens", "mode", "tool_parser", "reasoning_parser")
        },
        **{name: (f"gateway.{name}",) for name in TlsSettings.model_fields},
        **{name: (f"draft.{name}",) for name in METHOD_NAMES},
    }


@dataclass(frozen=True, slots=True)
class Running:
    """The services, and where clients come in."""

    draft: Service | None
    target: Service
    gateway: Service

    @property
    def http(self) -> str:
        """The address of the HTTP interface; empty without one."""
        return self.gateway.find(HTTP)

    @property
    def metrics(self) -> list[str]:
        """Where the gateway, the target and the draft have /metrics; empty without."""
        services = (self.gateway, self.target, self.draft)
        found = [service.find(METRICS) for service in services if service is not None]
        return [address for address in found if address]


def main(argv: Sequence[str] | None = None, prog: str = "outrider serve") -> int:
    """Serves until a signal, which ends it with 0; 1 if a service does not start, or the target or gateway dies."""
    settings = parse(ServeSettings, argv, prog, DESCRIPTION, bare=("target.model",))
    leave_on_signals()
    painter = make_painter(settings.plain)
    try:
        settings.check_access()
        given, settings = settings, settings.located()
        drafts = [] if settings.draft is None else [settings.draft.metrics]
        gateway = settings.gateway
        require_free(gateway.listen, gateway.http, gateway.metrics, settings.target.metrics, *drafts)
        with Services(shows_logs=settings.log_format is not None) as services:
            with starting(painter, settings) as advance:
                running = start(services, settings, advance)
            painter.lines(welcome(given, running))
            return watch(running, painter)
    except (ServiceFailed, OutriderError, OSError, ValueError) as error:
        return fail(prog, error)


def starting(painter: Painter, settings: LocalSettings) -> AbstractContextManager[Advance]:
    """Shows the progress of `start`."""
    names = [*([] if settings.draft is None else ["draft"]), "target", "gateway"]
    return steps(painter, f"starting {', '.join(names[:-1])} and {names[-1]}", total=len(names))


def start(services: Services, settings: LocalSettings, advance: Advance) -> Running:
    """Starts all and returns when the gateway has found the others."""
    at = {name: services.private_address(name) if settings.is_closed else LOOPBACK for name in ("draft", "target")}
    draft = services.start("draft", settings.draft_arguments(at["draft"])) if settings.draft is not None else None
    target = services.start("target", settings.target_arguments(at["target"]))  # both load at the same time
    if draft is not None:
        advance(f"draft listens on {services.wait(draft, settings.start_timeout)}")
    return connect(services, settings, draft, target, advance)


def connect(
    services: Services, settings: LocalSettings, draft: Service | None, target: Service, advance: Advance
) -> Running:
    """Waits for the target, starts a gateway in front of the two, and returns when it has found them."""
    timeout = settings.start_timeout
    advance(f"target listens on {services.wait(target, timeout)}")
    gateway = services.start(
        "gateway", settings.gateway_arguments(target.address, "" if draft is None else draft.address)
    )
    address = services.wait(gateway, timeout)
    services.wait_ready(gateway, timeout)
    advance(f"gateway listens on {address}")
    return Running(draft, target, gateway)


def watch(running: Running, painter: Painter) -> int:
    """Waits for the end. A draft that dies costs speed and no request, so the others go on."""
    draft = running.draft
    try:
        while True:
            for service in (running.target, running.gateway):
                service.check()
            if draft is not None and not _lives(draft, painter):
                draft = None
            time.sleep(WATCH_S)
    except (KeyboardInterrupt, SystemExit):
        painter.note("\nending the services")
        return 0


def welcome(settings: ServeSettings, running: Running) -> list[str]:
    """What to do next; models are called what they were called when asked for."""
    address = running.gateway.address
    scheme, access = ("http", "") if settings.gateway.tls_cert is None else ("https", " --peer-ca CA")
    access += " --peer-cert CERT --peer-key KEY" if settings.gateway.tls_client_ca is not None else ""
    access += " --token-file FILE" if settings.gateway.tokens is not None else ""
    rounded = f" ({settings.target.quantization})" if settings.target.quantization else ""
    lines = [
        f"serving {settings.target.model}{rounded}, {'; '.join(_drafts(settings))}",
        f"  chat      outrider chat --gateway {address}{access}",
        f'  complete  outrider generate --gateway {address}{access} "Once upon a time" --max-tokens 64',
    ]
    if http := running.http:
        lines.append(f"  OpenAI    {scheme}://{http}/v1")
        lines += [f"  live page {scheme}://{http}/"] if is_loopback(http) and settings.gateway.tokens is None else []
    lines += [f"  metrics   http://{address}/metrics" for address in running.metrics]
    services = "" if settings.is_closed else _addresses(running)  # else they are where this user alone comes
    lines.append(f"  check     outrider doctor --gateway {address}{access}{services}")
    if settings.trace_file is not None:
        lines.append(f"  traces    outrider trace {settings.trace_file}")
    return [*lines, f"Ctrl-C ends {'both' if running.draft is None else 'all three'}."]


def _addresses(running: Running) -> str:
    """The addresses of the target and the draft, as flags."""
    draft = "" if running.draft is None else f" --draft {running.draft.address}"
    return f" --target {running.target.address}{draft}"


def _drafts(settings: ServeSettings) -> Iterator[str]:
    """What drafts, in words."""
    draft, head = settings.draft, settings.target.head
    if draft is not None and draft.model and draft.methods == ("draft_model",):
        yield f"drafts from {draft.model}"
    elif draft is not None:
        yield f"drafts by {'; else '.join(method_of(name).summary for name in draft.methods)}"
    if head is not None:
        yield f"drafts beside the target by the head in {head}"


def _lives(draft: Service, painter: Painter) -> bool:
    try:
        draft.check()
    except ServiceFailed as error:
        painter.note(f"{error}\ngoing on without a draft: plain decoding, no request fails")
        return False
    return True
