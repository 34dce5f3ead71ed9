"""An LLM without engines of its own: it asks a gateway that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any

from outrider.client import Client, Part, SpeculationStats
from outrider.gateway.generation import GenerationDelta, GenerationRequest, SpeculationOptions, Usage
from outrider.gateway.rounds import SpeculationTally
from outrider.gateway.tokenizer import Tokenizer
from outrider.llm.arguments import EngineArguments
from outrider.llm.checks import is_int
from outrider.llm.config import SpeculativeConfig, check_names
from outrider.llm.errors import Unsupported
from outrider.llm.methods import NGRAM_NAMES, named_method
from outrider.llm.runtime import LoopThread
from outrider.llm.sampling_params import NO_BOUND
from outrider.wire.messages import ModelInfo
from outrider.wire.validate import MAX_DRAFT_TOKENS

INFO_S = 10.0
MAX_CALLS = 64  # at once; a gateway refuses what it cannot queue
# Keywords that this process decides; all others are the services' own.
OWN = (
    "gateway",
    "tokenizer",
    "seed",
    "max_logprobs",
    "logprobs_mode",
    "disable_log_stats",
    "generation_config",
    "override_generation_config",
    "per_request_spec_decode_metrics",
    "acceptance",
    "mode",
)


@dataclass(frozen=True, slots=True)
class AttachedBackend:
    """A gateway behind an address."""

    runtime: LoopThread
    client: Client
    tokenizer: Tokenizer | None
    info: ModelInfo
    num_draft_tokens: int  # the gateway's own k
    speculation: SpeculationOptions
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))

    def encode(self, text: str) -> None:
        """The gateway's own tokenizer does."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of a request. Called on the loop."""
        request = self._bounded(request)
        parts = self.client.generate(
            request.text,
            token_ids=request.token_ids,
            messages=request.messages,
            add_generation_prompt=request.add_generation_prompt,
            sampling=request.sampling,
            n=request.n,
            speculate=request.speculation.enabled,
            num_draft_tokens=request.speculation.num_draft_tokens,
            method=request.speculation.method,
            acceptance=request.speculation.acceptance,
            mode=request.speculation.mode,
            request_id=request.request_id,
            priority=request.priority,
            salt=request.salt,
        )
        async with self._room, aclosing(parts):
            async for part in parts:
                yield _delta_of(part)

    def cache_usage(self) -> float | None:
        """The target's own business."""
        return None

    def reset_prefix_cache(self) -> None:
        """Not from here."""
        raise Unsupported("reset_prefix_cache: the cache is the target service's")

    def close(self) -> None:
        """Ends the connection and the loop."""
        if not self.runtime.loop.is_closed():
            self.runtime.run(self.client.close())
        self.runtime.close()

    def _bounded(self, request: GenerationRequest) -> GenerationRequest:
        """A gateway refuses more tokens than the context leaves; here, as in vLLM, they are just not generated."""
        sampling, ids = request.sampling, request.token_ids
        if sampling is None:
            return request
        if ids is None and request.text is not None and self.tokenizer is not None:
            ids = tuple(self.tokenizer.encode(request.text))
        if ids is not None:
            room = max(1, self.info.max_model_len - len(ids))
            return replace(request, sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)))
        if sampling.max_tokens == NO_BOUND:
            raise ValueError("max_tokens=None needs the prompt's length: give LLM(tokenizer=...), or token ids")
        return request


def attach(
    runtime: LoopThread, arguments: EngineArguments, config: SpeculativeConfig | Mapping[str, Any] | None
) -> AttachedBackend:
    """Connects. `config` is the speculative configuration."""
    given = {entry.name for entry in fields(arguments) if getattr(arguments, entry.name) != entry.default}
    if foreign := sorted(given - set(OWN)):
        raise Unsupported(f"LLM(gateway=...): the services behind the gateway decide {', '.join(foreign)}")
    if arguments.per_request_spec_decode_metrics == "detailed":
        raise Unsupported("LLM(gateway=...): per_request_spec_decode_metrics is 'none' or 'summary' over a gateway")
    speculation = spoken(config, arguments.mode or "")
    address = arguments.gateway or ""

    async def connect() -> Client:
        return Client(address)

    client = runtime.run(connect())
    try:
        info = runtime.run(client.info(INFO_S))
    except BaseException:
        runtime.run(client.close())
        raise
    tokenizer = None if arguments.tokenizer is None else Tokenizer.load(arguments.tokenizer)
    return AttachedBackend(runtime, client, tokenizer, info.target, info.num_draft_tokens, speculation)


def spoken(config: SpeculativeConfig | Mapping[str, Any] | None, mode: str = "") -> SpeculationOptions:
    """What a request can say of speculation; the draft service decides the rest."""
    if isinstance(config, SpeculativeConfig):
        raise Unsupported("LLM(gateway=...): give speculative_config as a dict of method and num_speculative_tokens")
    given = dict(config or {})
    check_names(given)
    if given.get("model") in NGRAM_NAMES and given.setdefault("method", "ngram") in NGRAM_NAMES:
        del given["model"]
    method, k = named_method(given.pop("method", None)) or "", given.pop("num_speculative_tokens", None)
    if k is not None and not (is_int(k) and 0 <= k <= MAX_DRAFT_TOKENS):
        raise ValueError(f"num_speculative_tokens must be 0 to {MAX_DRAFT_TOKENS}, got {k!r:.100}")
    if given:
        raise Unsupported(
            f"LLM(gateway=...): the draft service decides {', '.join(given)}; a request says method and "
            "num_speculative_tokens"
        )
    return SpeculationOptions(method="ngram" if method in NGRAM_NAMES else method, num_draft_tokens=k, mode=mode)


def _delta_of(part: Part) -> GenerationDelta:
    stop: dict[str, Any] = {}
    if isinstance(part.stop_reason, str):
        stop["stop_string"] = part.stop_reason
    elif part.stop_reason is not None:
        stop["stop_token_id"] = part.stop_reason
    usage = part.usage
    return GenerationDelta(
        part.request_id,
        part.index,
        text=part.text,
        token_ids=part.token_ids,
        origins=part.origins,
        logprobs=part.logprobs,
        finish_reason=part.finish_reason,
        usage=None if usage is None else Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        tally=None if part.speculation is None else _tally_of(part.speculation),
        seed=part.seed,
        model_digest=part.model_digest,
        near_ties=part.near_ties,
        prompt_token_ids=part.prompt_token_ids,
        prompt_logprobs=part.prompt_logprobs,
        **stop,
    )


def _tally_of(stats: SpeculationStats) -> SpeculationTally:
    return SpeculationTally(
        num_rounds=stats.num_rounds,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        accepted_per_position=list(stats.num_accepted_per_position),
        tested_per_position=list(stats.num_tested_per_position),
    )
