"""Placement by prompt and load; which model is served while targets have more than one."""

from __future__ import annotations

import random

import pytest
from support.environment import SEED

from outrider.gateway.peers.routing import AFFINITY_TOKENS, affinity_key, choose, choose_model

NAMES = [f"10.0.0.{number}:50052" for number in range(6)]
IDLE = dict.fromkeys(NAMES, 0)


def keys(count: int) -> list[bytes]:
    dice = random.Random(SEED)
    return [affinity_key([dice.randrange(50_000) for _ in range(20)]) for _ in range(count)]


def test_what_begins_alike_has_one_key_and_a_salt_parts_it() -> None:
    start = list(range(AFFINITY_TOKENS))
    assert affinity_key([*start, 1, 2]) == affinity_key([*start, 9]) != affinity_key(start[::-1])
    assert affinity_key(start) != affinity_key(start, "tenant")
    assert affinity_key([]) == affinity_key([]) != affinity_key([0])


def test_idle_replicas_share_evenly_and_the_order_of_names_does_not_matter() -> None:
    chosen = [choose(key, IDLE) for key in keys(3000)]
    assert all(400 < chosen.count(name) < 600 for name in NAMES)
    backwards = dict(reversed(IDLE.items()))
    assert chosen == [choose(key, backwards) for key in keys(3000)]


def test_a_lost_replica_moves_only_its_own_share() -> None:
    left = dict.fromkeys(NAMES[1:], 0)
    for key in keys(500):
        before = choose(key, IDLE)
        assert before == NAMES[0] or choose(key, left) == before
    assert choose(b"key", {}) is None


def test_a_busy_replica_is_passed_over_and_none_gets_much_more_than_the_mean() -> None:
    loads = dict(IDLE)
    for _ in range(600):  # one prompt for all
        name = choose(b"popular", loads)
        assert name is not None
        loads[name] += 1
    assert sum(loads.values()) == 600 and max(loads.values()) <= 126
    first = choose(b"popular", IDLE)
    assert first is not None and choose(b"popular", {**IDLE, first: 9}) != first


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
    assert choose_model(current, answers(targets)) == chosen


def test_a_rolling_change_changes_over_once() -> None:
    served: list[str | None] = ["A"]
    for number in range(6):
        served += [choose_model(served[-1], answers("B" * number + "A" * (5 - number) + "a"))]
    assert served == ["A", "A", "A", "A", "A", "B", "B"]
