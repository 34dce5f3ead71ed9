"""The asynchronous client, and the same for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
import grpc.aio

from outrider.client.background import Background
from outrider.client.request import build_request, request_metadata
from outrider.client.resume import NO_RETRY, Resumption, Retry, Route, addresses_of
from outrider.client.types import GatewayInfo, Part, decode_info
from outrider.rpc.channel import connect, connect_blocking
from outrider.rpc.errors import OutriderError
from outrider.rpc.retry_budget import RetryBudget
from outrider.rpc.status import from_rpc_error
from outrider.rpc.words.request import GenerationRequest
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc

MOST_RETRIES = 500  # at once, and so many in 10 s: every request of a gateway that is lost finds another


class _Gateways:
    """Connections to one gateway, or to several that serve the same model: one is asked until it fails."""

    _connect: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str = "",
        token: str = "",
        retry: Retry | None = None,
    ) -> None:
        """`credentials` are for TLS, `server_name` is what the certificate must have in the host's place, and `token`
        says to the gateway who asks."""
        self._channels = [
            self._connect(one, credentials=credentials, server_name=server_name) for one in addresses_of(address)
        ]
        self._stubs: list[Any] = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._retry, self._token = retry or Retry(), token
        self._index = 0  # of the gateway that answered last
        self._retries, self._num_requests, self._lock = RetryBudget(MOST_RETRIES), 0, threading.Lock()

    def _route(self, timeout: float | None, retry: Retry | None = None) -> Route:
        with self._lock:
            self._num_requests += 1
        return Route(retry or self._retry, len(self._stubs), self._index, timeout, pace=self._pace)

    def _pace(self, within_s: float) -> float:
        with self._lock:
            return self._retries.reserve(self._num_requests, time.monotonic(), within_s)


class Client(_Gateways):
    """An asynchronous client of one gateway, or of several that serve the same model: one is asked until it fails.
    Open it inside the running loop and keep it."""

    _connect = staticmethod(connect)

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

    async def info(self, timeout: float | None = None, model: str = "") -> GatewayInfo:
        """What the gateway says of itself, and of a model of several; of several gateways the first that answers. Each
        is asked once."""
        route = self._route(timeout, NO_RETRY)
        while True:
            try:
                answer = await self._stubs[route.index].GetGatewayInfo(
                    pb.GetGatewayInfoRequest(model=model),
                    timeout=route.remaining,
                    metadata=request_metadata(token=self._token),
                )
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(route.failed(from_rpc_error(error)))
            else:
                self._index = route.index
                return decode_info(answer)

    async def generate(
        self,
        prompt: str | GenerationRequest | None = None,
        *,
        timeout: float | None = None,
        traceparent: str = "",
        **options: Any,
    ) -> AsyncGenerator[Part, None]:
        """Yields the parts of all completions as they come, over as many streams as it takes; options as for
        `build_request`. Closing the iterator ends the request."""
        resumption = Resumption(build_request(prompt, **options))
        route = self._route(timeout)
        metadata = request_metadata(traceparent, self._token)
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


_OnStop = Callable[[Callable[[], object]], None]


class SyncClient(_Gateways):
    """The same as Client, without an event loop. Threads may share it."""

    _connect = staticmethod(connect_blocking)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call and the connections."""
        for channel in self._channels:
            channel.close()

    def info(self, timeout: float | None = None, model: str = "") -> GatewayInfo:
        """As of Client."""
        route = self._route(timeout, NO_RETRY)
        while True:
            try:
                answer = self._stubs[route.index].GetGatewayInfo(
                    pb.GetGatewayInfoRequest(model=model),
                    timeout=route.remaining,
                    metadata=request_metadata(token=self._token),
                )
            except grpc.RpcError as error:
                route.failed(from_rpc_error(error))
            else:
                self._index = route.index
                return decode_info(answer)

    def generate(
        self,
        prompt: str | GenerationRequest | None = None,
        *,
        timeout: float | None = None,
        traceparent: str = "",
        **options: Any,
    ) -> Generator[Part, None, None]:
        """Yields the parts of all completions as they come, over as many streams as it takes; options as for
        `build_request`. Closing the iterator ends the request."""
        request = build_request(prompt, **options)
        return Background(lambda on_stop: self.parts(request, timeout, traceparent, on_stop)).items()

    def parts(
        self, request: pb.GenerateRequest, timeout: float | None, traceparent: str, on_stop: _OnStop
    ) -> Iterator[Part]:
        """The parts in the caller's own thread; what ends the waiting is handed to `on_stop`."""
        stopped = threading.Event()
        on_stop(stopped.set)
        resumption, metadata = Resumption(request), request_metadata(traceparent, self._token)
        route = self._route(timeout)
        while not stopped.is_set():
            call = self._stubs[route.index].Generate(resumption.begin(), timeout=route.remaining, metadata=metadata)
            on_stop(call.cancel)
            if stopped.is_set():  # before the call could be cancelled from outside
                call.cancel()
            try:
                for response in call:
                    self._index = route.index
                    route.progressed()
                    if (part := resumption.take(response)) is not None:
                        yield part
                return
            except (grpc.RpcError, OutriderError) as error:
                if resumption.finished or stopped.is_set():
                    return
                wait = route.failed(from_rpc_error(error) if isinstance(error, grpc.RpcError) else error)
            finally:
                call.cancel()
            stopped.wait(wait)


def generate(
    address: str | Sequence[str],
    prompt: str | GenerationRequest | None = None,
    *,
    timeout: float | None = None,
    traceparent: str = "",
    retry: Retry | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    token: str = "",
    **options: Any,
) -> Generator[Part, None, None]:
    """One request of a SyncClient of its own: one connection a call."""
    request = build_request(prompt, **options)

    def iterate(on_stop: _OnStop) -> Iterator[Part]:
        with SyncClient(address, credentials=credentials, server_name=server_name, token=token, retry=retry) as client:
            yield from client.parts(request, timeout, traceparent, on_stop)

    return Background(iterate).items()
