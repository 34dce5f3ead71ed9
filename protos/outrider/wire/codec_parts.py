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


def encode_position_logprobs(position: PositionLogprobs) -> pb.PositionLogprobs:
    """One position's candidates. Fields set one by one take a third of the time of a message built and copied."""
    out = pb.PositionLogprobs()
    add = out.candidates.add
    for token, logprob, rank in position:
        candidate = add()
        candidate.id, candidate.logprob, candidate.rank = token, logprob, rank
    return out


def decode_position_logprobs(message: pb.PositionLogprobs) -> PositionLogprobs:
    """One position's candidates."""
    return tuple([TokenLogprob(entry.id, entry.logprob, entry.rank) for entry in message.candidates])


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
