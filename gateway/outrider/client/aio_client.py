"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from outrider.client.calls import request_metadata
from outrider.client.parts import GatewayInfo, Part, decode_info
from outrider.client.request import build_request
from outrider.client.resume import Resumption
from outrider.client.retry import Retry, Route, addresses_of
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from outrider.wire.channel import connect
from outrider.wire.errors import OutriderError, from_rpc_error


class Client:
    """An asynchronous client of one gateway, or of several that serve the same model: one is asked until it fails.
    Open it inside the running loop and keep it."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._channels = [connect(one, credentials=credentials) for one in addresses_of(address)]
        self._stubs: list[Any] = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._retry = retry or Retry()
        self._index = 0  # of the gateway that answered last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every call and the connections."""
        for channel in self._channels:
            await channel.close()

    async def info(self, timeout: float | None = None) -> GatewayInfo:
        """What the gateway says of itself; of several the first that answers. Each is asked once."""
        route = Route(Retry(attempts=1), len(self._stubs), self._index, timeout)
        while True:
            try:
                answer = await self._stubs[route.index].GetGatewayInfo(
                    pb.GetGatewayInfoRequest(), timeout=route.remaining
                )
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(route.failed(from_rpc_error(error)))
            else:
                self._index = route.index
                return decode_info(answer)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        timeout: float | None = None,
        traceparent: str = "",
        **options: Any,
    ) -> AsyncGenerator[Part, None]:
        """Yields the parts of all completions as they come, over as many streams as it takes; options as for
        `build_request`. Closing the iterator ends the request."""
        resumption = Resumption(build_request(prompt, **options))
        route = Route(self._retry, len(self._stubs), self._index, timeout)
        metadata = request_metadata(traceparent)
        while True:
            call = self._stubs[route.index].Generate(resumption.begin(), timeout=route.remaining, metadata=metadata)
            try:
                async for response in call:
                    self._index = route.index
                    route.progressed()
                    if (part := resumption.take(response)) is not None:
                        yield part
                return
            except (grpc.aio.AioRpcError, OutriderError) as error:
                if resumption.finished:
                    return
                wait = route.failed(from_rpc_error(error) if isinstance(error, grpc.RpcError) else error)
            finally:
                call.cancel()
            await asyncio.sleep(wait)
