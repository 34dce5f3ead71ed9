"""`outrider serve`: draft, target and gateway on this machine, until it is ended."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from outrider.commands.arguments import parse
from outrider.commands.colours import Painter, make_painter
from outrider.commands.processes import Service, ServiceFailed, Services
from outrider.commands.progress import steps
from outrider.commands.readiness import wait_for_draft
from outrider.commands.serve_settings import ServeSettings
from outrider.wire.errors import OutriderError
from outrider.wire.ports import require_free

DESCRIPTION = (
    "Serve a target (the bare argument) with a draft on this machine: start the draft, the target and a gateway, and "
    "end all three with this process, on Ctrl-C, SIGTERM, or when the target or the gateway ends. Without any model "
    "the embedded pair is served."
)
HTTP = re.compile(r"^gateway http on (\S+)$", re.MULTILINE)
WATCH_S = 0.2


@dataclass(frozen=True, slots=True)
class Running:
    """The three services, and where clients come in."""

    draft: Service
    target: Service
    gateway: Service

    @property
    def http(self) -> str:
        """The address of the HTTP interface; empty without one."""
        return self.gateway.find(HTTP)


def main(argv: Sequence[str] | None = None, prog: str = "outrider serve") -> int:
    """Serves until a signal, which ends it with 0; 1 if a service does not start, or the target or gateway dies."""
    settings = parse(ServeSettings, sys.argv[1:] if argv is None else argv, prog, DESCRIPTION, bare=("target",))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    painter = make_painter(settings.plain)
    try:
        settings = settings.located()
        for address in filter(None, (settings.listen, settings.http)):
            require_free(address)
        with Services() as services:
            running = start(services, settings, painter)
            painter.lines(welcome(settings, running))
            return watch(running, painter)
    except (ServiceFailed, OutriderError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1


def start(services: Services, settings: ServeSettings, painter: Painter) -> Running:
    """Starts all three and returns when the gateway has found the others."""
    timeout = settings.start_timeout
    with steps(painter, "starting draft, target and gateway", total=3) as advance:
        draft = services.start("draft", settings.draft_arguments())
        target = services.start("target", settings.target_arguments())  # both load at the same time
        advance(f"draft listens on {services.wait(draft, timeout)}")
        advance(f"target listens on {services.wait(target, timeout)}")
        gateway = services.start("gateway", settings.gateway_arguments(target.address, draft.address))
        address = services.wait(gateway, timeout)
        wait_for_draft(address, timeout, services.check)
        advance(f"gateway listens on {address}")
    return Running(draft, target, gateway)


def watch(running: Running, painter: Painter) -> int:
    """Waits for the end. A draft that dies costs speed and no request, so the others go on."""
    has_draft = True
    try:
        while True:
            for service in (running.target, running.gateway):
                service.check()
            if has_draft:
                has_draft = _lives(running.draft, painter)
            time.sleep(WATCH_S)
    except (KeyboardInterrupt, SystemExit):
        painter.note("\nending the three services")
        return 0


def welcome(settings: ServeSettings, running: Running) -> list[str]:
    """What to do next."""
    draft = f"drafts from {settings.draft_folder}" if settings.draft_folder else "drafts by n-gram lookup"
    address = running.gateway.address
    lines = [
        f"serving {settings.target_folder}, {draft}",
        f"  chat      outrider chat --gateway {address}",
        f'  complete  outrider generate --gateway {address} "Once upon a time" --max-tokens 64',
    ]
    if http := running.http:
        lines += [f"  OpenAI    http://{http}/v1", f"  live page http://{http}/"]
    if settings.trace_file is not None:
        lines.append(f"  traces    outrider trace {settings.trace_file}")
    return [*lines, "Ctrl-C ends all three."]


def _lives(draft: Service, painter: Painter) -> bool:
    try:
        draft.check()
    except ServiceFailed as error:
        painter.note(f"{error}\ngoing on without a draft: plain decoding, no request fails")
        return False
    return True


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends as on Ctrl-C, with the services."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
