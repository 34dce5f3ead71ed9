"""Which sequence ids of one stream are live, closing or over. A stream may carry any number of sequences: ids that are
over are kept as ranges, and only those of a window below the highest id, since gateways count ids up."""

from __future__ import annotations

from bisect import bisect_right
from enum import Enum

ID_WINDOW = 1 << 16  # an id further below the highest one opened, and not live, counts as over


class IdRanges:
    """A set of integers, kept as sorted ranges."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # exclusive

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._ends[index]

    def __len__(self) -> int:
        """The number of ranges, which is what takes memory."""
        return len(self._starts)

    def add(self, number: int) -> None:
        """Adds a number and joins it with its neighbours."""
        if number in self:
            return
        index = bisect_right(self._starts, number)
        joins_left = index > 0 and self._ends[index - 1] == number
        joins_right = index < len(self._starts) and self._starts[index] == number + 1
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_left:
            self._ends[index - 1] = number + 1
        elif joins_right:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._ends.insert(index, number + 1)

    def drop_below(self, least: int) -> None:
        """Forgets the ranges that lie wholly below a number."""
        gone = bisect_right(self._ends, least)
        del self._starts[:gone], self._ends[:gone]


class SequenceState(Enum):
    """Where a sequence is in its life on this stream."""

    UNKNOWN = "unknown"
    LIVE = "live"
    CLOSING = "closing"  # a Close was sent or received, its Closed was not
    OVER = "over"  # finished, failed or closed


class SequenceTable:
    """The sequences of one stream; its packer and its assembler share one table."""

    def __init__(self) -> None:
        self._active: dict[int, SequenceState] = {}
        self._over = IdRanges()
        self._closed = IdRanges()  # a Close was sent or received, also after the end
        self._highest = 0

    @property
    def num_active(self) -> int:
        """The sequences that are live or closing."""
        return len(self._active)

    def active_ids(self) -> tuple[int, ...]:
        """The ids that are live or closing."""
        return tuple(self._active)

    def state(self, sequence_id: int) -> SequenceState:
        """The state of an id."""
        state = self._active.get(sequence_id)
        if state is not None:
            return state
        over = sequence_id < self._highest - ID_WINDOW or sequence_id in self._over
        return SequenceState.OVER if over else SequenceState.UNKNOWN

    def open(self, sequence_id: int) -> None:
        """Makes an id live; ValueError if it was opened before, or is too far below the highest one to know."""
        if self.state(sequence_id) is not SequenceState.UNKNOWN:
            raise ValueError(
                f"sequence {sequence_id} was opened before, or is more than {ID_WINDOW} below {self._highest}"
            )
        self._active[sequence_id] = SequenceState.LIVE
        if sequence_id > self._highest:
            self._highest = sequence_id
            self._over.drop_below(sequence_id - ID_WINDOW)
            self._closed.drop_below(sequence_id - ID_WINDOW)

    def close(self, sequence_id: int) -> bool:
        """Notes a Close; false if it is not the first one. The first one of an id below the window may be taken for
        the first again once the sequence is over, which makes no difference to anyone."""
        if self._active.get(sequence_id) is SequenceState.CLOSING or sequence_id in self._closed:
            return False
        self._closed.add(sequence_id)
        if sequence_id in self._active:
            self._active[sequence_id] = SequenceState.CLOSING
        return True

    def end(self, sequence_id: int) -> None:
        """Notes that a sequence finished, failed or was released."""
        if self._active.pop(sequence_id, None) is not None:
            self._over.add(sequence_id)
