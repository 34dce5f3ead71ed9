"""What LLM and its methods refuse, with the reason."""

from __future__ import annotations

from typing import Any

from outrider.llm.errors import Unsupported

NOT_THERE = {
    "encode": "models generate; they do not embed, score or classify",
    "embed": "models generate; they do not embed, score or classify",
    "classify": "models generate; they do not embed, score or classify",
    "score": "models generate; they do not embed, score or classify",
    "reward": "models generate; they do not embed, score or classify",
    "beam_search": "it is no sampling, which is what speculation is exact for",
    "collective_rpc": "there are no workers: the engines are in this process",
    "apply_model": "there are no workers: the engines are in this process",
    "sleep": "close() frees the memory",
    "wake_up": "close() frees the memory",
    "start_profile": "use a profiler of Python, or OpenTelemetry spans",
    "stop_profile": "use a profiler of Python, or OpenTelemetry spans",
}

ARGUMENTS = {
    "lora_request": "adapters are not there yet",
    "prompt_adapter_request": "prompt adapters are not offered",
    "logits_processor": "a callable cannot run at both draft and target",
    "tokenization_kwargs": "use TokensPrompt, or SamplingParams(truncate_prompt_tokens=...)",
    "mm_processor_kwargs": "models take text alone",
}


def refuse(**given: Any) -> None:
    """Raises Unsupported for the first argument that is given."""
    for name, value in given.items():
        if value:
            raise Unsupported(f"{name} is not supported: {ARGUMENTS[name]}")
