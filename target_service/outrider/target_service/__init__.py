"""The target service: verifies drafted tokens in ragged batches and commits only what the target model would have
produced."""

from __future__ import annotations
