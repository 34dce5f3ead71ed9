"""Draft and target in one process, which take turns: the classical co-located speculation that the services are
measured against, as `outrider colocated` serves it, with the gateway's engine between them and no socket.

A worker: `python -m outrider.bench.colocated TARGET DRAFT THREADS [expand]`, under stretched draft passes. It answers a
NetworkBatch with "pass_ms" by the summary of its rounds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.harness import Handler, serve_requests
from outrider.bench.network_fleet import MAX_ACTIVE, SEQUENTIAL, BranchWatcher, NetworkBatch, ServicesBackend
from outrider.bench.network_workers import PassPacer
from outrider.draft_service.settings import DraftSettings
from outrider.engine.loader import load_model
from outrider.engine.worker import set_switch_interval
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.llm.services import LocalDraft, LocalTarget
from outrider.target_service.boot import load
from outrider.target_service.settings import TargetSettings


async def make_backend(target: Path, draft: Path, threads: int, expand: bool) -> ServicesBackend:
    """Both models. A draft's products are too small for more than one thread."""
    set_switch_interval()
    of_target = TargetSettings(model=target, threads=threads, prefix_cache=False, expand=expand)
    of_draft = DraftSettings(model=draft, threads=1)
    loop = asyncio.get_running_loop()
    large = LocalTarget(of_target, load(of_target), loop)
    watcher = BranchWatcher(LocalDraft(of_draft, load_model(draft), loop))
    config = EngineConfig(mode=SEQUENTIAL, max_active=MAX_ACTIVE)
    return ServicesBackend(GenerationEngine(Tokenizer.load(target), large, watcher, config), watcher, SEQUENTIAL)


def make_handler(arguments: Sequence[str]) -> Handler:
    """On a loop of its own."""
    target, draft, threads, *expand = arguments
    pace, runner = PassPacer(), asyncio.Runner()
    pace.stretch_passes()
    backend = runner.run(make_backend(Path(target), Path(draft), int(threads), bool(expand)))

    def handle(question: dict[str, Any]) -> dict[str, Any]:
        pace.pass_s = question.pop("pass_ms") / 1e3
        batch = NetworkBatch(**question | {"prompts": tuple(map(tuple, question["prompts"]))})
        return asdict(runner.run(backend.run(batch)))

    return handle


if __name__ == "__main__":
    sys.exit(serve_requests(make_handler))
