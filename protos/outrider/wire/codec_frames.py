"""Which messages travel on which stream in which direction: tables from dataclass to protobuf field and back. The
framing above them is written once for all four directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message as Proto

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2, target_pb2
from outrider.wire import codec
from outrider.wire.messages import (
    Close,
    Closed,
    Commit,
    Credit,
    Failure,
    FrameHeader,
    Open,
    Piece,
    PositionLogprobs,
    PromptLogprobs,
)

Message = Open | Close | Closed | Failure | Piece | Credit | Commit | PromptLogprobs

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
    Open: _Row("open", codec.encode_open, codec.decode_open),
    Close: _Row("close", codec.encode_close, codec.decode_close),
    Closed: _Row("closed", codec.encode_closed, codec.decode_closed),
    Failure: _Row("failure", codec.encode_failure, codec.decode_failure),
    Piece: _Row("piece", codec.encode_piece, codec.decode_piece),
    Credit: _Row("credit", codec.encode_credit, codec.decode_credit),
    Commit: _Row("commit", codec.encode_commit, codec.decode_commit),
    PromptLogprobs: _Row("prompt_logprobs", codec.encode_prompt_logprobs, codec.decode_prompt_logprobs),
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
        return self.frame(header=codec.encode_header(header), messages=entries)

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
    yield entry(open=codec.encode_open(message, with_ids=False))
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
        yield entry(prompt_logprobs=codec.encode_prompt_logprobs(part))
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
    _direction(draft_pb2.ProposeResponse, draft_pb2.DraftEvent, "event", (Piece, Closed, Failure), 2 * _MIB),
)
TARGET_STREAM = StreamKind(
    "outrider.v1.TargetService",
    _direction(target_pb2.VerifyRequest, target_pb2.TargetCommand, "command", (Open, Piece, Credit, Close), 2 * _MIB),
    # Log probabilities of a whole vocabulary take 2 to 3 MB a position.
    _direction(
        target_pb2.VerifyResponse,
        target_pb2.TargetEvent,
        "event",
        (Commit, PromptLogprobs, Closed, Failure),
        60 * _MIB,
    ),
)
