"""Between the dataclasses of `messages` and protobuf: a Codec for each message of the draft and target streams, for its
parts, and for what a service says of itself; most follow from the fields' names. A number that no field can hold
raises ValueError. At the end stand the tables of which messages travel on which stream in which direction; the framing
above them (`frames`) is written once for all four directions."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from outrider.rpc.field_codec import Codec, by_fields, each, unless
from outrider.rpc.generation_codec import FINISH, POSITIONS
from outrider.rpc.media import Media
from outrider.rpc.messages import (
    Adapter,
    Close,
    Closed,
    Commit,
    Credit,
    DraftInfo,
    DraftMethod,
    DraftTokens,
    DraftTrial,
    DraftVocabulary,
    Failure,
    FrameHeader,
    LearnedDraft,
    LearningNews,
    Lesson,
    Load,
    ModelInfo,
    Open,
    PromptLogprobs,
    PutLearned,
    Reloaded,
    StepTimings,
    TargetInfo,
    TokenWeights,
)
from outrider.rpc.sampling_codec import decode_acceptance, decode_default_sampling, decode_sampling, encode_sampling
from outrider.rpc.status import make_status, parse_details
from outrider.rpc.words.answer import PositionLogprobs
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.rpc.words.sampling_params import BASELINE, AcceptanceRule, TokenOrigin
from outrider.rpc.words.structured import Reasoning
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2, generation_pb2, learning_pb2, target_pb2


def _encode_weights(weights: TokenWeights | None) -> pb.TokenWeights:
    """One position's distribution; none is an empty entry: one-hot."""
    return pb.TokenWeights() if weights is None else pb.TokenWeights(ids=weights.ids, weights=weights.weights)


def _decode_weights(message: pb.TokenWeights) -> TokenWeights | None:
    """One position's distribution. Fields of unequal length are kept: the verifier treats them as one-hot."""
    return TokenWeights(message.ids, message.weights) if message.ids or message.weights else None


def _encode_failure(message: Failure) -> pb.Failure:
    """One sequence's error as a google.rpc.Status with ErrorInfo and RetryInfo."""
    status = make_status(message.code, message.message, message.reason, message.retry_after_ms)
    return pb.Failure(sequence_id=message.sequence_id, status=status)


def _decode_failure(message: pb.Failure) -> Failure:
    status = message.status
    reason, retry_after_ms, _ = parse_details(status)
    return Failure(message.sequence_id, status.code, status.message, reason, retry_after_ms)


def _encode_open(message: Open) -> pb.Open:
    """An Open, with how many ids it has: they may travel in slices."""
    out = _OPEN.encode(message)
    _count_ids(out, message)
    return out


def _count_ids(out: pb.Open, message: Open) -> None:
    out.num_prompt_ids, out.num_output_ids = len(message.prompt_ids), len(message.output_ids)
    out.num_prediction_ids = len(message.prediction)


def _encode_credit(message: Credit) -> pb.Credit:
    """Written out: every round has two."""
    return pb.Credit(
        sequence_id=message.sequence_id,
        until=message.until,
        max_window=message.max_window,
        patience_ms=message.patience_ms,
        max_branches=message.max_branches,
    )


def _encode_header(header: FrameHeader) -> pb.FrameHeader:
    """Written out, as is its reading: every frame has one."""
    return pb.FrameHeader(
        number=header.number,
        last_seen=header.last_seen,
        held_us=header.held_us,
        step_age_ms=header.step_age_ms,
        draining=header.draining,
        info_version=header.info_version,
    )


def _decode_header(message: pb.FrameHeader) -> FrameHeader:
    return FrameHeader(
        message.number,
        message.last_seen,
        message.held_us,
        message.step_age_ms,
        message.draining,
        message.info_version,
    )


def _decode_commit(message: pb.Commit) -> Commit:
    """Written out: every round has one."""
    said, load = message.timings, message.load
    timings = StepTimings(
        said.queue_us, said.verify_us, said.sample_us, said.num_rows, said.num_sequences, said.draft_us, said.mask_us,
        said.compile_us, said.num_woken,
    )  # fmt: skip
    commit = Commit(
        message.sequence_id,
        message.position,
        tuple(message.ids),
        tuple([_ORIGINS.get(number) or TokenOrigin(number) for number in message.origins]),
        message.chain if message.HasField("chain") else None,
        message.num_drafted,
        message.num_accepted,
        POSITIONS.decode(message.logprobs) if message.logprobs else (),
        FINISH.decode(message.finish_reason),
        message.stop_token_id if message.HasField("stop_token_id") else None,
        tuple(message.dropped) if message.dropped else (),
        timings,
        Load(load.running, load.waiting, load.free_blocks),
        message.num_cached_ids,
        message.num_forced,
    )
    commit.encoded = message
    return commit


def _relayed_piece(part: pb.Piece) -> DraftTokens:
    """A piece that is passed on: its lists stay as they came. A part of a frame would keep all of it."""
    message = pb.Piece()
    message.CopyFrom(part)
    parent = message.parent if message.HasField("parent") else None
    ids: Any = message.ids
    weights: Any = message.weights
    parents: Any = message.parents
    piece = DraftTokens(
        message.sequence_id, message.chain, message.position, ids, weights, parent, message.more, parents,
        message.draft_us, message.method,
    )  # fmt: skip
    piece.encoded = message
    return piece


def _as_it_came(codec: Codec[Any, Any]) -> Codec[Any, Any]:
    """What was received is passed on without being encoded again."""
    encode = codec.encode
    return Codec(lambda message: encode(message) if message.encoded is None else message.encoded, codec.decode)


_ORIGINS = {int(origin): origin for origin in TokenOrigin}
_OPEN_RULE: Codec[AcceptanceRule, int] = Codec(int, lambda number: decode_acceptance(number, "open.acceptance"))
_OPEN_SAMPLING = Codec(encode_sampling, partial(decode_sampling, prefix="open.sampling."))
_REASONING_FIELDS = by_fields(Reasoning, pb.Reasoning)
_REASONING: Codec[Any, Any] = Codec(
    _REASONING_FIELDS.encode, lambda message: _REASONING_FIELDS.decode(message) if message.ByteSize() else None
)
_MEDIA: Codec[Media, pb.MediaInfo] = Codec(
    lambda media: pb.MediaInfo(mime_type=media.mime_type, num_bytes=len(media.data), sha256=media.digest),
    lambda info: Media(info.mime_type, b"", info.sha256),  # the bytes come in slices
)
_CAPABILITIES: Codec[tuple[str, ...], Iterable[str]] = Codec(tuple, lambda names: tuple(names) or BASELINE)
_STEP_COST: Codec[tuple[int, int], pb.StepCost] = Codec(
    lambda cost: pb.StepCost(num_rows=cost[0], step_us=cost[1]), lambda cost: (cost.num_rows, cost.step_us)
)

# A message's codec says no more than what is not plain. Open and Failure are not of their dataclasses' fields alone.
HEADER = Codec(_encode_header, _decode_header)
LOAD = by_fields(Load, pb.Load)
TIMINGS = by_fields(StepTimings, pb.StepTimings)
_OPEN = by_fields(
    Open, pb.Open, sampling=_OPEN_SAMPLING, acceptance=_OPEN_RULE, reasoning=_REASONING, media=each(_MEDIA)
)
OPEN = Codec(_encode_open, _OPEN.decode)
CLOSE = by_fields(Close, pb.Close)
CLOSED = by_fields(Closed, pb.Closed)
FAILURE = Codec(_encode_failure, _decode_failure)
PIECE = _as_it_came(by_fields(DraftTokens, pb.Piece, weights=each(Codec(_encode_weights, _decode_weights))))
CREDIT = Codec(_encode_credit, by_fields(Credit, pb.Credit).decode)
PROMPT_LOGPROBS = by_fields(PromptLogprobs, target_pb2.PromptLogprobs, logprobs=POSITIONS)
_COMMIT = by_fields(
    Commit,
    pb.Commit,
    origins=each(Codec(int, TokenOrigin)),
    logprobs=POSITIONS,
    finish_reason=FINISH,
    timings=unless(StepTimings(), TIMINGS),
    load=unless(Load(), LOAD),
)
COMMIT = _as_it_came(Codec(_COMMIT.encode, _decode_commit))
MODEL_INFO = by_fields(
    ModelInfo, generation_pb2.ModelInfo, default_sampling=Codec(encode_sampling, decode_default_sampling)
)
_METHODS = each(by_fields(DraftMethod, pb.DraftMethod, step_costs=each(_STEP_COST)))
LEARNED = by_fields(LearnedDraft, learning_pb2.LearnedDraft)
DRAFT_INFO = by_fields(
    DraftInfo,
    draft_pb2.GetDraftInfoResponse,
    model=MODEL_INFO,
    methods=_METHODS,
    vocabularies=each(by_fields(DraftVocabulary, draft_pb2.DraftVocabulary)),
    capabilities=_CAPABILITIES,
    learned=each(LEARNED),
)
_IDS: Codec[Sequence[int], Iterable[int]] = Codec(lambda ids: ids, lambda ids: array("I", ids))  # 4 bytes each
LESSON = by_fields(
    Lesson,
    learning_pb2.Lesson,
    prompt_ids=_IDS,
    output_ids=_IDS,
    sampling=Codec(encode_sampling, partial(decode_sampling, prefix="lesson.sampling.")),
    acceptance=Codec(int, lambda number: decode_acceptance(number, "lesson.acceptance")),
)
LEARNING_NEWS = by_fields(LearningNews, learning_pb2.LearnResponse, lessons=each(LESSON), learned=each(LEARNED))
PUT_LEARNED = by_fields(PutLearned, learning_pb2.PutLearnedResponse)
ADAPTER = by_fields(Adapter, generation_pb2.Adapter)
DRAFT_TRIAL = by_fields(DraftTrial, generation_pb2.DraftTrial)
RELOADED = by_fields(Reloaded, draft_pb2.ReloadModelResponse, before=MODEL_INFO, after=MODEL_INFO)
RELOADED_WEIGHTS = by_fields(Reloaded, target_pb2.ReloadWeightsResponse, before=MODEL_INFO, after=MODEL_INFO)
TARGET_INFO = by_fields(
    TargetInfo,
    target_pb2.GetTargetInfoResponse,
    model=MODEL_INFO,
    load=LOAD,
    step_costs=each(_STEP_COST),
    capabilities=_CAPABILITIES,
    methods=_METHODS,
    adapters=each(ADAPTER),
    trials=each(DRAFT_TRIAL),
    expert_costs=by_fields(ExpertCosts, target_pb2.ExpertCosts),
    learned=each(LEARNED),
)


Message = Open | Close | Closed | Failure | DraftTokens | Credit | Commit | PromptLogprobs

SLICE_IDS = 4096  # ids of one slice of a long Open: at most 20 KiB, so that one frame serves several sequences
SLICE_BYTES = 16 * 1024  # of one slice of prompt log probabilities
MEDIA_SLICE_BYTES = 24 * 1024  # of one slice of pictures: two fit a frame
SLOW_BYTES = 4 * SLICE_BYTES  # more than this takes milliseconds to encode or decode, which no event loop has
CANDIDATE_BYTES = 20  # at most, of one TokenLogprob: two 32-bit varints, a float, their tags and the length


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of message: its field in the oneof, and its codec."""

    field: str
    codec: Codec[Any, Any]


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
    """More ids of an Open, or bytes of its media; only the assembler sees it."""

    sequence_id: int
    ids: Sequence[int]
    media: bytes = b""


_ROWS: dict[type[Any], Row] = {
    Open: Row("open", OPEN),
    Close: Row("close", CLOSE),
    Closed: Row("closed", CLOSED),
    Failure: Row("failure", FAILURE),
    DraftTokens: Row("piece", PIECE),
    Credit: Row("credit", CREDIT),
    Commit: Row("commit", COMMIT),
    PromptLogprobs: Row("prompt_logprobs", PROMPT_LOGPROBS),
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
    rows: Mapping[type[Any], Row]
    decoders: Mapping[str, Callable[[Any], Any]]
    max_lone_bytes: int

    def encode(self, message: Message, sequence_id: int | None = None) -> Any:
        """One entry of a frame, of the message's own sequence or of another. TypeError for a message that does not
        travel this way."""
        row = self.rows.get(type(message))
        if row is None:
            raise TypeError(f"{type(message).__name__} does not travel as {self.name}")
        entry = self.entry(**{row.field: row.codec.encode(message)})
        if sequence_id is not None:
            getattr(entry, row.field).sequence_id = sequence_id
        return entry

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
        return self.frame(header=HEADER.encode(header), messages=entries)

    def slices(self, message: Message) -> Iterator[Any] | None:
        """The entries of a message too long for one; None for one that is short enough."""
        if type(message) is Open and (message.media or sum(map(len, ids_of(message))) > SLICE_IDS):
            return _open_slices(self.entry, message)
        if type(message) is PromptLogprobs and sum(map(_position_bytes, message.logprobs)) > SLICE_BYTES:
            return _logprobs_slices(self.entry, message)
        return None


def ids_of(message: Open) -> tuple[tuple[int, ...], ...]:
    """What of an Open may travel in slices, in that order."""
    return message.prompt_ids, message.output_ids, message.prediction


def _decode_open_slice(message: pb.OpenSlice) -> OpenSlice:
    return OpenSlice(message.sequence_id, message.ids, message.media)


def _open_slices(entry: type[Any], message: Open) -> Iterator[Any]:
    head = _OPEN.encode(replace(message, prompt_ids=(), output_ids=(), prediction=()))
    _count_ids(head, message)
    yield entry(open=head)
    ids = tuple(chain.from_iterable(ids_of(message)))
    for start in range(0, len(ids), SLICE_IDS):
        yield entry(open_slice=pb.OpenSlice(sequence_id=message.sequence_id, ids=ids[start : start + SLICE_IDS]))
    for media in message.media:
        for start in range(0, len(media.data), MEDIA_SLICE_BYTES):
            part = media.data[start : start + MEDIA_SLICE_BYTES]
            yield entry(open_slice=pb.OpenSlice(sequence_id=message.sequence_id, media=part))


def _logprobs_slices(entry: type[Any], message: PromptLogprobs) -> Iterator[Any]:
    start = 0
    while start < len(message.logprobs):
        end, size = start, 0
        while end < len(message.logprobs) and (end == start or size <= SLICE_BYTES):
            size += _position_bytes(message.logprobs[end])
            end += 1
        part = PromptLogprobs(message.sequence_id, message.position + start, message.logprobs[start:end])
        yield entry(prompt_logprobs=PROMPT_LOGPROBS.encode(part))
        start = end


def _position_bytes(position: PositionLogprobs) -> int:
    return 6 + CANDIDATE_BYTES * len(position)


def _direction(
    frame: type[Any], entry: type[Any], oneof: str, kinds: tuple[type[Any], ...], max_lone_bytes: int
) -> Direction:
    rows = {kind: _ROWS[kind] for kind in kinds}
    decoders: dict[str, Callable[[Any], Any]] = {row.field: row.codec.decode for row in rows.values()}
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
# As a gateway reads it: of a piece it needs no more than where it belongs.
RELAYED_DRAFT_STREAM = replace(
    DRAFT_STREAM,
    events=replace(DRAFT_STREAM.events, decoders={**DRAFT_STREAM.events.decoders, "piece": _relayed_piece}),
)
