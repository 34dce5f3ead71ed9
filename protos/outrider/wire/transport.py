"""What a FrameStream reads and writes: the two ends of a grpc.aio stream, made alike."""

from __future__ import annotations

from typing import Any, Protocol

import grpc.aio


class FrameTransport(Protocol):
    """One side of a bidirectional stream of frames."""

    async def read(self) -> Any | None:
        """The next frame; None when the peer has ended its side."""

    async def write(self, frame: Any) -> None:
        """Sends a frame; waits while the peer's flow-control window is full."""

    def abort(self) -> None:
        """Ends the stream at once, if this side can."""


class ClientTransport:
    """The client's end: a StreamStreamCall."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> Any | None:
        """The next frame; AioRpcError if the call failed."""
        frame = await self._call.read()
        return None if frame is grpc.aio.EOF else frame

    async def write(self, frame: Any) -> None:
        """Sends a frame."""
        await self._call.write(frame)

    def abort(self) -> None:
        """Cancels the call; the server releases what the stream opened."""
        self._call.cancel()


class ServerTransport:
    """The server's end: a ServicerContext. The stream ends when the handler returns."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> Any | None:
        """The next frame."""
        frame = await self._context.read()
        return None if frame is grpc.aio.EOF else frame

    async def write(self, frame: Any) -> None:
        """Sends a frame."""
        await self._context.write(frame)

    def abort(self) -> None:
        """Nothing: the handler returns or raises, and gRPC ends the call with its status."""
