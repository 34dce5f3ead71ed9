"""Placement by prompt and load, and the circuit breaker, on a clock of the test's own."""

from __future__ import annotations

import random

from conftest import SEED

from outrider.gateway.peers.replicas import (
    AFFINITY_TOKENS,
    FIRST_REST_S,
    MAX_FAILURES,
    MAX_REST_S,
    Breaker,
    affinity_key,
    choose,
)

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


def test_a_breaker_trips_rests_longer_each_time_and_closes() -> None:
    breaker = Breaker()
    breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.failed(0.0)
    assert breaker.open and not breaker.allows(0.9 * FIRST_REST_S) and breaker.allows(FIRST_REST_S)
    breaker.started(FIRST_REST_S)
    assert not breaker.allows(1.5 * FIRST_REST_S)  # one trial at a time
    breaker.failed(1.5 * FIRST_REST_S)
    assert not breaker.allows(3.4 * FIRST_REST_S) and breaker.allows(3.5 * FIRST_REST_S)
    for _ in range(20):
        breaker.failed(100.0)
    assert breaker.allows(100.0 + MAX_REST_S)
    breaker.started(200.0)
    breaker.succeeded()
    assert breaker.allows(200.0) and not breaker.open


def test_a_trial_that_shows_nothing_is_followed_by_another() -> None:
    breaker = Breaker()
    for _ in range(MAX_FAILURES):
        breaker.failed(0.0)
    breaker.started(5.0)
    assert not breaker.allows(5.5) and breaker.allows(5.0 + FIRST_REST_S)


def test_one_break_of_many_sequences_is_one_rest_and_only_a_trial_doubles_it() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.started(0.0)
    for _ in range(10):
        breaker.failed(0.0)
    assert breaker.open and not breaker.allows(0.9 * FIRST_REST_S) and breaker.allows(FIRST_REST_S)
    breaker.started(FIRST_REST_S)
    for _ in range(10):  # the trial, and what else was still there
        breaker.failed(2 * FIRST_REST_S)
    assert not breaker.allows(3.9 * FIRST_REST_S) and breaker.allows(4 * FIRST_REST_S)
