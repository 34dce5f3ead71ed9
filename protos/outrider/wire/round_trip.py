"""Estimates the round trip to a peer from frame headers. Clocks need not agree: the peer says how long it held the
last frame it saw, and that is taken off the time that this side measured."""

from __future__ import annotations

from collections import deque

_SMOOTHING = 1 / 8  # as TCP does
_MAX_OUTSTANDING = 1024  # frames; a peer that acknowledges none of so many is measured no more until it does


class RoundTrip:
    """Smoothed and least round trip, in microseconds; 0 before the first measurement."""

    __slots__ = ("_last_received", "_last_received_at", "_sent", "min_us", "smoothed_us")

    def __init__(self) -> None:
        self.smoothed_us = 0.0
        self.min_us = 0.0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_MAX_OUTSTANDING)
        self._last_received = 0
        self._last_received_at = 0.0

    def sending(self, number: int, now: float) -> tuple[int, int]:
        """Notes a frame that leaves; (last_seen, held_us) for its header."""
        self._sent.append((number, now))
        if not self._last_received:
            return 0, 0
        return self._last_received, max(0, round((now - self._last_received_at) * 1e6))

    def received(self, number: int, last_seen: int, held_us: int, now: float) -> None:
        """Notes a frame that arrived. Each of our frames is measured by its first acknowledgement alone: the wait of
        a later one is the peer's idleness."""
        self._last_received, self._last_received_at = number, now
        sent_at = None
        while self._sent and self._sent[0][0] <= last_seen:
            acknowledged, at = self._sent.popleft()
            sent_at = at if acknowledged == last_seen else None
        if sent_at is not None:
            self._add(max(0.0, (now - sent_at) * 1e6 - held_us))

    def _add(self, sample_us: float) -> None:
        first = not self.smoothed_us
        self.smoothed_us = sample_us if first else self.smoothed_us + _SMOOTHING * (sample_us - self.smoothed_us)
        self.min_us = sample_us if first else min(self.min_us, sample_us)
