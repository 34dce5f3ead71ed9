"""What a vLLM loads to be driven from outside: a scheduler that takes its rows' drafts from somewhere else, a worker
that gives their weights to the sampler, and the empty proposer that makes vLLM verify at all.

`vllm serve MODEL --scheduler-cls outrider.vllm.DraftScheduler --worker-cls outrider.vllm.Worker --speculative-config
'{"method": "custom_class", "model": "outrider.vllm.NoDraft", "num_speculative_tokens": 5}'`

Imports lazily: the names are looked up in processes that have vLLM, and only there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"DraftScheduler": "scheduler", "Worker": "worker", "AdaptedWorker": "worker", "NoDraft": "no_draft"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
