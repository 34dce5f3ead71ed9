"""What a service says of itself, between dataclass and protobuf."""

from __future__ import annotations

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2, target_pb2
from outrider.wire.capabilities import BASELINE
from outrider.wire.codec_parts import decode_load, encode_load
from outrider.wire.codec_sampling import decode_default_sampling, encode_sampling
from outrider.wire.messages import DraftInfo, DraftMethod, ModelInfo, TargetInfo

_PLAIN = (
    "name", "digest", "vocab_size", "max_model_len", "num_tokens", "tokenizer_fingerprint", "dtype", "device",
    "batch_invariant", "num_blocks", "block_size", "protocol_major", "protocol_minor",
    "engine", "kernels",
)  # fmt: skip


def encode_model_info(info: ModelInfo) -> pb.ModelInfo:
    """A model's description."""
    out = pb.ModelInfo(eos_token_ids=info.eos_token_ids, default_sampling=encode_sampling(info.default_sampling))
    for name in _PLAIN:
        setattr(out, name, getattr(info, name))
    return out


def decode_model_info(message: pb.ModelInfo) -> ModelInfo:
    """A model's description."""
    return ModelInfo(
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=decode_default_sampling(message.default_sampling),
        **{name: getattr(message, name) for name in _PLAIN},
    )


def encode_draft_method(method: DraftMethod) -> draft_pb2.DraftMethod:
    """One way of drafting."""
    return draft_pb2.DraftMethod(
        name=method.name, needs_features=method.needs_features, can_run_ahead=method.can_run_ahead
    )


def decode_draft_method(message: draft_pb2.DraftMethod) -> DraftMethod:
    """One way of drafting."""
    return DraftMethod(message.name, message.needs_features, message.can_run_ahead)


def encode_draft_info(info: DraftInfo) -> draft_pb2.GetDraftInfoResponse:
    """The answer of GetDraftInfo."""
    return draft_pb2.GetDraftInfoResponse(
        model=encode_model_info(info.model),
        methods=[encode_draft_method(method) for method in info.methods],
        capabilities=info.capabilities,
    )


def decode_draft_info(message: draft_pb2.GetDraftInfoResponse) -> DraftInfo:
    """The answer of GetDraftInfo."""
    methods = tuple(decode_draft_method(method) for method in message.methods)
    return DraftInfo(decode_model_info(message.model), methods, tuple(message.capabilities) or BASELINE)


def encode_target_info(info: TargetInfo) -> target_pb2.GetTargetInfoResponse:
    """The answer of GetTargetInfo."""
    return target_pb2.GetTargetInfoResponse(
        model=encode_model_info(info.model),
        max_window=info.max_window,
        load=encode_load(info.load),
        step_costs=[target_pb2.StepCost(num_rows=rows, step_us=micros) for rows, micros in info.step_costs],
        capabilities=info.capabilities,
    )


def decode_target_info(message: target_pb2.GetTargetInfoResponse) -> TargetInfo:
    """The answer of GetTargetInfo."""
    costs = tuple((cost.num_rows, cost.step_us) for cost in message.step_costs)
    capabilities = tuple(message.capabilities) or BASELINE
    load = decode_load(message.load)
    return TargetInfo(decode_model_info(message.model), message.max_window, load, costs, capabilities)
