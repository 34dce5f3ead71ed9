"""A server in a process of its own, for the tests of signals: serve_child.py [HOLD_S]"""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

from outrider.rpc.server import build_server, serve_until_signal
from outrider.v1 import target_pb2, target_pb2_grpc


class Slow(target_pb2_grpc.TargetServiceServicer):
    async def GetTargetInfo(self, request: Any, context: Any) -> Any:
        print("asked", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        return target_pb2.GetTargetInfoResponse(max_window=7)


async def main() -> None:
    server = build_server(
        "localhost:0",
        ["outrider.v1.TargetService"],
        lambda grpc_server: target_pb2_grpc.add_TargetServiceServicer_to_server(Slow(), grpc_server),
        enable_reflection=True,
    )
    await serve_until_signal(server, name="child", grace_s=30, on_drain=lambda: print("draining", flush=True))
    print("stopped", flush=True)
    assert gc.get_freeze_count() > 10_000, "what was loaded is collected again and again"


asyncio.run(main())
