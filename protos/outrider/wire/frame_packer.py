"""Packs messages into frames of at most 64 KiB, without I/O.

Short messages leave first, in the order they were pushed. Long ones (an Open with many ids, log probabilities of a
prompt) leave in slices, round robin, in what room a frame has left. A sequence that still has slices to send has a
*lane*, in which its later messages wait, so that messages of one sequence keep their order.

A Close discards what its sequence has not sent. An Open of which nothing was sent vanishes with it, and the caller
finds the id in `vanished`: nobody else will answer that Close. A fork waits for its parent's whole Open, and a
parent's Close for the Opens of its forks, which name an unclosed sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from outrider.wire.codec_frames import Direction, Encoded, Message
from outrider.wire.errors import ResourceExhausted
from outrider.wire.messages import Close, Closed, Commit, Failure, Open
from outrider.wire.sequence_table import SequenceState, SequenceTable

MAX_FRAME_BYTES = 64 * 1024
MAX_SLICES = 2  # of a frame: more log probabilities take milliseconds to encode, and to decode
HEADER_BYTES = 48  # at most, of an encoded FrameHeader
ENTRY_BYTES = 6  # at most, of the tag and the length before an entry


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
            if self._ends(message):
                self._table.end(message.sequence_id)

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

    def _ends(self, message: Message) -> bool:
        if isinstance(message, Commit):  # the draft is told of finished sequences, but closed by a Close
            return not self._direction.commands and message.finish_reason is not None
        return isinstance(message, Closed | Failure)

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
        sequence_id = message.sequence_id
        state = self._table.state(sequence_id)
        if state is SequenceState.UNKNOWN:
            raise ValueError(f"sequence {sequence_id} was never opened")
        if not self._table.close(sequence_id):
            return
        if state is SequenceState.OVER:  # sent all the same: the peer may keep a finished sequence until then
            self.vanished.append(sequence_id)
            self._append(sequence_id, self._encode(message))
        elif sequence_id in self._forks:
            self._late_closes[sequence_id] = message
        else:
            self._close_now(message)

    def _close_now(self, message: Close) -> None:
        sequence_id = message.sequence_id
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
        if entry.ByteSize() > self._direction.max_lone_bytes:
            what = f"{type(message).__name__} of sequence {message.sequence_id}"
            raise ResourceExhausted(
                f"{what}: is {entry.ByteSize()} bytes; allowed: at most {self._direction.max_lone_bytes}"
            )
        return entry

    def _append(self, sequence_id: int, item: Any) -> None:
        """Puts an item behind what its sequence has to send."""
        lane = self._lanes.get(sequence_id)
        if lane is not None:
            lane.append(item)
        elif isinstance(item, _Bulk):
            self._lanes[sequence_id] = deque([item])
            self._ring.append(sequence_id)
        else:
            self._append_urgent(sequence_id, item)

    def _append_urgent(self, sequence_id: int, entry: Any) -> None:
        size = 0 if entry is None else entry.ByteSize() + ENTRY_BYTES
        self._pending_bytes += size
        self._pushed += 1
        self._urgent.append((self._pushed, sequence_id, entry, size))

    def _settle(self, sequence_id: int) -> None:
        """Lets the short messages at the head of a lane go, up to its next long one."""
        lane = self._lanes.get(sequence_id)
        if lane is None:
            return
        while lane and not isinstance(lane[0], _Bulk):
            self._append_urgent(sequence_id, lane.popleft())
        if lane:
            self._ring.append(sequence_id)
        else:
            del self._lanes[sequence_id]

    def _discard(self, sequence_id: int) -> None:
        """Drops what a sequence has not sent. Entries in the queue are only marked: a Close costs no search."""
        self._lanes.pop(sequence_id, None)
        self._append_urgent(sequence_id, None)  # where the mark may go
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
