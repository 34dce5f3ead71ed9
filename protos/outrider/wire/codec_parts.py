"""Parts of messages, between dataclass and protobuf: distributions, log probabilities, times, load."""

from __future__ import annotations

from outrider.v1 import common_pb2 as pb
from outrider.wire.messages import Load, PositionLogprobs, StepTimings, TokenLogprob, TokenWeights


def encode_weights(weights: TokenWeights | None) -> pb.TokenWeights:
    """One position's distribution; none is an empty entry: one-hot."""
    return pb.TokenWeights() if weights is None else pb.TokenWeights(ids=weights.ids, weights=weights.weights)


def decode_weights(message: pb.TokenWeights) -> TokenWeights | None:
    """One position's distribution. Fields of unequal length are kept: the verifier treats them as one-hot."""
    return TokenWeights(message.ids, message.weights) if message.ids or message.weights else None


def encode_token_logprob(candidate: TokenLogprob) -> pb.TokenLogprob:
    """One candidate."""
    return pb.TokenLogprob(id=candidate.id, logprob=candidate.logprob, rank=candidate.rank)


def decode_token_logprob(message: pb.TokenLogprob) -> TokenLogprob:
    """One candidate."""
    return TokenLogprob(message.id, message.logprob, message.rank)


def encode_position_logprobs(position: PositionLogprobs) -> pb.PositionLogprobs:
    """One position's candidates."""
    return pb.PositionLogprobs(candidates=map(encode_token_logprob, position))


def decode_position_logprobs(message: pb.PositionLogprobs) -> PositionLogprobs:
    """One position's candidates."""
    return tuple(map(decode_token_logprob, message.candidates))


def encode_load(load: Load) -> pb.Load:
    """How busy a target is."""
    return pb.Load(running=load.running, waiting=load.waiting, free_blocks=load.free_blocks)


def decode_load(message: pb.Load) -> Load:
    """How busy a target is."""
    return Load(message.running, message.waiting, message.free_blocks)


def encode_timings(timings: StepTimings) -> pb.StepTimings:
    """One round's times."""
    return pb.StepTimings(
        queue_us=timings.queue_us,
        verify_us=timings.verify_us,
        sample_us=timings.sample_us,
        num_rows=timings.num_rows,
        num_sequences=timings.num_sequences,
    )


def decode_timings(message: pb.StepTimings) -> StepTimings:
    """One round's times."""
    return StepTimings(message.queue_us, message.verify_us, message.sample_us, message.num_rows, message.num_sequences)
