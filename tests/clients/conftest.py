"""Draft, target and two gateways as processes, started once."""

from __future__ import annotations

from support.services import build, fleet

__all__ = ["build", "fleet"]
