"""The gateway's process: `python -m outrider.gateway --target HOST:PORT --draft HOST:PORT --tokenizer DIR`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from outrider.gateway.boot import GatewayParts, build_gateway, locate_tokenizers
from outrider.gateway.peers.canary import Canary
from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.gateway.peers.remote import RemoteDrafts
from outrider.gateway.processes import GatewayProcess
from outrider.gateway.settings import GatewaySettings
from outrider.rpc.errors import OutriderError
from outrider.rpc.logs import setup_logging
from outrider.rpc.server import require_free, serve_until_signal
from outrider.rpc.settings import parse_settings
from outrider.rpc.telemetry import setup_tracing

SWITCH_INTERVAL_S = 0.0005  # of threads: the event loop gets its turn soon


def main(argv: Sequence[str] | None = None, prog: str = "outrider gateway") -> int:
    """Runs the gateway until SIGTERM; 2 if the models are no pair or the tokenizer is not theirs."""
    arguments = sys.argv[1:] if argv is None else argv
    return run(parse_settings(GatewaySettings, arguments, prog, "Serves generation over a target and a draft."), prog)


def run(settings: GatewaySettings, prog: str, process: GatewayProcess | None = None) -> int:
    """Serves as `main` does: as one of several processes where `process` says which, else as as many as the settings
    say."""
    setup_logging(settings.log_format, "outrider-gateway", shows_pid=settings.processes > 1)
    try:
        if process is None and settings.processes > 1:
            from outrider.gateway.supervisor import supervise

            # What is downloaded is so once, and not by every process.
            return asyncio.run(supervise(locate_tokenizers(settings)))
        _serve_here(settings, process)
    except OutriderError as error:
        sys.stderr.write(f"{prog}: error: {error}\n")
        return 2
    return 0


def _serve_here(settings: GatewaySettings, process: GatewayProcess | None) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop_tracing = setup_tracing("outrider-gateway", settings.trace_file, settings.trace_file_mb << 20)
    try:
        asyncio.run(_serve(settings, process))
    finally:
        stop_tracing()


async def _serve(settings: GatewaySettings, process: GatewayProcess | None) -> None:
    """Builds the parts, listens, connects to target and draft, and serves until a signal, or until they are no pair."""
    if process is None:  # else the supervisor holds the addresses
        require_free(settings.listen, settings.health, settings.metrics, settings.http)
    parts = build_gateway(settings, process)
    if parts.http is not None:
        await parts.http.start()
        print(f"gateway http on {parts.http.address}", flush=True)
    async with AsyncExitStack() as stack:
        await _export_metrics(stack, parts, settings.metrics if process is None else process.metrics)
        for model in parts.models:
            await stack.enter_async_context(model.targets)
            if isinstance(model.drafts, LocalDrafter):
                stack.callback(model.drafts.close)
        startup = asyncio.create_task(parts.connect(stack))
        serving = asyncio.create_task(_serve_grpc(parts, settings))
        tasks = [startup, serving, *_tasks_beside(parts, settings, process)]
        try:
            await asyncio.wait((startup, serving), return_when=asyncio.FIRST_COMPLETED)
            if startup.done():
                startup.result()  # raises where the models are no pair
                if process is None:  # else its output is its supervisor's
                    print("gateway has its peers", flush=True)
            await serving
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await parts.server.stop(0)
            if parts.http is not None:
                await parts.http.stop(0)


async def _export_metrics(stack: AsyncExitStack, parts: GatewayParts, listen: str) -> None:
    if parts.metrics is not None:
        from outrider.rpc.metrics import exported

        await stack.enter_async_context(exported(parts.metrics, listen, parts.server.health, "gateway"))


async def _serve_grpc(parts: GatewayParts, settings: GatewaySettings) -> None:
    http = parts.http
    await serve_until_signal(
        parts.server,
        name="gateway",
        grace_s=settings.grace_s,
        drain_delay_s=settings.drain_delay_s,
        on_drain=None if http is None else http.drain,
        on_stopped=None if http is None else http.stop,
    )


def _tasks_beside(
    parts: GatewayParts, settings: GatewaySettings, process: GatewayProcess | None
) -> list[asyncio.Task[None]]:
    """What goes on while it serves: reports to the supervisor, the canary, and trials of drafts."""
    tasks = [] if process is None else [asyncio.create_task(process.report(parts.server.health))]
    for model in parts.models:
        if settings.canary_s:
            tasks.append(asyncio.create_task(Canary(model.targets, settings.canary_s).run()))
        if model.trials is not None and isinstance(model.drafts, RemoteDrafts):
            tasks.append(asyncio.create_task(model.trials.run(model.drafts)))
    return tasks


if __name__ == "__main__":
    sys.exit(main())
