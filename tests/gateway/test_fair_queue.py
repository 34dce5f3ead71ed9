"""Who of those that wait is next: shares by tokens, nobody waits for ever, and nothing is kept of who has gone."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.fair_queue import FairQueue, Ticket
from outrider.rpc.messages import MOST_STEPS, PRIORITY_STEP_S

COSTS = st.integers(1, 500)


def next_of(queue: FairQueue[int], now: float = 0.0) -> Ticket[int]:
    ticket = queue.first(now)
    queue.let_in(ticket)
    return ticket


@given(st.lists(st.lists(COSTS, min_size=1, max_size=8), min_size=2, max_size=5), st.data())
def test_callers_that_always_wait_get_equal_tokens(costs: list[list[int]], data: st.DataObject) -> None:
    """Each has a request waiting at all times, of costs that recur. At no time are two further apart than their largest
    requests."""
    queue: FairQueue[int] = FairQueue()
    served = dict.fromkeys(map(str, range(len(costs))), 0.0)

    def arrive(index: int) -> None:
        queue.add(0, str(index), data.draw(st.sampled_from(costs[index])), 0, 0.0)

    for index in range(len(costs)):
        arrive(index)
    for _ in range(60):
        ticket = queue.first(0.0)
        arrive(int(ticket.caller))
        queue.let_in(ticket)
        served[ticket.caller] += ticket.cost
        for one, other in combinations(range(len(costs)), 2):
            assert abs(served[str(one)] - served[str(other)]) <= max(costs[one]) + max(costs[other])


@given(st.integers(1, 40), COSTS, COSTS)
def test_who_comes_anew_waits_for_no_backlog(num_before: int, cost: int, own_cost: int) -> None:
    """Nor has it a claim for the time that it was away: from then on the two share by tokens."""
    queue: FairQueue[int] = FairQueue()
    served = {"heavy": 0.0, "light": 0.0}
    for caller in ("heavy", "light"):
        for _ in range(100):
            queue.add(0, caller, cost if caller == "heavy" else own_cost, 0, 0.0)
        for _ in range(num_before if caller == "heavy" else 0):
            next_of(queue)
    callers = []
    for _ in range(50):
        ticket = next_of(queue)
        callers.append(ticket.caller)
        served[ticket.caller] += ticket.cost
        assert abs(served["heavy"] - served["light"]) <= cost + own_cost
    assert "light" in callers[:2]


@given(COSTS, st.integers(1, 20), st.integers(2, 12))
def test_endless_newcomers_starve_nobody(own_cost: int, cost: int, room: int) -> None:
    """A caller's second request waits while every one let in is followed by a caller that was never there before."""
    queue: FairQueue[int] = FairQueue()
    queue.add(0, "stays", own_cost, 0, 0.0)
    second = queue.add(0, "stays", own_cost, 0, 0.0)
    most = room * (own_cost // cost + 3)
    for number in range(most):
        while queue.num_waiting < room:
            queue.add(0, f"new {number} {queue.num_waiting}", cost, 0, 0.0)
        if next_of(queue) is second:
            return
    raise AssertionError(f"not let in after {most} others")


@pytest.mark.parametrize(
    ("priority", "waits_s"), [(0, 0), (2, 2 * PRIORITY_STEP_S), (2**31 - 1, MOST_STEPS * PRIORITY_STEP_S)]
)
def test_a_low_priority_waits_boundedly(priority: int, waits_s: float) -> None:
    """One more urgent request arrives each second, and one is let in."""
    queue: FairQueue[int] = FairQueue()
    low = queue.add(0, "", 10, priority, 0.0)
    for now in range(200):
        queue.add(0, "", 10, 0, float(now))
        if next_of(queue, float(now)) is low:
            assert now == waits_s
            return
    raise AssertionError("it was never let in")


def test_priority_then_arrival() -> None:
    queue: FairQueue[int] = FairQueue()
    for item, priority in enumerate((5, 1, 1, -2)):
        queue.add(item, "", 10, priority, 0.0)
    assert [next_of(queue).item for _ in range(4)] == [3, 1, 2, 0]


def test_nobody_overtakes_who_is_held() -> None:
    queue: FairQueue[int] = FairQueue()
    large = queue.add(0, "a", 900, 0, 0.0)
    queue.hold(large)
    queue.add(1, "b", 1, -5, 0.0)
    assert queue.first(0.0) is large
    queue.remove(large)
    assert queue.first(0.0).item == 1


def test_who_has_enough_is_passed_over_while_there_are_others() -> None:
    """Whatever its priority, and also where it is held."""
    queue: FairQueue[int] = FairQueue()
    for item, caller in enumerate("aab"):
        queue.add(item, caller, 10, -1 if caller == "a" else 5, 0.0)
    assert queue.first(0.0, "a".__eq__).item == 2 and queue.first(0.0).item == 0
    queue.hold(queue.first(0.0))
    other = queue.first(0.0, "a".__eq__)
    assert other.item == 2
    queue.let_in(other)
    assert queue.first(0.0, "a".__eq__).item == 0, "there is nobody else"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), COSTS, st.integers(0, 2), st.booleans()), max_size=60))
def test_nothing_is_kept_once_nobody_waits(entries: list[tuple[str, int, int, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    tickets = [queue.add(0, caller, cost, priority, 0.0) for caller, cost, priority, _ in entries]
    for ticket, (_, _, _, leaves) in zip(tickets, entries, strict=True):
        if leaves:
            queue.remove(ticket)
            queue.remove(ticket)  # a second time changes nothing
    assert queue.num_waiting == sum(not leaves for *_, leaves in entries)
    while queue.num_waiting:
        next_of(queue)
    assert not queue._flows and not queue._tags and not queue._num_of and not queue._virtual


def test_callers_that_have_gone_are_forgotten_while_others_wait() -> None:
    queue: FairQueue[int] = FairQueue()
    for _ in range(4000):
        queue.add(0, "stays", 1000, 0, 0.0)
    for number in range(1000):
        queue.add(0, f"new {number}", 1, 0, 0.0)
        next_of(queue)
    assert len(queue._tags) < 50
