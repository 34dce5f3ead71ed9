"""Starts the workers: the floor's and the peers', each on all cores, one at a time."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from outrider.bench.measure import BenchBackend, BenchSettings, WorkerBackend
from outrider.bench.worker import BenchWorker, BenchWorkerFailed
from outrider.cli.local_services import Folders
from outrider.rpc.settings import usable_cores

PEER_START_S = 600.0  # vllm compiles


def start_floor(stack: ExitStack, target: Path, timeout_s: float) -> BenchWorker:
    """The bare products and the probe."""
    command = [sys.executable, "-m", "outrider.bench.floor", str(target), str(usable_cores())]
    worker = stack.enter_context(BenchWorker("floor", command))
    worker.receive(timeout_s)
    return worker


def start_peers(stack: ExitStack, settings: BenchSettings, folders: Folders) -> list[BenchBackend]:
    """Those that are asked for."""
    threads, k = str(usable_cores()), str(settings.num_draft_tokens)
    models = [str(folders.target), str(folders.draft), threads, k]
    backends: list[BenchBackend] = []
    if settings.transformers:
        command = [sys.executable, "-m", "outrider.bench.transformers_worker", *models]
        worker = stack.enter_context(BenchWorker("transformers", command))
        worker.receive(settings.start_timeout)
        backends.append(WorkerBackend("transformers plain", worker, "plain"))
        backends.append(WorkerBackend("transformers assisted", worker, "assisted", max_batch=1))
        backends.append(WorkerBackend("transformers prompt-lookup", worker, "prompt-lookup", max_batch=1))
    scripted = {
        "vllm": settings.vllm_python, "llama.cpp": settings.llama_python, "llama.cpp-bfloat16": settings.llama_python,
    }  # fmt: skip
    for name, python in scripted.items():
        if python is not None:
            backends += _script_backends(stack, settings.peers_script, name, python, models)
    return backends


def _script_backends(stack: ExitStack, script: Path, name: str, python: Path, models: list[str]) -> list[BenchBackend]:
    """A peer in a virtual environment of its own. It says which modes it has; a worker a mode, since an engine is
    made for one."""
    if not script.is_file():
        raise BenchWorkerFailed(f"{name}: there is no {script}; give --peers-script")
    backends: list[BenchBackend] = []
    for mode in ("plain", "draft"):
        worker = stack.enter_context(BenchWorker(name, [str(python), str(script), name, mode, *models], pauses=True))
        ready = worker.receive(PEER_START_S)
        backends.append(WorkerBackend(f"{name} {mode}", worker, mode, ready.get("max_batch")))
    return backends
