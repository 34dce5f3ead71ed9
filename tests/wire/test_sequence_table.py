from __future__ import annotations

import tracemalloc

import pytest

from outrider.rpc import frames
from outrider.rpc.frames import ID_WINDOW, SequenceState, SequenceTable


def passed(table: SequenceTable, first: int, last: int) -> None:
    """Sequences that come and go; as a gateway does, every other one is closed, the rest end by themselves."""
    for number in range(first, last):
        table.open(number)
        if number % 2:
            assert table.close(number)
        table.end(number)


def test_a_stream_of_many_sequences_keeps_a_window_of_ids(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = ID_WINDOW if request.config.getoption("--prove") else 1 << 11
    monkeypatch.setattr(frames, "ID_WINDOW", window)
    table = SequenceTable()
    tracemalloc.start()
    try:
        passed(table, 1, window + 1)
        full, _ = tracemalloc.get_traced_memory()
        passed(table, window + 1, 40 * window)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 1.3 * full
    assert table.num_active == 0


def test_closes_work_for_ever() -> None:
    table = SequenceTable()
    for number in range(1, 10 * ID_WINDOW // 7):
        table.open(number)
        assert table.close(number) and not table.close(number)
        assert table.state(number) is SequenceState.CLOSING
        table.end(number)
        assert not table.close(number) and table.state(number) is SequenceState.OVER


@pytest.mark.parametrize("below, state", [(0, SequenceState.UNKNOWN), (1, SequenceState.OVER)])
def test_ids_below_the_window_are_over(below: int, state: SequenceState) -> None:
    table, highest = SequenceTable(), 5 * ID_WINDOW
    table.open(highest)
    number = highest - ID_WINDOW - below
    assert table.state(number) is state
    if state is SequenceState.OVER:
        with pytest.raises(ValueError, match=f"opened before, or is more than {ID_WINDOW} below {highest}"):
            table.open(number)
    else:
        table.open(number)


def test_ids_within_the_window_are_told_apart() -> None:
    table = SequenceTable()
    for number in (10, 30):
        table.open(number)
        table.end(number)
    table.open(ID_WINDOW)
    assert [table.state(number) for number in (10, 20, 30)] == [
        SequenceState.OVER,
        SequenceState.UNKNOWN,
        SequenceState.OVER,
    ]


def test_a_live_sequence_stays_live_however_old_it_is() -> None:
    table = SequenceTable()
    table.open(1)
    table.open(2)
    assert table.close(2)
    for number in (3 * ID_WINDOW, 9 * ID_WINDOW):
        table.open(number)
    assert table.state(1) is SequenceState.LIVE and table.state(2) is SequenceState.CLOSING
    assert table.close(1) and not table.close(1) and not table.close(2)
    for number in (1, 2):
        table.end(number)
        assert table.state(number) is SequenceState.OVER


def test_an_old_sequence_that_ended_by_itself_is_still_closed() -> None:
    table = SequenceTable()
    table.open(1)
    table.open(3 * ID_WINDOW)
    table.end(1)
    assert table.close(1)  # the peer may keep what it knows of the sequence until then
