"""The parameters of a call that gives none: what the model's authors recommend."""

from __future__ import annotations

import json
from typing import Any

from outrider.llm.arguments import EngineArguments
from outrider.llm.sampling_params import SamplingParams
from outrider.wire.messages import ModelInfo

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_params(arguments: EngineArguments, info: ModelInfo) -> SamplingParams:
    """generation_config.json, under `override_generation_config`; vLLM's defaults where they say nothing."""
    given: dict[str, Any] = {}
    if arguments.generation_config == "auto":
        given = {name: getattr(info.default_sampling, name) for name in NAMES}
        given["max_new_tokens"] = _max_new_tokens(arguments)
    given |= arguments.override_generation_config or {}
    longest = given.pop("max_new_tokens", None)
    if longest is not None:
        given["max_tokens"] = longest
    return SamplingParams(**given)


def _max_new_tokens(arguments: EngineArguments) -> int | None:
    """It concerns only LLM: a gateway's requests say how long they may get."""
    file = None if arguments.model is None else arguments.model / "generation_config.json"
    if file is None or not file.is_file():
        return None
    longest: int | None = json.loads(file.read_text(encoding="utf-8")).get("max_new_tokens")
    return longest
