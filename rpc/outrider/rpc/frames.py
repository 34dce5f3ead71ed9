"""The framing of the draft and target streams, without I/O: `FramePacker` makes frames of at most 64 KiB out of
messages, `FrameAssembler` makes messages of frames. The two of one side share a `SequenceTable`.

The packer. Short messages leave first, in the order they were pushed. Long ones (an Open with many ids or with media,
log probabilities of a prompt) leave in slices, round robin, in what room a frame has left. A sequence that still has
slices to send has a *lane*, in which its later messages wait, so that messages of one sequence keep their order. A
Close discards what its sequence has not sent, unless that ends with its last commit, from which a draft learns. An Open
of which nothing was sent vanishes with it, and the caller finds the id in `vanished`: nobody else will answer that
Close. A fork waits for its parent's whole Open, and a parent's Close for the Opens of its forks, which name an unclosed
sequence.

The assembler holds the peer to the rules of the stream: frames without gaps or repeats, ids that were opened, slices
that add up. A broken rule is a ProtocolError, after which the stream is of no use. What arrives late for a sequence
that is over is no error: it is ignored. An Open that asks for what only a newer peer knows fails that sequence alone;
so does one whose media are more than is taken here, before they come.

The table. A stream may carry any number of sequences: of ids that are over only those of a window below the highest id
are kept, since gateways count ids up."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, chain
from typing import Any

from outrider.rpc.codec import HEADER, Direction, Encoded, Message, OpenSlice, ids_of
from outrider.rpc.errors import InvalidArgument, OutriderError, ProtocolError, ResourceExhausted
from outrider.rpc.media import MAX_MEDIA, Media, too_many_bytes
from outrider.rpc.messages import Close, Closed, Commit, Credit, DraftTokens, FrameHeader, Open, is_last, to_failure

MAX_FRAME_BYTES = 64 * 1024
MAX_SLICES = 2  # of a frame: more log probabilities take milliseconds to encode, and to decode
HEADER_BYTES = 54  # at most, of an encoded FrameHeader
ENTRY_BYTES = 6  # at most, of the tag and the length before an entry
ID_WINDOW = 1 << 16  # an id further below the highest one opened, and not live, counts as over
MAX_OPEN_IDS = 1 << 24  # far above every context length; bounds what a broken peer can make us store
MAX_PARTIAL_IDS = 1 << 26  # the same of all Opens whose slices are still on their way; each counts as HEAD_IDS more
HEAD_IDS = 1 << 12
PARTIAL_MEDIA = 8  # times what a sequence's media may have is on its way at once; more come back
BACK_MS = 500  # when

Decoded = Message | OpenSlice | InvalidArgument | None  # None: a kind that only a newer peer knows


class SequenceState(Enum):
    """Where a sequence is in its life on this stream."""

    UNKNOWN = "unknown"
    LIVE = "live"
    CLOSING = "closing"  # a Close was sent or received, its Closed was not
    OVER = "over"  # finished, failed or closed


_OVER, _CLOSED = 1, 2  # marks of an id; the latter: a Close was sent or received, also after the end


class SequenceTable:
    """The sequences of one stream; its packer and its assembler share one table."""

    def __init__(self) -> None:
        self._active: dict[int, SequenceState] = {}
        self._highest = 0
        self._marks = bytearray(ID_WINDOW + 1)  # of the highest id and those of the window below it, round and round

    @property
    def num_active(self) -> int:
        """The sequences that are live or closing."""
        return len(self._active)

    def state(self, sequence_id: int) -> SequenceState:
        """The state of an id."""
        state = self._active.get(sequence_id)
        if state is not None:
            return state
        over = sequence_id < self._highest - ID_WINDOW or self._is_marked(sequence_id, _OVER)
        return SequenceState.OVER if over else SequenceState.UNKNOWN

    def open(self, sequence_id: int) -> None:
        """Makes an id live; ValueError if it was opened before, or is too far below the highest one to know."""
        if self.state(sequence_id) is not SequenceState.UNKNOWN:
            raise ValueError(
                f"sequence {sequence_id} was opened before, or is more than {ID_WINDOW} below {self._highest}"
            )
        self._active[sequence_id] = SequenceState.LIVE
        if sequence_id > self._highest:
            self._move_window(sequence_id)

    def close(self, sequence_id: int) -> bool:
        """Notes a Close; false if it is not the first one. The first one of an id below the window may be taken for
        the first again once the sequence is over, which makes no difference to anyone."""
        if self._active.get(sequence_id) is SequenceState.CLOSING or self._is_marked(sequence_id, _CLOSED):
            return False
        self._mark(sequence_id, _CLOSED)
        if sequence_id in self._active:
            self._active[sequence_id] = SequenceState.CLOSING
        return True

    def end(self, sequence_id: int) -> None:
        """Notes that a sequence finished, failed or was released."""
        if self._active.pop(sequence_id, None) is not None:
            self._mark(sequence_id, _OVER)

    def _in_window(self, sequence_id: int) -> bool:
        return self._highest - ID_WINDOW <= sequence_id <= self._highest

    def _is_marked(self, sequence_id: int, mark: int) -> bool:
        return self._in_window(sequence_id) and bool(self._marks[sequence_id % len(self._marks)] & mark)

    def _mark(self, sequence_id: int, mark: int) -> None:
        if self._in_window(sequence_id):
            self._marks[sequence_id % len(self._marks)] |= mark

    def _move_window(self, highest: int) -> None:
        """Ids that come into the window have no marks yet."""
        size = len(self._marks)
        first, num_new = (self._highest + 1) % size, min(highest - self._highest, size)
        num_to_end = min(num_new, size - first)
        self._marks[first : first + num_to_end] = bytes(num_to_end)
        self._marks[: num_new - num_to_end] = bytes(num_new - num_to_end)
        self._highest = highest


class _Bulk:
    """A message that leaves in slices."""

    __slots__ = ("_slices", "head", "opens", "started")

    def __init__(self, slices: Iterator[Any], opens: bool) -> None:
        self._slices = slices
        self.head: Any = next(slices)  # None: all were taken
        self.opens = opens
        self.started = False

    def take(self) -> Any:
        """The next slice."""
        head, self.head, self.started = self.head, next(self._slices, None), True
        return head


_Lane = deque[Any]  # of _Bulk and of entries


class FramePacker:
    """The sending half of one side of a stream."""

    def __init__(
        self, direction: Direction, table: SequenceTable | None = None, *, frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        self.vanished: list[int] = []  # sequences whose Closed is the caller's to make up; it empties the list
        self._direction = direction
        self._table = table or SequenceTable()
        self._room = frame_bytes - HEADER_BYTES
        self._pending_bytes = 0
        self._pushed = 0
        self._urgent: deque[tuple[int, int, Any, int]] = deque()  # push number, sequence, entry, bytes
        self._cut: dict[int, int] = {}  # sequence -> its entries pushed before this number are discarded
        self._lanes: dict[int, _Lane] = {}
        self._ring: deque[int] = deque()  # lanes with slices to send; ids of lanes that are gone are skipped
        self._finished: set[int] = set()  # sequences whose last commit was pushed here, and their Close was not
        self._opening: set[int] = set()  # sequences whose Open was not sent to its end
        self._parent: dict[int, int] = {}  # fork -> parent, while the fork's Open was not sent to its end
        self._forks: dict[int, set[int]] = {}  # the same, the other way
        self._held: dict[int, list[int]] = {}  # parent -> forks that wait for its Open
        self._late_closes: dict[int, Close] = {}  # Closes that wait for the Opens of forks

    @property
    def pending_bytes(self) -> int:
        """The bytes of short messages that wait."""
        return self._pending_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing waits."""
        return not self._urgent and not self._lanes

    def push(self, message: Message | Encoded) -> None:
        """Takes a message. ValueError for a sequence never opened, or opened twice, or a number that no field holds;
        ResourceExhausted for a message that is too long for the wire."""
        entry = None
        if isinstance(message, Encoded):
            entry, message = message.entry, message.message
        if isinstance(message, Open):
            self._push_open(message)
        elif isinstance(message, Close):
            self._push_close(message)
        elif self._may_follow(message.sequence_id):
            item = self._encode(message, entry)
            if isinstance(message, Closed):
                self._discard(message.sequence_id)
            self._append(message.sequence_id, item)
            if is_last(message) and self._direction.commands:  # a draft is told of a finish, and closed by a Close
                self._finished.add(message.sequence_id)
            elif is_last(message):
                self._table.end(message.sequence_id)

    def push_commands(self, sequence_id: int, messages: Iterable[DraftTokens | Commit | Credit]) -> None:
        """Takes what every round sends of an open sequence. Whichever sequence the messages name, they are of this
        one: so they go on from one stream to another without a copy. Raises as `push` does."""
        if not self._may_follow(sequence_id):
            return
        lane = self._lanes.get(sequence_id)
        for message in messages:
            size = self._checked_size(message, entry := self._direction.encode(message, sequence_id))
            if lane is None:
                self._append_urgent(sequence_id, entry, size)
            else:
                lane.append(entry)
            if type(message) is Commit and message.finish_reason is not None:  # as in `push`: the draft learns from it
                self._finished.add(sequence_id)

    def next_frame(self) -> list[Any] | None:
        """The entries of the next frame; None if nothing waits."""
        entries: list[Any] = []
        room = self._take_urgent(entries, self._room)
        num_slices = 0
        while not self._urgent and self._ring and num_slices < MAX_SLICES:
            num_before = len(entries)
            left = self._take_slice(entries, room)
            if left is None:
                break
            num_slices += len(entries) - num_before
            room = self._take_urgent(entries, left)  # a last slice lets the messages behind it go
        return entries or None

    def _may_follow(self, sequence_id: int) -> bool:
        state = self._table.state(sequence_id)
        if state is SequenceState.UNKNOWN:
            raise ValueError(f"sequence {sequence_id} was never opened")
        # Nothing follows a Close. A service may still have events on their way when one arrives.
        return state is SequenceState.LIVE or (state is SequenceState.CLOSING and not self._direction.commands)

    def _push_open(self, message: Open) -> None:
        sequence_id, parent = message.sequence_id, message.fork_of
        item = self._encode(message)
        self._table.open(sequence_id)
        self._opening.add(sequence_id)
        if parent is not None:
            self._parent[sequence_id] = parent
            self._forks.setdefault(parent, set()).add(sequence_id)
        if parent is not None and parent in self._opening and parent in self._lanes:
            self._lanes[sequence_id] = deque([item])
            self._held.setdefault(parent, []).append(sequence_id)
        else:
            self._append(sequence_id, item)

    def _push_close(self, message: Close) -> None:
        sequence_id, state = message.sequence_id, self._table.state(message.sequence_id)
        if state is SequenceState.UNKNOWN:
            raise ValueError(f"sequence {sequence_id} was never opened")
        if not self._table.close(sequence_id):
            return
        if state is SequenceState.OVER:  # sent all the same: the peer may keep a finished sequence until then
            self._finished.discard(sequence_id)
            self.vanished.append(sequence_id)
            self._append(sequence_id, self._encode(message))
        elif sequence_id in self._forks:
            self._late_closes[sequence_id] = message
        else:
            self._close_now(message)

    def _close_now(self, message: Close) -> None:
        sequence_id = message.sequence_id
        if sequence_id in self._finished:
            self._finished.remove(sequence_id)
            self._append(sequence_id, self._encode(message))
            return
        lane = self._lanes.get(sequence_id)
        started = lane is not None and isinstance(lane[0], _Bulk) and lane[0].started
        unsent = sequence_id in self._opening and not started
        self._discard(sequence_id)
        if unsent:
            self._table.end(sequence_id)
            self.vanished.append(sequence_id)
        else:
            self._append(sequence_id, self._encode(message))
        if sequence_id in self._opening:
            self._open_done(sequence_id)

    def _open_done(self, sequence_id: int) -> None:
        """An Open was sent to its end, or never will be: lets go what waited for it."""
        self._opening.discard(sequence_id)
        for fork in self._held.pop(sequence_id, ()):
            self._settle(fork)
        parent = self._parent.pop(sequence_id, None)
        if parent is None:
            return
        self._forks[parent].discard(sequence_id)
        if not self._forks[parent]:
            del self._forks[parent]
            late = self._late_closes.pop(parent, None)
            if late is not None:
                self._close_now(late)

    def _encode(self, message: Message, entry: Any = None) -> Any:
        """An entry, unless it is there already, or a _Bulk of them."""
        slices = self._direction.slices(message)
        if slices is not None:
            return _Bulk(slices, isinstance(message, Open))
        if entry is None:
            entry = self._direction.encode(message)
        self._checked_size(message, entry)
        return entry

    def _checked_size(self, message: Message, entry: Any) -> int:
        """The bytes of an entry that the wire can hold."""
        size: int = entry.ByteSize()
        if size > self._direction.max_lone_bytes:
            what = f"{type(message).__name__} of sequence {message.sequence_id}"
            raise ResourceExhausted(f"{what}: is {size} bytes; allowed: at most {self._direction.max_lone_bytes}")
        return size

    def _append(self, sequence_id: int, item: Any) -> None:
        """Puts an item behind what its sequence has to send."""
        lane = self._lanes.get(sequence_id)
        if lane is not None:
            lane.append(item)
        elif isinstance(item, _Bulk):
            self._lanes[sequence_id] = deque([item])
            self._ring.append(sequence_id)
        else:
            self._append_urgent(sequence_id, item, item.ByteSize())

    def _append_urgent(self, sequence_id: int, entry: Any, size: int) -> None:
        size += 0 if entry is None else ENTRY_BYTES
        self._pending_bytes += size
        self._pushed += 1
        self._urgent.append((self._pushed, sequence_id, entry, size))

    def _settle(self, sequence_id: int) -> None:
        """Lets the short messages at the head of a lane go, up to its next long one."""
        lane = self._lanes.get(sequence_id)
        if lane is None:
            return
        while lane and not isinstance(lane[0], _Bulk):
            entry = lane.popleft()
            self._append_urgent(sequence_id, entry, entry.ByteSize())
        if lane:
            self._ring.append(sequence_id)
        else:
            del self._lanes[sequence_id]

    def _discard(self, sequence_id: int) -> None:
        """Drops what a sequence has not sent. Entries in the queue are only marked: a Close costs no search."""
        self._lanes.pop(sequence_id, None)
        self._append_urgent(sequence_id, None, 0)  # where the mark may go
        self._cut[sequence_id] = self._pushed

    def _take_urgent(self, entries: list[Any], room: int) -> int:
        while self._urgent:
            number, sequence_id, entry, size = self._urgent[0]
            discarded = number < self._cut.get(sequence_id, 0)
            if entry is not None and not discarded and entries and size > room:
                break  # an entry larger than any frame goes alone
            self._urgent.popleft()
            self._pending_bytes -= size
            if entry is None:
                self._cut.pop(sequence_id, None)
            elif not discarded:
                entries.append(entry)
                room -= size
                if sequence_id in self._opening:  # then this was its Open
                    self._open_done(sequence_id)
        return room

    def _take_slice(self, entries: list[Any], room: int) -> int | None:
        """Takes the next lane's next slice and returns the room that is left; None if it does not fit."""
        sequence_id = self._ring[0]
        lane = self._lanes.get(sequence_id)
        if lane is None:
            self._ring.popleft()
            return room
        bulk = lane[0]
        size = bulk.head.ByteSize() + ENTRY_BYTES
        if entries and size > room:
            return None
        self._ring.popleft()
        entries.append(bulk.take())
        if bulk.head is not None:
            self._ring.append(sequence_id)
        else:
            lane.popleft()
            if bulk.opens:
                self._open_done(sequence_id)
            self._settle(sequence_id)
        return room - int(size)


@dataclass(slots=True)
class _PartialOpen:
    """An Open whose slices are still on their way."""

    head: Open
    counts: tuple[int, int, int]  # ids of the prompt, of the output, of the prediction
    ids: array[int]
    sizes: tuple[int, ...] = ()  # bytes of its media
    media: bytearray = field(default_factory=bytearray)

    @property
    def num_ids(self) -> int:
        """Of all three."""
        return sum(self.counts)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return len(self.ids) == self.num_ids and len(self.media) == sum(self.sizes)

    def add(self, ids: Iterable[int], media: bytes) -> None:
        """Takes a slice. ProtocolError where it is more than was announced."""
        self.ids.extend(ids)
        self.media += media
        if len(self.ids) > self.num_ids:
            raise ProtocolError(f"sequence {self.head.sequence_id}: more than the {self.num_ids} ids announced")
        if len(self.media) > sum(self.sizes) or (media and len(self.ids) < self.num_ids):
            announced = f"the {sum(self.sizes)} bytes of media announced, behind {self.num_ids} ids"
            raise ProtocolError(f"sequence {self.head.sequence_id}: other than {announced}")

    def whole(self) -> Open:
        """The Open with all its ids and media."""
        prompt_len, output_len, _ = self.counts
        output, prediction = prompt_len, prompt_len + output_len
        return replace(
            self.head,
            prompt_ids=tuple(self.ids[:output]),
            output_ids=tuple(self.ids[output:prediction]),
            prediction=tuple(self.ids[prediction:]),
            media=tuple(map(self._media, self.head.media, self.sizes, accumulate(self.sizes))),
        )

    def _media(self, head: Media, size: int, end: int) -> Media:
        return replace(head, data=bytes(memoryview(self.media)[end - size : end]))


@dataclass(frozen=True, slots=True)
class Received:
    """What one frame brought. `replies` are to be sent back: they concern sequences that the caller never saw."""

    header: FrameHeader
    messages: list[Message] = field(default_factory=list)
    replies: list[Message] = field(default_factory=list)


class FrameAssembler:
    """The receiving half of one side of a stream. It shares the table of ids with that side's packer."""

    def __init__(self, direction: Direction, table: SequenceTable | None = None, max_media_bytes: int = 0) -> None:
        """`max_media_bytes` of an Open are taken; 0: none may come."""
        self.last_number = 0
        self._direction, self._max_media_bytes = direction, max_media_bytes
        self._table = table or SequenceTable()
        self._partial: dict[int, _PartialOpen] = {}

    def decode(self, frame: Any) -> list[Decoded]:
        """What `accept` begins with, for a frame that takes long: it may run on another thread."""
        return [self._decode(entry) for entry in frame.messages]

    def accept(self, frame: Any, decoded: Iterable[Decoded] | None = None) -> Received:
        """The messages of the next frame, in order. ProtocolError if the peer broke a rule. `decoded` is what `decode`
        made of the frame, if it was asked."""
        self._check_size(frame)
        received = Received(HEADER.decode(frame.header))
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
        if self._partial and sum(len(partial.ids) + HEAD_IDS for partial in self._partial.values()) > MAX_PARTIAL_IDS:
            raise ProtocolError(
                f"{len(self._partial)} sequences are open in part; allowed: {MAX_PARTIAL_IDS} ids in all"
            )
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
        ends = not isinstance(message, OpenSlice) and is_last(message)
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
        counts = encoded.num_prompt_ids, encoded.num_output_ids, encoded.num_prediction_ids
        num_ids = sum(counts)
        if num_ids > MAX_OPEN_IDS:
            raise ProtocolError(f"sequence {head.sequence_id}: {num_ids} ids; allowed: at most {MAX_OPEN_IDS}")
        sizes = tuple(info.num_bytes for info in encoded.media)
        if sizes and (refusal := self._refusal_of_media(sizes)) is not None:
            self._close(head.sequence_id, refusal, received)
            return
        parts = ids_of(head)
        ids = array("I", chain.from_iterable(parts))
        partial = _PartialOpen(head, counts, ids, sizes)
        if len(ids) >= num_ids and tuple(map(len, parts)) != counts:
            raise ProtocolError(f"sequence {head.sequence_id}: {len(ids)} ids where {num_ids} were announced")
        if not partial.is_whole:
            self._partial[head.sequence_id] = partial
        else:
            received.messages.append(head)

    def _refusal_of_media(self, sizes: Sequence[int]) -> OutriderError | None:
        """Why they may not come, or not now."""
        size, most = sum(sizes), self._max_media_bytes
        if len(sizes) > MAX_MEDIA or (refusal := too_many_bytes(size, most)) is not None:
            many = InvalidArgument(f"open.media: has {len(sizes)} entries; allowed: at most {MAX_MEDIA}")
            return many if len(sizes) > MAX_MEDIA else refusal
        under_way = sum(sum(partial.sizes) for partial in self._partial.values())
        if under_way + size <= PARTIAL_MEDIA * most:
            return None
        problem = f"{under_way} bytes of media are on their way; allowed: {PARTIAL_MEDIA * most} at once"
        return ResourceExhausted(problem, reason="BUSY", retry_after_ms=BACK_MS)

    def _refuse(self, sequence_id: int, error: InvalidArgument, received: Received) -> None:
        """Answers an Open that cannot be read; what follows for its sequence is ignored."""
        self._table.open(sequence_id)
        self._close(sequence_id, error, received)

    def _close(self, sequence_id: int, error: OutriderError, received: Received) -> None:
        self._table.close(sequence_id)
        received.replies.append(to_failure(sequence_id, error))

    def _take_slice(self, message: OpenSlice, received: Received) -> None:
        partial = self._partial.get(message.sequence_id)
        if partial is None:
            raise ProtocolError(f"sequence {message.sequence_id}: a slice after the last one")
        partial.add(message.ids, message.media)
        if partial.is_whole:
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
