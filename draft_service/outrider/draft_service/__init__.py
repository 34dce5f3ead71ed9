"""The draft service: runs ahead of a target and proposes tokens for many sequences."""

from __future__ import annotations
