"""Between the dataclasses of `messages` and protobuf: one encode_x and decode_x for each message of the draft and
target streams, for its parts, and for what a service says of itself. A number that no field can hold raises
ValueError.

At the end stand the tables of which messages travel on which stream in which direction. The framing above them
(`frames`) is written once for all four directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message as Proto

from outrider.rpc.errors import make_status, parse_details
from outrider.rpc.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    DraftInfo,
    DraftMethod,
    DraftTokens,
    Failure,
    FrameHeader,
    Load,
    ModelInfo,
    Open,
    PositionLogprobs,
    PromptLogprobs,
    StepTimings,
    TargetInfo,
    TokenLogprob,
    TokenWeights,
)
from outrider.rpc.sampling_params import (
    BASELINE,
    FinishReason,
    TokenOrigin,
    decode_acceptance,
    decode_default_sampling,
    decode_sampling,
    encode_sampling,
)
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2, generation_pb2, target_pb2


def encode_weights(weights: TokenWeights | None) -> pb.TokenWeights:
    """One position's distribution; none is an empty entry: one-hot."""
    return pb.TokenWeights() if weights is None else pb.TokenWeights(ids=weights.ids, weights=weights.weights)


def decode_weights(message: pb.TokenWeights) -> TokenWeights | None:
    """One position's distribution. Fields of unequal length are kept: the verifier treats them as one-hot."""
    return TokenWeights(message.ids, message.weights) if message.ids or message.weights else None


def encode_position_logprobs(position: PositionLogprobs) -> generation_pb2.PositionLogprobs:
    """One position's candidates. Fields set one by one take a third of the time of a message built and copied."""
    out = generation_pb2.PositionLogprobs()
    add = out.candidates.add
    for token, logprob, rank in position:
        candidate = add()
        candidate.id, candidate.logprob, candidate.rank = token, logprob, rank
    return out


def decode_position_logprobs(message: generation_pb2.PositionLogprobs) -> PositionLogprobs:
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


def encode_piece(message: DraftTokens) -> pb.Piece:
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


def decode_piece(message: pb.Piece) -> DraftTokens:
    """A part of a chain."""
    return DraftTokens(
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


def encode_prompt_logprobs(message: PromptLogprobs) -> target_pb2.PromptLogprobs:
    """Log probabilities of prompt positions."""
    return target_pb2.PromptLogprobs(
        sequence_id=message.sequence_id,
        position=message.position,
        logprobs=map(encode_position_logprobs, message.logprobs),
    )


def decode_prompt_logprobs(message: target_pb2.PromptLogprobs) -> PromptLogprobs:
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


_PLAIN = (
    "name", "digest", "vocab_size", "max_model_len", "num_tokens", "tokenizer_fingerprint", "dtype", "device",
    "batch_invariant", "num_blocks", "block_size", "protocol_major", "protocol_minor",
    "engine", "kernels",
)  # fmt: skip


def encode_model_info(info: ModelInfo) -> generation_pb2.ModelInfo:
    """A model's description."""
    out = generation_pb2.ModelInfo(
        eos_token_ids=info.eos_token_ids, default_sampling=encode_sampling(info.default_sampling)
    )
    for name in _PLAIN:
        setattr(out, name, getattr(info, name))
    return out


def decode_model_info(message: generation_pb2.ModelInfo) -> ModelInfo:
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


Message = Open | Close | Closed | Failure | DraftTokens | Credit | Commit | PromptLogprobs

SLICE_IDS = 4096  # ids of one slice of a long Open: at most 20 KiB, so that one frame serves several sequences
SLICE_BYTES = 16 * 1024  # of one slice of prompt log probabilities
SLOW_BYTES = 4 * SLICE_BYTES  # more than this takes milliseconds to encode or decode, which no event loop has
CANDIDATE_BYTES = 20  # at most, of one TokenLogprob: two 32-bit varints, a float, their tags and the length


@dataclass(frozen=True, slots=True)
class _Row:
    """One kind of message: its field in the oneof and how it is encoded and decoded."""

    field: str
    encode: Callable[[Any], Proto]
    decode: Callable[[Any], Message]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message with its entry of a frame, encoded on another thread than the event loop's."""

    message: Message
    entry: Any

    @property
    def sequence_id(self) -> int:
        """Whose message it is."""
        return self.message.sequence_id


@dataclass(frozen=True, slots=True)
class OpenSlice:
    """More ids of an Open; only the assembler sees it."""

    sequence_id: int
    ids: Sequence[int]


_ROWS: dict[type[Any], _Row] = {
    Open: _Row("open", encode_open, decode_open),
    Close: _Row("close", encode_close, decode_close),
    Closed: _Row("closed", encode_closed, decode_closed),
    Failure: _Row("failure", encode_failure, decode_failure),
    DraftTokens: _Row("piece", encode_piece, decode_piece),
    Credit: _Row("credit", encode_credit, decode_credit),
    Commit: _Row("commit", encode_commit, decode_commit),
    PromptLogprobs: _Row("prompt_logprobs", encode_prompt_logprobs, decode_prompt_logprobs),
}


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of one kind of stream. `max_lone_bytes` bounds a message that no frame of normal size holds and
    that cannot be sliced (a long schema, the log probabilities of a whole vocabulary): it travels alone."""

    name: str
    commands: bool  # towards a service, as against events from it
    frame: type[Any]
    entry: type[Any]
    oneof: str
    rows: Mapping[type[Any], _Row]
    decoders: Mapping[str, Callable[[Any], Any]]
    max_lone_bytes: int

    def encode(self, message: Message) -> Any:
        """One entry of a frame. TypeError for a message that does not travel this way."""
        row = self.rows.get(type(message))
        if row is None:
            raise TypeError(f"{type(message).__name__} does not travel as {self.name}")
        return self.entry(**{row.field: row.encode(message)})

    def encode_slow(self, message: Message) -> Message | Encoded:
        """Encodes what would hold up an event loop; from any thread. Anything else, and what is sliced, is left."""
        slow = type(message) is Commit and sum(map(_position_bytes, message.logprobs)) > SLOW_BYTES
        return Encoded(message, self.encode(message)) if slow else message

    def decode(self, entry: Any) -> Message | OpenSlice | None:
        """The message of an entry; None for a kind that a newer peer may send."""
        kind = entry.WhichOneof(self.oneof)
        return None if kind is None else self.decoders[kind](getattr(entry, kind))

    def build(self, header: FrameHeader, entries: Sequence[Any]) -> Any:
        """A whole frame."""
        return self.frame(header=encode_header(header), messages=entries)

    def slices(self, message: Message) -> Iterator[Any] | None:
        """The entries of a message too long for one; None for one that is short enough."""
        if type(message) is Open and len(message.prompt_ids) + len(message.output_ids) > SLICE_IDS:
            return _open_slices(self.entry, message)
        if type(message) is PromptLogprobs and sum(map(_position_bytes, message.logprobs)) > SLICE_BYTES:
            return _logprobs_slices(self.entry, message)
        return None


def _decode_open_slice(message: pb.OpenSlice) -> OpenSlice:
    return OpenSlice(message.sequence_id, message.ids)


def _open_slices(entry: type[Any], message: Open) -> Iterator[Any]:
    yield entry(open=encode_open(message, with_ids=False))
    ids = message.prompt_ids + message.output_ids
    for start in range(0, len(ids), SLICE_IDS):
        yield entry(open_slice=pb.OpenSlice(sequence_id=message.sequence_id, ids=ids[start : start + SLICE_IDS]))


def _logprobs_slices(entry: type[Any], message: PromptLogprobs) -> Iterator[Any]:
    start = 0
    while start < len(message.logprobs):
        end, size = start, 0
        while end < len(message.logprobs) and (end == start or size <= SLICE_BYTES):
            size += _position_bytes(message.logprobs[end])
            end += 1
        part = PromptLogprobs(message.sequence_id, message.position + start, message.logprobs[start:end])
        yield entry(prompt_logprobs=encode_prompt_logprobs(part))
        start = end


def _position_bytes(position: PositionLogprobs) -> int:
    return 6 + CANDIDATE_BYTES * len(position)


def _direction(
    frame: type[Any], entry: type[Any], oneof: str, kinds: tuple[type[Any], ...], max_lone_bytes: int
) -> Direction:
    rows = {kind: _ROWS[kind] for kind in kinds}
    decoders: dict[str, Callable[[Any], Any]] = {row.field: row.decode for row in rows.values()}
    if Open in rows:
        decoders["open_slice"] = _decode_open_slice
    return Direction(entry.__name__, Open in rows, frame, entry, oneof, rows, decoders, max_lone_bytes)


@dataclass(frozen=True, slots=True)
class StreamKind:
    """Both directions of one kind of stream, and its service's name."""

    service: str
    commands: Direction
    events: Direction


_MIB = 1 << 20
DRAFT_STREAM = StreamKind(
    "outrider.v1.DraftService",
    _direction(draft_pb2.ProposeRequest, draft_pb2.DraftCommand, "command", (Open, Commit, Credit, Close), 2 * _MIB),
    _direction(draft_pb2.ProposeResponse, draft_pb2.DraftEvent, "event", (DraftTokens, Closed, Failure), 2 * _MIB),
)
TARGET_STREAM = StreamKind(
    "outrider.v1.TargetService",
    _direction(
        target_pb2.VerifyRequest, target_pb2.TargetCommand, "command", (Open, DraftTokens, Credit, Close), 2 * _MIB
    ),
    # Log probabilities of a whole vocabulary take 2 to 3 MB a position.
    _direction(
        target_pb2.VerifyResponse,
        target_pb2.TargetEvent,
        "event",
        (Commit, PromptLogprobs, Closed, Failure),
        60 * _MIB,
    ),
)
