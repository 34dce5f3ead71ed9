"""What a gateway answers: the types by the names that callers know, and its description of itself."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.rpc.codec import ADAPTER, DRAFT_TRIAL, MODEL_INFO
from outrider.rpc.generation_codec import decode_delta as decode_response
from outrider.rpc.messages import Adapter, DraftTrial, ModelInfo
from outrider.rpc.words.answer import GenerationDelta as Part
from outrider.rpc.words.answer import MethodStats, SpeculationStats, ToolCallDelta, Usage
from outrider.v1 import generation_pb2 as pb

__all__ = [
    "GatewayInfo",
    "MethodStats",
    "Part",
    "SpeculationStats",
    "ToolCallDelta",
    "Usage",
    "decode_info",
    "decode_response",
]


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
    trials: tuple[DraftTrial, ...] = ()  # of the target's methods, and of drafts that it was tried with


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
        trials=tuple(map(DRAFT_TRIAL.decode, answer.trials)),
    )
