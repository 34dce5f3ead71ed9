"""The streams that a service has open: each served to its end, all drained together."""

from __future__ import annotations

from outrider.wire.stream import FrameStream


class ServedStreams:
    """What the servicers of target and draft have in common. On the event loop."""

    def __init__(self) -> None:
        self._open: set[FrameStream] = set()
        self._draining = False

    async def serve(self, stream: FrameStream) -> None:
        """Returns when the stream has ended."""
        self._open.add(stream)
        try:
            async with stream:
                if self._draining:
                    stream.drain()
                await stream.wait_closed()
        finally:
            self._open.discard(stream)

    def drain(self) -> None:
        """No new sequences; every stream ends after its last one."""
        self._draining = True
        for stream in self._open:
            stream.drain()
