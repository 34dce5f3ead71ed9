"""An OTLP collector on the loopback, which keeps what it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The requests that exporters sent, in their order."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.endpoint = ""

    async def Export(self, request: Any, context: Any) -> Any:
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Any]:
        """Of all requests."""
        return [span for one in self.received for span in one.resource_spans[0].scope_spans[0].spans]


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Serves one in plaintext."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://localhost:{server.add_insecure_port('localhost:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
