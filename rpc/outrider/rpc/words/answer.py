"""What is answered: the deltas of a request's completions, and what their last ones sum up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason, TokenOrigin


class TokenLogprob(NamedTuple):
    """One candidate at one position; rank is 1-based. A tuple: a long prompt has hundreds of thousands of them."""

    id: int
    logprob: float
    rank: int


PositionLogprobs = tuple[TokenLogprob, ...]  # the chosen token first, then the most probable ones


@dataclass(slots=True)
class Usage:
    """Counts of tokens of one completion; what an earlier call returned is not counted again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0  # of the request's prediction, in the whole output
    rejected_prediction_tokens: int = 0  # and not in it
    reasoning_tokens: int = 0  # of completion_tokens, where reasoning is told apart


@dataclass(slots=True)
class MethodStats:
    """What one method drafted of a completion."""

    num_drafts: int = 0  # verifications with a token of it
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class SpeculationStats:
    """Sums over the rounds of one completion, under the meanings of vLLM's spec_decode metrics."""

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: tuple[int, ...] = ()
    num_tested_per_position: tuple[int, ...] = ()
    acceptance: AcceptanceRule = AcceptanceRule.AUTO
    overhead_us: int = 0  # of a round, the median
    method: str = ""  # that drafts, or several with commas; empty: no draft, or the gateway is older than the field
    mode: str = ""  # of the last round
    num_rounds_by_mode: Mapping[str, int] = field(default_factory=dict)
    by_method: Mapping[str, MethodStats] = field(default_factory=dict)  # what each method drafted
    num_forced_tokens: int = 0  # that a constraint forced, and were verified: num_draft_tokens does not count them
    num_accepted_forced_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were accepted; 0 without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verification with a draft committed, on average: one and the accepted ones."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What a delta adds to call `index` of a completion: id and name with its first part, then pieces of the JSON
    text of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    num_before: int = 0  # characters of the completion's text that come before it; known in the gateway alone


@dataclass(slots=True)
class GenerationDelta:
    """What one commit adds to one completion. See GenerateResponse in generation.proto."""

    request_id: str
    index: int
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""  # what the model wrote before its answer; no part of the text
    token_ids: tuple[int, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None  # set in the last delta, as are the next three
    stop_reason: str | int | None = None  # the stop string, or the id of the stop token
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    seed: int | None = None  # in a completion's first delta
    model_digest: str = ""  # in a completion's first delta
    near_ties: bool = False  # it has moved to a target whose logits need not be equal to the bit
    prompt_token_ids: tuple[int, ...] = ()  # in a completion's first delta
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    num_reasoning: int = 0  # of token_ids, that are reasoning; known in the gateway alone
    round: Any = None  # the verification behind it, a planner.policy.Round; known in the gateway alone

    @property
    def num_logprobs(self) -> int:
        """The candidates of all its tokens, and of the prompt's."""
        return sum(map(len, self.logprobs)) + sum(map(len, self.prompt_logprobs))
