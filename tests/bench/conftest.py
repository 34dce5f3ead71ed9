"""The three services as processes, started once."""

from __future__ import annotations

from support.services import trio

__all__ = ["trio"]
