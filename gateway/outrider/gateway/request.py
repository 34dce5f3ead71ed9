"""What the gateway is asked for and what it answers, as dataclasses: the same for gRPC, HTTP and in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from outrider.gateway.media import MediaSource
from outrider.gateway.text.reasoning import ReasoningOptions
from outrider.gateway.text.tokenizer import LONG_TEXT
from outrider.gateway.text.tools.calls import ToolCallDelta
from outrider.planner.policy import Round, SpeculationTally
from outrider.proposers.registry import split_methods
from outrider.rpc.messages import MAX_N, PositionLogprobs
from outrider.rpc.sampling_params import AcceptanceRule, FinishReason, SamplingParams, TokenOrigin
from outrider.rpc.server_calls import ServerCall

SLOW_LOGPROBS = 4096  # log probabilities of an answer that take milliseconds to write: not on the event loop

TRUNCATION_SIDES = ("left", "right")
SPECULATION_MODES = ("auto", "sequential", "chains", "branches")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How to speculate for one request; None and AUTO are the gateway's choice."""

    enabled: bool = True
    num_draft_tokens: int | None = None
    method: str = ""  # short for methods, with commas between several
    methods: tuple[str, ...] = ()  # that draft in turn; empty: the draft's default
    acceptance: AcceptanceRule = AcceptanceRule.AUTO
    mode: str = ""  # how far the draft runs ahead; empty: the gateway's default
    draft_confidence: float = 0.0  # a draft ends behind a token of which its model is less sure
    greedy_draft: bool = False  # the draft takes its most probable token; accepted as one-hot

    @property
    def named_methods(self) -> tuple[str, ...]:
        """The methods that were asked for, by either field; empty: the draft's default."""
        return self.methods or (split_methods(self.method) if self.method else ())


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Completions of one prompt; exactly one of text, token_ids and messages is given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on with the last message's text
    chat_template: str | None = None  # of the request's own; None: the checkpoint's
    documents: tuple[Any, ...] = ()  # for a template that shows them
    add_special_tokens: bool | None = None  # None: to a text, and not to what a chat template has written
    truncation_side: str = "left"  # of TRUNCATION_SIDES: where sampling.truncate_prompt_tokens cuts
    reasoning: ReasoningOptions | None = None
    sampling: SamplingParams | None = None  # None: the model's defaults
    max_tokens_given: bool = True  # false: sampling.max_tokens is a default, cut to what the context leaves
    prediction: str | tuple[int, ...] | None = None  # a guess at the output, as text or token ids
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    request_id: str = ""
    n: int = 1
    priority: int = 0
    output_ids: tuple[tuple[int, ...], ...] = ()  # resumes: per completion what the client has
    model_digest: str = ""  # resumes, too: of the model that began; empty: any
    model: str = ""  # by name; empty: the one that is served
    adapter: str = ""  # of the model, by name; empty: the model alone
    salt: str = ""
    caller: str = ""  # whom its credential names
    peer: str = ""  # the host that it came from; empty: this process
    timeout_s: float | None = None  # what remains of the caller's deadline
    traceparent: str = ""
    call: ServerCall | None = None  # None: in this process
    tools: tuple[Any, ...] = ()  # in OpenAI's form
    tool_choice: Any = None  # in OpenAI's form: auto, none, required, or a function; None: auto
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    media: tuple[MediaSource, ...] = ()  # the prompt's pictures, in its order
    among_long: bool = False  # other prompts came with it, and all texts together are long

    @property
    def account(self) -> str:
        """Whose share of the room it takes: its credential's, else its salt's, else its host's."""
        named = (("caller", self.caller), ("salt", self.salt), ("peer", self.peer))
        return next((f"{kind} {name}" for kind, name in named if name), "")

    def truncated(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """A prompt's ids that are kept."""
        keep = None if self.sampling is None else self.sampling.truncate_prompt_tokens
        if not isinstance(keep, int) or keep <= 0:  # all, or what the validator finds
            return ids
        return ids[:keep] if self.truncation_side == "right" else ids[-keep:]

    @property
    def num_long_chars(self) -> int:
        """Characters of texts that are tokenised beside the event loop; 0: there are none."""
        prompt, guess = len(self.text or ""), len(self.prediction) if isinstance(self.prediction, str) else 0
        return prompt + guess if self.among_long or max(prompt, guess) > LONG_TEXT else 0

    def least_tokens(self, max_model_len: int) -> int:
        """So many at least are admitted for it, as far as that is known before anything is tokenised; 0 where a number
        is wrong, which is told with all else that is."""
        sampling, n = self.sampling, self.n
        if sampling is None or not (type(n) is int and 1 <= n <= MAX_N):
            return 0
        most, keep = sampling.max_tokens, sampling.truncate_prompt_tokens
        prompt = len(self.token_ids or ()) if keep is None else 0
        known = self.max_tokens_given and type(most) is int and 1 <= most <= max_model_len
        return n * most + prompt if known and prompt < max_model_len else 0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Counts of one completion; what an earlier call returned is not counted again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0  # of the request's prediction, in the whole output
    rejected_prediction_tokens: int = 0  # and not in it
    reasoning_tokens: int = 0  # of the completion's, where reasoning is told apart


@dataclass(slots=True)
class GenerationDelta:
    """What one commit adds to one completion."""

    request_id: str
    index: int
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""  # what the model wrote before its answer; no part of the text
    token_ids: tuple[int, ...] = ()
    num_reasoning: int = 0  # of them, that are reasoning
    origins: tuple[TokenOrigin, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None  # set in the last delta, as are the next four
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: TokenUsage | None = None
    tally: SpeculationTally | None = None
    acceptance: AcceptanceRule = AcceptanceRule.AUTO  # beside the tally
    seed: int | None = None  # in a completion's first delta
    model_digest: str = ""  # in a completion's first delta
    near_ties: bool = False  # it has moved to a target whose logits need not be equal to the bit
    prompt_token_ids: tuple[int, ...] = ()  # in a completion's first delta
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
