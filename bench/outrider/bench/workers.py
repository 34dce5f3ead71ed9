"""Starts the workers: the floor's and the peers', each on all cores, one at a time."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from outrider.bench.measure import BenchSettings, Way, WorkerWay
from outrider.bench.worker import Worker, WorkerFailed
from outrider.cli.local_services import Folders
from outrider.rpc.settings import usable_cores

PEER_START_S = 600.0  # vllm compiles


def start_floor(stack: ExitStack, target: Path, timeout_s: float) -> Worker:
    """The bare products and the probe."""
    command = [sys.executable, "-m", "outrider.bench.floor", str(target), str(usable_cores())]
    worker = stack.enter_context(Worker("floor", command))
    worker.receive(timeout_s)
    return worker


def start_peers(stack: ExitStack, settings: BenchSettings, folders: Folders) -> list[Way]:
    """Those that are asked for."""
    threads, k = str(usable_cores()), str(settings.num_draft_tokens)
    models = [str(folders.target), str(folders.draft), threads, k]
    ways: list[Way] = []
    if settings.transformers:
        command = [sys.executable, "-m", "outrider.bench.transformers_worker", *models]
        worker = stack.enter_context(Worker("transformers", command))
        worker.receive(settings.start_timeout)
        ways.append(WorkerWay("transformers plain", worker, "plain"))
        ways.append(WorkerWay("transformers assisted", worker, "assisted", max_batch=1))
        ways.append(WorkerWay("transformers prompt-lookup", worker, "prompt-lookup", max_batch=1))
    scripted = {
        "vllm": settings.vllm_python, "llama.cpp": settings.llama_python, "llama.cpp-bfloat16": settings.llama_python,
    }  # fmt: skip
    for name, python in scripted.items():
        if python is not None:
            ways += _script_ways(stack, settings.peers_script, name, python, models)
    return ways


def _script_ways(stack: ExitStack, script: Path, name: str, python: Path, models: list[str]) -> list[Way]:
    """A peer in a virtual environment of its own. It says which modes it has; a worker a mode, since an engine is
    made for one."""
    if not script.is_file():
        raise WorkerFailed(f"{name}: there is no {script}; give --peers-script")
    ways: list[Way] = []
    for mode in ("plain", "draft"):
        worker = stack.enter_context(Worker(name, [str(python), str(script), name, mode, *models], pauses=True))
        ready = worker.receive(PEER_START_S)
        ways.append(WorkerWay(f"{name} {mode}", worker, mode, ready.get("max_batch")))
    return ways
