"""Who waits, and who of them is next: fair between callers by the tokens that they ask for, by priority within bounds,
and first come first served between requests of one caller and one priority. The clock is given.

Callers: each has a tag, the tokens that it has been let in with, and the least goes first (start-time fair queueing;
Goyal, Vin and Cheng 1997). One that comes anew starts at the virtual time, which advances by every request's tokens
over the number of callers that wait, and never lags behind all tags (as WF2Q+ does; Bennett and Zhang 1997). So it has
no claim for the time that it was away, and however many come anew, who waits is passed a bounded number of times.

Priorities: the lowest number goes first, and others join it once they have waited `step_s` for each number between, or
for MOST_STEPS of them. From then on they are equals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.rpc.messages import MOST_STEPS, PRIORITY_STEP_S

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[Item]):
    """A request that waits."""

    item: Item
    caller: str
    cost: float  # tokens
    priority: int
    since: float  # seconds, on the queue's clock
    number: int  # of arrival


class FairQueue(Generic[Item]):
    """Requests that wait. It holds nothing of callers once nobody waits."""

    def __init__(self, step_s: float = PRIORITY_STEP_S) -> None:
        self._step_s = step_s
        self._flows: dict[tuple[str, int], OrderedDict[int, Ticket[Item]]] = {}  # by caller and priority, by arrival
        self.num_waiting = 0
        self._num_of: dict[str, int] = {}  # that wait, by caller
        self._tags: dict[str, float] = {}  # tokens: by caller, also of some that do not wait now
        self._virtual = 0.0  # tokens
        self._num_arrived = 0
        self._held: Ticket[Item] | None = None

    def add(self, item: Item, caller: str, cost: float, priority: int, now: float) -> Ticket[Item]:
        """Takes a request behind those of its caller and priority."""
        self.num_waiting, self._num_arrived = self.num_waiting + 1, self._num_arrived + 1
        ticket = Ticket(item, caller, cost, priority, now, self._num_arrived)
        if caller not in self._num_of:
            self._tags[caller] = max(self._virtual, self._tags.get(caller, 0.0))
        self._num_of[caller] = self._num_of.get(caller, 0) + 1
        self._flows.setdefault((caller, priority), OrderedDict())[ticket.number] = ticket
        return ticket

    def first(self, now: float, has_enough: Callable[[str], bool] = lambda caller: False) -> Ticket[Item]:
        """Who is next of those that wait; one whose caller has enough is passed over while there are others. Raises
        ValueError where nobody waits."""
        callers = {caller for caller in self._num_of if not has_enough(caller)} or self._num_of.keys()
        if self._held is not None and self._held.caller in callers:
            return self._held
        heads = [next(iter(flow.values())) for (caller, _), flow in self._flows.items() if caller in callers]
        best = min(head.priority for head in heads)
        ready = [head for head in heads if now - head.since >= self._step_s * min(head.priority - best, MOST_STEPS)]
        return min(ready, key=lambda head: (self._tags[head.caller], head.number))

    def not_behind(self, priority: int) -> Iterator[Item]:
        """Those that wait and are not less urgent."""
        for (_, own), flow in self._flows.items():
            if own <= priority:
                yield from (ticket.item for ticket in flow.values())

    def hold(self, ticket: Ticket[Item]) -> None:
        """Nobody overtakes it, as where there is room, and not enough: small ones shall not starve a large one."""
        self._held = ticket

    def let_in(self, ticket: Ticket[Item]) -> None:
        """Takes a request out of the queue, and charges its caller for it."""
        num_callers, cost = len(self._num_of), max(ticket.cost, 1.0)
        self._tags[ticket.caller] += cost
        self.remove(ticket)
        if not self.num_waiting:
            return
        self._virtual = max(self._virtual + cost / num_callers, min(self._tags[caller] for caller in self._num_of))
        if len(self._tags) > 2 * len(self._num_of) + MOST_STEPS:
            absent = [caller for caller in self._tags if caller not in self._num_of]
            for caller in absent:
                if self._tags[caller] <= self._virtual:  # it would start there
                    del self._tags[caller]

    def remove(self, ticket: Ticket[Item]) -> None:
        """Takes a request out of the queue, if it is there."""
        flow = self._flows.get((ticket.caller, ticket.priority), OrderedDict())
        if flow.pop(ticket.number, None) is None:
            return
        self.num_waiting -= 1
        if not flow:
            del self._flows[ticket.caller, ticket.priority]
        self._num_of[ticket.caller] -= 1
        if not self._num_of[ticket.caller]:
            del self._num_of[ticket.caller]
        if self._held is ticket:
            self._held = None
        if not self.num_waiting:
            self._virtual = 0.0
            self._tags.clear()
