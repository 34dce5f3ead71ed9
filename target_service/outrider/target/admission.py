"""What a target takes: its limits, and the way from an Open to a sequence, or to a refusal that says why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.engine.blocks import BLOCK_SIZE
from outrider.engine.random_ahead import RandomKey
from outrider.engine.sampling import SequenceSampler
from outrider.engine.sequence import Sequence
from outrider.target.chains import ChainBuffer
from outrider.target.state import SequenceKey, Sink, TargetSequence
from outrider.wire.errors import (
    OTHER_MODEL,
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    Violation,
    to_failure,
)
from outrider.wire.messages import Failure, Open
from outrider.wire.sampling import AcceptanceRule
from outrider.wire.validate import MAX_LOGPROBS, validate_length, validate_open


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What the engine can hold; fixed at start."""

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    num_blocks: int
    block_size: int = BLOCK_SIZE
    max_window: int = 128
    max_sequences: int = 256
    max_logprobs: int = MAX_LOGPROBS  # of a position; -1: as many as the vocabulary has ids
    untrusted_draft: bool = False  # weights are ignored: every drafted token is one-hot
    model_digest: str = ""


class Refused(Exception):
    """An Open that is not taken."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    @classmethod
    def busy(cls, sequence_id: int, max_sequences: int) -> Refused:
        """The target holds as many sequences as it may."""
        error = ResourceExhausted(f"{max_sequences} sequences are open already", reason="BUSY", retry_after_ms=1000)
        return cls(to_failure(sequence_id, error))


def admit(
    message: Open,
    parent: TargetSequence | None,
    key: SequenceKey,
    sink: Sink,
    limits: TargetLimits,
    arrival: int,
    now: float,
) -> TargetSequence:
    """Makes the sequence. A child takes its parent's prompt ids at once. Raises Refused."""
    try:
        whole = _with_prompt(message, parent)
        _check(whole, limits)
        sampler = _sampler(whole, limits)
    except OutriderError as error:
        raise Refused(to_failure(message.sequence_id, error)) from error
    sequence = Sequence([*whole.prompt_ids, *whole.output_ids], salt=whole.salt)
    return TargetSequence(
        key=key,
        open=whole,
        prompt_len=len(whole.prompt_ids),
        sequence=sequence,
        sampler=sampler,
        chains=ChainBuffer(sequence.tokens, limits.vocab_size),
        random_key=RandomKey(whole.seed, whole.completion),
        sink=sink,
        arrival=arrival,
        deadline=now + whole.timeout_ms / 1000 if whole.timeout_ms else None,
        group=(parent.group or parent.key) if parent is not None else key,
        last_commit=now,
        ready_since=now,
    )


def _sampler(message: Open, limits: TargetLimits) -> SequenceSampler:
    sampling, prompt_ids, output_ids = message.sampling, message.prompt_ids, message.output_ids
    try:
        return SequenceSampler(sampling, prompt_ids, output_ids, limits.eos_ids, limits.vocab_size)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


def _with_prompt(message: Open, parent: TargetSequence | None) -> Open:
    if message.fork_of is None:
        return message
    if parent is None:
        raise Unavailable("the sequence to fork is gone; open with the whole prompt", reason="PARENT_GONE")
    return replace(message, prompt_ids=parent.open.prompt_ids, fork_of=None)


def _check(message: Open, limits: TargetLimits) -> None:
    if message.model_digest not in ("", limits.model_digest):  # the gateway took this target for another
        raise Unavailable(
            f"the sequence is of model {message.model_digest[:12]}, this target serves {limits.model_digest[:12]}",
            reason=OTHER_MODEL,
        )
    validate_open(message, limits.vocab_size, limits.max_model_len, limits.max_logprobs)
    validate_length(len(message.prompt_ids), message.sampling.max_tokens, limits.max_model_len, "open.sampling.")
    if len(message.output_ids) >= message.sampling.max_tokens:
        problem = f"has {len(message.output_ids)} entries; allowed: fewer than max_tokens"
        raise InvalidArgument.of([Violation("open.output_ids", problem)])
    if message.sampling.structured_output is not None:
        problem = "is not supported by this target; leave it unset"
        raise InvalidArgument.of([Violation("sampling.structured_output", problem)])
    if message.features:
        raise FailedPrecondition("this target sends no hidden states", reason="NO_FEATURES")
    if message.acceptance not in (AcceptanceRule.REJECTION, AcceptanceRule.COUPLED):
        raise InvalidArgument.of([Violation("acceptance", "is not set; allowed: rejection, coupled")])
    length = len(message.prompt_ids) + message.sampling.max_tokens
    room = limits.num_blocks * limits.block_size
    if length > room:
        raise ResourceExhausted(
            f"prompt and max_tokens are {length} tokens, the key-value cache holds {room}", reason="DOES_NOT_FIT"
        )
