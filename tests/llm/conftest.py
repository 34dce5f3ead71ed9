"""A random pair, loaded once."""

from __future__ import annotations

from support.pairs import llm, tiny_pair

__all__ = ["llm", "tiny_pair"]
