"""A host of a target that spans several, but the first: it has vLLM's workers alone. It is started by the flags of the
first host, with a `node_rank` of its own, so that every worker is configured alike; scheduler, drafts and gRPC are the
first host's."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from multiprocessing import connection

from outrider.engine.models.base import UnsupportedModel
from outrider.target_service.settings import TargetSettings
from outrider.vllm.target.assembly import engine_args, told_of_threads, use_first_runner
from outrider.vllm.target.same_weights import require_same_weights

log = logging.getLogger(__name__)


async def serve(settings: TargetSettings) -> None:
    """Computes until the first host ends. What SIGTERM asks for waits for that: streams drain there. Raises
    UnsupportedModel for what vLLM refuses, RuntimeError where a worker dies."""
    signal.signal(signal.SIGTERM, lambda *_: log.info("this node ends with the first one"))
    await asyncio.to_thread(compute, settings)


def compute(settings: TargetSettings) -> None:
    """vLLM's workers of this host; `vllm serve --headless` does the same, and ends by a signal alone."""
    require_same_weights(settings)
    use_first_runner()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        config = AsyncEngineArgs(**engine_args(settings)).create_engine_config(headless=True)
        with told_of_threads(settings):
            executor = MultiprocExecutor(config, monitor_workers=False)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"vLLM does not start: {error}") from error
    try:
        parallel = config.parallel_config
        with socket.create_connection((parallel.master_addr, parallel.master_port)) as first:
            log.info("node %d of %d computes", parallel.node_rank, parallel.nnodes)
            ended = connection.wait([first, *(worker.proc.sentinel for worker in executor.workers)])
    finally:
        executor.shutdown()
    if first not in ended:
        raise RuntimeError("a worker of vLLM's died; see its log")
