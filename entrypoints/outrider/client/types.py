"""What a gateway answers, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from outrider.rpc.codec import ADAPTER, MODEL_INFO, decode_position_logprobs
from outrider.rpc.messages import Adapter, ModelInfo, PositionLogprobs
from outrider.rpc.sampling_params import AcceptanceRule, FinishReason, TokenOrigin
from outrider.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens of one completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0  # of the request's prediction, in the output
    rejected_prediction_tokens: int = 0  # and not in it
    reasoning_tokens: int = 0  # of completion_tokens, where reasoning is told apart


@dataclass(frozen=True, slots=True)
class MethodStats:
    """What one method drafted of a completion."""

    num_drafts: int  # verifications with a token of it
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Sums over the rounds of one completion."""

    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_per_position: tuple[int, ...]
    num_tested_per_position: tuple[int, ...]
    acceptance: AcceptanceRule
    overhead_us: int
    method: str = ""  # that drafted; empty: no draft was asked, or the gateway is older than the field
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
    """What a part adds to call `index` of a completion: id and name with its first piece, then pieces of the JSON text
    of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What one response adds to one completion. See GenerateResponse in generation.proto."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage | None
    speculation: SpeculationStats | None
    seed: int | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    model_digest: str = ""
    near_ties: bool = False
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""  # what the model wrote before its answer; no part of the text


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """A gateway and its peers; `draft` is None where no draft is in use."""

    target: ModelInfo
    draft: ModelInfo | None
    num_draft_tokens: int
    methods: tuple[str, ...]
    version: str = ""  # of the gateway; empty: it is older than the field
    adapters: tuple[Adapter, ...] = ()  # of the target's model, that a request may name
    media_types: tuple[str, ...] = ()  # of pictures that a request may have; empty: none


def decode_response(response: pb.GenerateResponse) -> Part:
    """One part."""
    stop = response.WhichOneof("stop_reason")
    return Part(
        request_id=response.request_id,
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        origins=tuple(map(TokenOrigin, response.origins)),
        logprobs=tuple(map(decode_position_logprobs, response.logprobs)),
        finish_reason=FinishReason(response.finish_reason) if response.finish_reason else None,
        stop_reason=getattr(response, stop) if stop else None,
        usage=_decode_usage(response.usage) if response.HasField("usage") else None,
        speculation=_decode_stats(response.speculation) if response.HasField("speculation") else None,
        seed=response.seed if response.HasField("seed") else None,
        prompt_token_ids=tuple(response.prompt_token_ids),
        prompt_logprobs=tuple(map(decode_position_logprobs, response.prompt_logprobs)),
        model_digest=response.model_digest,
        near_ties=response.near_ties,
        tool_calls=tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in response.tool_calls),
        reasoning=response.reasoning,
    )


def _decode_usage(usage: pb.Usage) -> Usage:
    return Usage(**{entry.name: getattr(usage, entry.name) for entry in fields(Usage)})


def _decode_stats(stats: pb.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        num_rounds=stats.num_rounds,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_per_position=tuple(stats.num_accepted_per_position),
        num_tested_per_position=tuple(stats.num_tested_per_position),
        acceptance=_decode_rule(stats.acceptance),
        overhead_us=stats.overhead_us,
        method=stats.method,
        mode=stats.mode,
        num_rounds_by_mode=dict(stats.num_rounds_by_mode),
        by_method={
            one.method: MethodStats(one.num_drafts, one.num_draft_tokens, one.num_accepted_tokens)
            for one in stats.by_method
        },
        num_forced_tokens=stats.num_forced_tokens,
        num_accepted_forced_tokens=stats.num_accepted_forced_tokens,
    )


def _decode_rule(number: int) -> AcceptanceRule:
    """A rule that only a newer gateway knows reads as unspecified."""
    return AcceptanceRule(number) if number in set(AcceptanceRule) else AcceptanceRule.AUTO


def decode_info(answer: pb.GetGatewayInfoResponse) -> GatewayInfo:
    """A gateway's description."""
    return GatewayInfo(
        target=MODEL_INFO.decode(answer.target),
        draft=MODEL_INFO.decode(answer.draft) if answer.HasField("draft") else None,
        num_draft_tokens=answer.num_draft_tokens,
        methods=tuple(answer.methods),
        version=answer.version,
        adapters=tuple(map(ADAPTER.decode, answer.adapters)),
        media_types=tuple(answer.media_types),
    )
