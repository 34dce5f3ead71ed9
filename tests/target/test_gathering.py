"""A step is held back for windows on their way, never longer than that could have saved."""

from __future__ import annotations

import pytest
from target_harness import Harness, opened, tiny_model

from outrider.rpc.messages import Credit, Piece
from outrider.target_service.scheduler import Gathering
from outrider.target_service.sequence import TargetSequence

STEP_S = 0.04


class Waiting(TargetSequence):
    """A sequence of which only the due time is asked."""

    def __init__(self, due: float | None) -> None:
        self.at = due

    def due(self, now: float) -> float | None:
        return self.at


def gathering() -> Gathering:
    made = Gathering()
    made.ran(STEP_S, chunked=False)
    return made


@pytest.mark.parametrize(
    ("dues", "limit"),
    [
        ([0.0], 0.0),
        ([0.0, 0.0, None], 0.0),  # one has no credit: it is not on its way
        ([0.0, 9.0], STEP_S / 2),
        ([0.0, 0.0, 0.0, 9.0], STEP_S / 4),
        ([0.0, 9.0, 9.0, 9.0], STEP_S * 3 / 4),
    ],
)
def test_the_limit_is_what_it_could_save(dues: list[float | None], limit: float) -> None:
    made, sequences = gathering(), [Waiting(due) for due in dues]
    assert made.hold(sequences, 1.0) == pytest.approx(limit)
    assert made.hold(sequences, 1.0 + limit / 2) == pytest.approx(limit / 2)  # counted from the first time
    assert made.hold(sequences, 1.0 + limit + 1e-9) == 0.0
    made.ran(STEP_S, chunked=False)
    assert made.hold(sequences, 2.0) == pytest.approx(limit)


def test_it_ends_when_the_last_one_comes() -> None:
    made, late = gathering(), Waiting(9.0)
    sequences = [Waiting(0.0), late]
    assert made.hold(sequences, 1.0) > 0
    late.at = 1.001
    assert made.hold(sequences, 1.001) == 0.0


def test_prompts_say_nothing_of_other_steps() -> None:
    made = gathering()
    made.ran(100 * STEP_S, chunked=True)
    assert made.hold([Waiting(0.0), Waiting(9.0)], 1.0) == pytest.approx(STEP_S / 2)


def test_two_windows_share_a_step() -> None:
    """The second chain comes while the first is held back; both are verified at once."""
    harness = Harness.of(tiny_model()[1])
    for index in (1, 2):
        harness.send(opened(index, (1, 2, 3)), Credit(index, 50, 2, 10_000))
    harness.run()
    harness.engine._gathering.ran(STEP_S, chunked=False)
    harness.send(Piece(1, 0, 3 + len(harness.output(1)), (5, 6)))
    assert harness.engine.step(harness.now) == pytest.approx(STEP_S / 2, rel=0.5)
    harness.send(Piece(2, 0, 3 + len(harness.output(2)), (5, 6)))
    harness.run()
    last = [harness.commits(index)[-1] for index in (1, 2)]
    assert [commit.timings.num_sequences for commit in last] == [2, 2]
