"""Turns received frames into whole messages, without I/O, and holds the peer to the rules of the stream: frames
without gaps or repeats, ids that were opened, slices that add up. A broken rule is a ProtocolError, after which the
stream is of no use. What arrives late for a sequence that is over is no error: it is ignored. An Open that asks for
what only a newer peer knows fails that sequence alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.wire.codec import decode_header
from outrider.wire.codec_frames import Direction, Message, OpenSlice
from outrider.wire.errors import InvalidArgument, ProtocolError, to_failure
from outrider.wire.frame_packer import MAX_FRAME_BYTES
from outrider.wire.messages import Close, Closed, Commit, Failure, FrameHeader, Open
from outrider.wire.sequence_table import SequenceState, SequenceTable

Decoded = Message | OpenSlice | InvalidArgument | None  # None: a kind that only a newer peer knows
MAX_OPEN_IDS = 1 << 24  # far above every context length; bounds what a broken peer can make us store


@dataclass(slots=True)
class _PartialOpen:
    """An Open whose slices are still on their way."""

    head: Open
    num_prompt_ids: int
    num_ids: int
    ids: array[int]

    def whole(self) -> Open:
        """The Open with all its ids."""
        count = self.num_prompt_ids
        return replace(self.head, prompt_ids=tuple(self.ids[:count]), output_ids=tuple(self.ids[count:]))


@dataclass(frozen=True, slots=True)
class Received:
    """What one frame brought. `replies` are to be sent back: they concern sequences that the caller never saw."""

    header: FrameHeader
    messages: list[Message] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)


class FrameAssembler:
    """The receiving half of one side of a stream. It shares the table of ids with that side's packer."""

    def __init__(self, direction: Direction, table: SequenceTable | None = None) -> None:
        self.last_number = 0
        self._direction = direction
        self._table = table or SequenceTable()
        self._partial: dict[int, _PartialOpen] = {}

    def decode(self, frame: Any) -> list[Decoded]:
        """What `accept` begins with, for a frame that takes long: it may run on another thread."""
        return [self._decode(entry) for entry in frame.messages]

    def accept(self, frame: Any, decoded: Iterable[Decoded] | None = None) -> Received:
        """The messages of the next frame, in order. ProtocolError if the peer broke a rule. `decoded` is what `decode`
        made of the frame, if it was asked."""
        self._check_size(frame)
        received = Received(decode_header(frame.header))
        if received.header.number != self.last_number + 1:
            raise ProtocolError(f"frame {received.header.number} after frame {self.last_number}")
        self.last_number = received.header.number
        take = self._take_command if self._direction.commands else self._take_event
        try:
            messages = map(self._decode, frame.messages) if decoded is None else decoded
            for message, entry in zip(messages, frame.messages, strict=True):
                if isinstance(message, InvalidArgument):
                    self._refuse(entry.open.sequence_id, message, received)
                elif message is not None:
                    take(message, entry, received)
        except ValueError as error:  # ids opened twice
            raise ProtocolError(f"frame {self.last_number}: {error}") from error
        return received

    def _decode(self, entry: Any) -> Decoded:
        try:
            return self._direction.decode(entry)
        except InvalidArgument as error:
            return error

    def _check_size(self, frame: Any) -> None:
        size = frame.ByteSize()
        limit = MAX_FRAME_BYTES if len(frame.messages) != 1 else self._direction.max_lone_bytes + MAX_FRAME_BYTES
        if size > limit:
            raise ProtocolError(f"a frame of {size} bytes; allowed: at most {limit}")

    def _take_command(self, message: Message | OpenSlice, entry: Any, received: Received) -> None:
        if isinstance(message, Open):
            self._take_open(message, entry.open, received)
            return
        sequence_id = message.sequence_id
        state = self._known_state(sequence_id)
        if isinstance(message, Close):
            self._take_close(message, state, received)
        elif state is not SequenceState.LIVE:
            return
        elif isinstance(message, OpenSlice):
            self._take_slice(message, received)
        elif sequence_id in self._partial:
            raise ProtocolError(f"sequence {sequence_id}: a message before the last slice of its Open")
        else:
            received.messages.append(message)

    def _take_event(self, message: Message | OpenSlice, entry: Any, received: Received) -> None:
        state = self._known_state(message.sequence_id)
        if state is SequenceState.OVER:
            return
        ends = isinstance(message, Closed | Failure) or (
            isinstance(message, Commit) and message.finish_reason is not None
        )
        if state is SequenceState.LIVE and not isinstance(message, OpenSlice):
            received.messages.append(message)
        elif ends:
            # Our Close and the sequence's own end crossed: the caller, who waits for a Closed, gets one.
            received.messages.append(Closed(message.sequence_id))
        if ends:
            self._table.end(message.sequence_id)

    def _known_state(self, sequence_id: int) -> SequenceState:
        state = self._table.state(sequence_id)
        if state is SequenceState.UNKNOWN:
            raise ProtocolError(f"sequence {sequence_id} was never opened")
        return state

    def _take_open(self, head: Open, encoded: Any, received: Received) -> None:
        self._table.open(head.sequence_id)
        num_ids = encoded.num_prompt_ids + encoded.num_output_ids
        if num_ids > MAX_OPEN_IDS:
            raise ProtocolError(f"sequence {head.sequence_id}: {num_ids} ids; allowed: at most {MAX_OPEN_IDS}")
        ids = head.prompt_ids + head.output_ids
        if len(ids) < num_ids:
            self._partial[head.sequence_id] = _PartialOpen(head, encoded.num_prompt_ids, num_ids, array("I", ids))
        elif len(ids) > num_ids or len(head.prompt_ids) != encoded.num_prompt_ids:
            raise ProtocolError(f"sequence {head.sequence_id}: {len(ids)} ids where {num_ids} were announced")
        else:
            received.messages.append(head)

    def _refuse(self, sequence_id: int, error: InvalidArgument, received: Received) -> None:
        """Answers an Open that cannot be read; what follows for its sequence is ignored."""
        self._table.open(sequence_id)
        self._table.close(sequence_id)
        received.replies.append(to_failure(sequence_id, error))

    def _take_slice(self, message: OpenSlice, received: Received) -> None:
        partial = self._partial.get(message.sequence_id)
        if partial is None:
            raise ProtocolError(f"sequence {message.sequence_id}: a slice after the last one")
        partial.ids.extend(message.ids)
        if len(partial.ids) > partial.num_ids:
            raise ProtocolError(f"sequence {message.sequence_id}: more than the {partial.num_ids} ids announced")
        if len(partial.ids) == partial.num_ids:
            del self._partial[message.sequence_id]
            received.messages.append(partial.whole())

    def _take_close(self, message: Close, state: SequenceState, received: Received) -> None:
        if not self._table.close(message.sequence_id):
            return
        if self._partial.pop(message.sequence_id, None) is not None:
            received.replies.append(Closed(message.sequence_id))
        elif state is not SequenceState.CLOSING:
            # Also after the sequence's own end: whoever keeps a finished sequence until its Close lets go now.
            received.messages.append(message)
