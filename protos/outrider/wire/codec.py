"""The messages of the draft and target streams, between dataclass and protobuf: one encode_x and decode_x a message.
A number that no field can hold raises ValueError."""

from __future__ import annotations

from outrider.v1 import common_pb2 as pb
from outrider.wire.codec_parts import (
    decode_load,
    decode_position_logprobs,
    decode_timings,
    decode_weights,
    encode_load,
    encode_position_logprobs,
    encode_timings,
    encode_weights,
)
from outrider.wire.codec_sampling import decode_acceptance, decode_sampling, encode_sampling
from outrider.wire.errors import make_status, parse_details
from outrider.wire.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    Failure,
    FrameHeader,
    Load,
    Open,
    Piece,
    PromptLogprobs,
    StepTimings,
)
from outrider.wire.sampling import FinishReason, TokenOrigin

_NO_TIMINGS, _NO_LOAD = StepTimings(), Load()


def encode_header(header: FrameHeader) -> pb.FrameHeader:
    """What leads a frame."""
    return pb.FrameHeader(
        number=header.number,
        last_seen=header.last_seen,
        held_us=header.held_us,
        step_age_ms=header.step_age_ms,
        draining=header.draining,
    )


def decode_header(message: pb.FrameHeader) -> FrameHeader:
    """What leads a frame."""
    return FrameHeader(message.number, message.last_seen, message.held_us, message.step_age_ms, message.draining)


def encode_open(message: Open, *, with_ids: bool = True) -> pb.Open:
    """An Open; without its ids if they travel in slices (their numbers are written all the same)."""
    return pb.Open(
        sequence_id=message.sequence_id,
        num_prompt_ids=len(message.prompt_ids),
        num_output_ids=len(message.output_ids),
        prompt_ids=message.prompt_ids if with_ids else (),
        output_ids=message.output_ids if with_ids else (),
        fork_of=message.fork_of,
        completion=message.completion,
        sampling=encode_sampling(message.sampling),
        acceptance=int(message.acceptance),  # type: ignore[arg-type]  # the numbers are the protocol's
        seed=message.seed,
        timeout_ms=message.timeout_ms,
        first_chain=message.first_chain,
        priority=message.priority,
        features=message.features,
        salt=message.salt,
        traceparent=message.traceparent,
        one_hot=message.one_hot,
        method=message.method,
        model_digest=message.model_digest,
        suspect=message.suspect,
    )


def decode_open(message: pb.Open) -> Open:
    """An Open with the ids of its first slice. InvalidArgument for an enum's number that only a newer peer knows."""
    return Open(
        sequence_id=message.sequence_id,
        prompt_ids=tuple(message.prompt_ids),
        output_ids=tuple(message.output_ids),
        sampling=decode_sampling(message.sampling, prefix="open.sampling."),
        fork_of=message.fork_of if message.HasField("fork_of") else None,
        completion=message.completion,
        acceptance=decode_acceptance(message.acceptance, "open.acceptance"),
        seed=message.seed,
        timeout_ms=message.timeout_ms,
        first_chain=message.first_chain,
        priority=message.priority,
        features=message.features,
        salt=message.salt,
        traceparent=message.traceparent,
        one_hot=message.one_hot,
        method=message.method,
        model_digest=message.model_digest,
        suspect=message.suspect,
    )


def encode_close(message: Close) -> pb.Close:
    """The end of a sequence."""
    return pb.Close(sequence_id=message.sequence_id)


def decode_close(message: pb.Close) -> Close:
    """The end of a sequence."""
    return Close(message.sequence_id)


def encode_closed(message: Closed) -> pb.Closed:
    """The answer to a Close."""
    return pb.Closed(sequence_id=message.sequence_id)


def decode_closed(message: pb.Closed) -> Closed:
    """The answer to a Close."""
    return Closed(message.sequence_id)


def encode_failure(message: Failure) -> pb.Failure:
    """One sequence's error as a google.rpc.Status with ErrorInfo and RetryInfo."""
    status = make_status(message.code, message.message, message.reason, message.retry_after_ms)
    return pb.Failure(sequence_id=message.sequence_id, status=status)


def decode_failure(message: pb.Failure) -> Failure:
    """One sequence's error."""
    status = message.status
    reason, retry_after_ms, _ = parse_details(status)
    return Failure(message.sequence_id, status.code, status.message, reason, retry_after_ms)


def encode_piece(message: Piece) -> pb.Piece:
    """A part of a chain."""
    return pb.Piece(
        sequence_id=message.sequence_id,
        chain=message.chain,
        parent=message.parent,
        position=message.position,
        ids=message.ids,
        weights=[encode_weights(weights) for weights in message.weights],
        more=message.more,
        parents=message.parents,
        draft_us=message.draft_us,
    )


def decode_piece(message: pb.Piece) -> Piece:
    """A part of a chain."""
    return Piece(
        sequence_id=message.sequence_id,
        chain=message.chain,
        position=message.position,
        ids=tuple(message.ids),
        weights=tuple(map(decode_weights, message.weights)),
        parent=message.parent if message.HasField("parent") else None,
        more=message.more,
        parents=tuple(message.parents),
        draft_us=message.draft_us,
    )


def encode_credit(message: Credit) -> pb.Credit:
    """How far a peer may go."""
    return pb.Credit(
        sequence_id=message.sequence_id,
        until=message.until,
        max_window=message.max_window,
        patience_ms=message.patience_ms,
        max_branches=message.max_branches,
    )


def decode_credit(message: pb.Credit) -> Credit:
    """How far a peer may go."""
    return Credit(message.sequence_id, message.until, message.max_window, message.patience_ms, message.max_branches)


def encode_prompt_logprobs(message: PromptLogprobs) -> pb.PromptLogprobs:
    """Log probabilities of prompt positions."""
    return pb.PromptLogprobs(
        sequence_id=message.sequence_id,
        position=message.position,
        logprobs=map(encode_position_logprobs, message.logprobs),
    )


def decode_prompt_logprobs(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Log probabilities of prompt positions."""
    return PromptLogprobs(message.sequence_id, message.position, tuple(map(decode_position_logprobs, message.logprobs)))


def encode_commit(message: Commit) -> pb.Commit:
    """Tokens that the target committed."""
    return pb.Commit(
        sequence_id=message.sequence_id,
        position=message.position,
        chain=message.chain,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        ids=message.ids,
        origins=map(int, message.origins),  # type: ignore[arg-type]  # the numbers are the protocol's
        logprobs=map(encode_position_logprobs, message.logprobs),
        features=message.features,
        finish_reason=int(message.finish_reason or 0),  # type: ignore[arg-type]
        stop_token_id=message.stop_token_id,
        dropped=message.dropped,
        timings=None if message.timings == _NO_TIMINGS else encode_timings(message.timings),
        load=None if message.load == _NO_LOAD else encode_load(message.load),
        num_cached_ids=message.num_cached_ids,
    )


def decode_commit(message: pb.Commit) -> Commit:
    """Tokens that the target committed."""
    return Commit(
        sequence_id=message.sequence_id,
        position=message.position,
        ids=tuple(message.ids),
        origins=tuple(map(TokenOrigin, message.origins)),
        chain=message.chain if message.HasField("chain") else None,
        num_drafted=message.num_drafted,
        num_accepted=message.num_accepted,
        logprobs=tuple(map(decode_position_logprobs, message.logprobs)),
        features=message.features,
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        dropped=tuple(message.dropped),
        timings=decode_timings(message.timings) if message.HasField("timings") else _NO_TIMINGS,
        load=decode_load(message.load) if message.HasField("load") else _NO_LOAD,
        num_cached_ids=message.num_cached_ids,
    )
