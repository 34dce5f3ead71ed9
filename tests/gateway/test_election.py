"""Which model is served while targets have more than one."""

from __future__ import annotations

import pytest

from outrider.gateway.peers.replicas import elect


def answers(text: str) -> list[tuple[str, bool]]:
    """A letter a target; a small one takes no new sequences."""
    return [(letter.upper(), letter.isupper()) for letter in text]


@pytest.mark.parametrize(
    ("current", "targets", "chosen"),
    [
        (None, "", None),
        (None, "A", "A"),
        (None, "BAA", "A"),
        (None, "BAAB", "B"),  # of equals the first
        (None, "aaB", "B"),
        ("A", "AAB", "A"),
        ("A", "AB", "A"),
        ("A", "BBA", "B"),
        ("A", "BBBAA", "B"),
        ("A", "BCBCA", "A"),  # nobody has more than half
        ("A", "aB", "B"),
        ("A", "bbA", "A"),
        ("A", "BCCa", "C"),
        ("A", "bb", "A"),
        ("A", "", "A"),
    ],
)
def test_the_model_that_is_served(current: str | None, targets: str, chosen: str | None) -> None:
    assert elect(current, answers(targets)) == chosen


def test_a_rolling_change_changes_over_once() -> None:
    served: list[str | None] = ["A"]
    for number in range(6):
        served += [elect(served[-1], answers("B" * number + "A" * (5 - number) + "a"))]
    assert served == ["A", "A", "A", "A", "A", "B", "B"]
