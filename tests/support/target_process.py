"""A toy target in a process of its own, which can be killed: python -m support.target_process STEP_S"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.fakes import TargetServicer, ToyTarget, serving, target_info

from outrider.rpc.stream import StreamConfig


@asynccontextmanager
async def target_process(step_s: float) -> AsyncIterator[tuple[Process, str]]:
    """It and its address. It ends with the test's process."""
    command = sys.executable, "-m", "support.target_process", str(step_s)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
    assert process.stdout is not None
    try:
        yield process, (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def main() -> None:
    toy = ToyTarget(step_s=float(sys.argv[1]), info=target_info(max_model_len=1 << 16))
    async with serving(TargetServicer(toy, StreamConfig(silence_s=120.0))) as server:
        print(server.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
