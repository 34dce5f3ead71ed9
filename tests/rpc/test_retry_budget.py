"""A bucket of retries, by requests and by time; what is in it, and what is still to come."""

from __future__ import annotations

import math

import pytest

from outrider.rpc.retry_budget import RATIO, REFILL_S, RetryBudget


def spend_all(budget: RetryBudget, num_sequences: int, now: float) -> int:
    count = 0
    while budget.allows(num_sequences, now):
        budget.spend()
        count += 1
    return count


def test_a_tenth_of_the_requests_and_a_bucket_that_time_fills() -> None:
    budget = RetryBudget(8)
    assert spend_all(budget, 0, 0.0) == 8
    assert spend_all(budget, 50, 0.0) == RATIO * 50
    assert spend_all(budget, 50, REFILL_S / 4) == 2
    assert spend_all(budget, 10_000, 100 * REFILL_S) == 8, "no more than the bucket holds"


def test_what_is_reserved_comes_when_time_has_brought_it() -> None:
    budget, ever = RetryBudget(4), math.inf
    assert [budget.reserve(0, 0.0, ever) for _ in range(4)] == [0.0] * 4
    each = REFILL_S / 4
    assert budget.reserve(0, 0.0, each) == each, "too late, and so not taken"
    assert [budget.reserve(0, 0.0, ever) for _ in range(3)] == [each, 2 * each, 3 * each]
    assert budget.reserve(0, 3 * each, ever) == each, "three have come, and were taken"
    assert budget.reserve(20, 3 * each, ever) == pytest.approx(0.0), "and two by so many requests"
