"""What the gateway is asked for and what it answers, as frozen dataclasses: the same for gRPC, HTTP and in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from outrider.gateway.rounds import Round, SpeculationTally
from outrider.wire.messages import PositionLogprobs
from outrider.wire.sampling import AcceptanceRule, FinishReason, SamplingParams, TokenOrigin

SLOW_LOGPROBS = 4096  # log probabilities of an answer that take milliseconds to write: not on the event loop

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How to speculate for one request; None and AUTO are the gateway's choice."""

    enabled: bool = True
    num_draft_tokens: int | None = None
    method: str = ""
    acceptance: AcceptanceRule = AcceptanceRule.AUTO
    mode: str = ""  # how far the draft runs ahead; empty: the gateway's default
    greedy_draft: bool = False  # the draft takes its most probable token; accepted as one-hot


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Completions of one prompt; exactly one of text, token_ids and messages is given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    sampling: SamplingParams | None = None  # None: the model's defaults
    max_tokens_given: bool = True  # false: sampling.max_tokens is a default, cut to what the context leaves
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    request_id: str = ""
    n: int = 1
    priority: int = 0
    output_ids: tuple[tuple[int, ...], ...] = ()  # resumes: per completion what the client has
    model_digest: str = ""  # resumes, too: of the model that began; empty: any
    salt: str = ""
    timeout_s: float | None = None  # what remains of the caller's deadline
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one completion; what an earlier call returned is not counted again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """What one commit adds to one completion."""

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None  # set in the last delta, as are the next four
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    tally: SpeculationTally | None = None
    acceptance: AcceptanceRule = AcceptanceRule.AUTO  # beside the tally
    seed: int | None = None  # in a completion's first delta
    model_digest: str = ""  # in a completion's first delta
    near_ties: bool = False  # it has moved to a target whose logits need not be equal to the bit
    prompt_token_ids: tuple[int, ...] = ()  # in the first delta of completion 0, unless the prompt was given as ids
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    round: Round | None = None  # the verification behind it, whole: metrics and the live page read it

    @property
    def num_logprobs(self) -> int:
        """The candidates of all its tokens, and of the prompt's."""
        return sum(map(len, self.logprobs)) + sum(map(len, self.prompt_logprobs))


async def written(num_logprobs: int, write: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `write` makes of that many log probabilities; beside the event loop where they are many."""
    if num_logprobs > SLOW_LOGPROBS:
        return await asyncio.to_thread(write, *arguments, **options)
    return write(*arguments, **options)
