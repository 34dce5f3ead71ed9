"""What crosses a process: messages, codec, frames, streams, errors, servers, channels and traces. No torch."""

from __future__ import annotations
