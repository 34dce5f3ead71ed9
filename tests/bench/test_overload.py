"""outrider.bench.overload, without services: what is made of the requests, and what is no figure."""

from __future__ import annotations

import pytest

from outrider.bench.load.requests import Record
from outrider.bench.overload import HEAD, figures, middle, row


def record(due: float, ended: float, tokens: int, error: str = "") -> Record:
    times = [] if error else [due + 0.1]
    return Record(0, due, sent=due, ended=ended, times=times, completion_tokens=tokens, error=error)


def test_refused_ones_count_as_refused_and_their_time_is_kept() -> None:
    busy = "with this request there would be 25 sequences running and waiting; allowed: at most 24"
    answered = [record(0.0, 2.0, 60), record(0.5, 4.0, 40), record(2.0, 6.0, 80)]
    records = [*answered, record(1.0, 1.002, 0, busy), record(1.0, 1.004, 0, busy), record(4.0, 4.003, 0, busy)]
    found = figures("2x", records, 3.0, 50.0)
    assert (found["tokens_per_s"], found["of_peak"], found["refused_share"]) == (25.0, 0.5, 0.5)
    assert found["refusal_ms"] == pytest.approx([3.0, 3.98, 4.0]) and found["first_token_ms"][0] == pytest.approx(100.0)
    assert len(row(found)) == len(HEAD) and "50.0%" in row(found)


def test_of_several_runs_the_medians_count_and_the_greatest_time() -> None:
    run = figures("2x", [record(0.0, 1.0, 50), record(1.0, 2.0, 50)], 2.0, 50.0)
    runs = [
        run | {"of_peak": share, "refusal_ms": times}
        for share, times in ((0.8, []), (0.9, [1, 2, 9]), (1.0, [3, 4, 5]))
    ]
    found = middle(runs)
    assert found["of_peak"] == 0.9 and found["refusal_ms"] == [2, 3, 9] and found["load"] == "2x"
    assert middle([run, run]) == run and run["refusal_ms"] == []


def test_other_failures_are_no_figure() -> None:
    with pytest.raises(SystemExit, match="no target"):
        figures("1x", [record(0.0, 1.0, 5), record(0.0, 1.0, 0, "no target can take the request")], 1.0, None)
    with pytest.raises(SystemExit, match="nothing was answered"):
        figures("1x", [record(0.0, 1.0, 0, "8 sequences running and waiting")], 1.0, None)
