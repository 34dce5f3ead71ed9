"""Which drafted tokens a step that is shared verifies: those that make most tokens per time.

A row for a drafted token pays if the chance that it is of use exceeds goodput x what one more row costs. The chance
falls with the position in a window, so the rows of all sequences are sorted by it, and of the steps that take the first
0, 1, 2, ... of them the one with most expected tokens per time is chosen (goodput: arXiv 2406.14066). The time is the
step's, for its rows, the experts that they wake and the tokens that it looks back on, and the pause before the next
one, in which windows come: the longer these are, the more a step shall verify. What is cut is not drafted in vain:
where all before it holds it is verified next, without a wait. So drafts are not told of cuts: in virtual time to draft
no more gained nothing, and lost where most tokens hold.

It looks at clocks, counts and earlier verifications alone, never at drafted tokens or what they were drawn from. And a
cut refuses nothing: the tokens past it stay held, and each meets the same random numbers whenever it is verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul

from outrider.planner.estimates import Acceptance, StepTime
from outrider.planner.woken import woken_experts
from outrider.rpc.words.expert_costs import ExpertCosts

TARGET_MEMORY = 1024.0  # verifications that the estimate of all sequences looks back on
MARGIN = 1.1  # a cut must promise so much more than whole windows do: what is put off makes the next window short
PROBE_SHARE = 0.03  # of the time goes to whole windows where cut ones seem better: what is never tried is never learned
PAUSE_RATE = 0.1


@dataclass(frozen=True, slots=True)
class GoodputRequest:
    """What one sequence would do in a step, beside what is missing of its prompt: `num_rows` in any case, which test
    `num_sure` drafted tokens, and `further` rows, each of which lets one more drafted token count. All look back on
    `context` tokens."""

    acceptance: Acceptance
    num_rows: int
    num_sure: int = 0
    further: int = 0
    context: int = 0


class Goodput:
    """Chooses windows; knows what steps cost and which tokens hold."""

    def __init__(
        self, step_costs: Iterable[tuple[int, int]], context_us: float = 0.0, experts: ExpertCosts | None = None
    ) -> None:
        self.time = StepTime(step_costs, context_us, woken_experts(experts))
        self._of_all = Acceptance(memory=TARGET_MEMORY, forgets_untested=True)
        self._pause_us = 0.0  # between two steps
        self._cut_us = 0.0  # in steps with cut windows, since there were whole ones

    def add_verified(self, acceptance: Acceptance, num_drafted: int, num_accepted: int) -> None:
        """A window of the sequence that `acceptance` belongs to was verified."""
        acceptance.add(num_drafted, num_accepted)
        self._of_all.add(num_drafted, num_accepted)

    def add_step(
        self,
        num_rows: int,
        step_us: float,
        pause_us: float,
        context: int = 0,
        sequences: int = 1,
        num_woken: int = 0,  # experts
    ) -> None:
        """A step ran, so long after the one before. What is longer than a step was no pause: nobody was there."""
        self.time.add(num_rows, step_us, context=context, sequences=sequences, num_woken=num_woken)
        self._pause_us += PAUSE_RATE * (min(pause_us, step_us) - self._pause_us)

    def rows_beside(self, num_rows: int, share: float, context: int = 0, sequences: int = 1) -> int:
        """How many rows of prompts a step of `num_rows` of so many sequences, which look back on `context` tokens, can
        take if they add at most `share` of what is between its start and the next one's."""
        without_us = self.time.at(num_rows, context, sequences)
        return self.time.rows_beside(num_rows, share * (self._pause_us + without_us))

    def choose(self, requests: Sequence[GoodputRequest], max_rows: int) -> list[int]:
        """How many further rows each gets, of at most `max_rows` for all. Chunks of prompts in the same step do not
        count: they take a share of the time that windows take, so that a row costs what it costs without them."""
        whole = [request.further for request in requests]
        if len(requests) < 2 or not any(whole):
            return whole
        priors = self._of_all.first(max(request.num_sure + request.further for request in requests))
        tokens, gains, rows = 0.0, [], 0
        for request in requests:
            chances = request.acceptance.first(request.num_sure + request.further, priors)
            survival = list(accumulate(chances, mul))
            tokens += 1 + sum(survival[: request.num_sure])
            rows += request.num_rows
            gains.append(survival[request.num_sure :])

        room = min(max(0, max_rows - rows), sum(whole))
        first, context = min(rows, max_rows), sum(request.context for request in requests)
        times = [self._pause_us + step_us for step_us in self.time.between(first, first + room, context, len(requests))]
        chosen = best_rows(gains, tokens, times)
        longest = whole if room == sum(whole) else best_rows(gains, tokens, [1.0] * len(times))
        self._cut_us = 0.0 if chosen == longest else self._cut_us + times[sum(chosen)]
        if PROBE_SHARE * self._cut_us >= times[sum(longest)]:
            self._cut_us = 0.0
            return longest
        return chosen


def best_rows(gains: Sequence[Sequence[float]], tokens: float, times: Sequence[float]) -> list[int]:
    """How many of its gains each sequence takes. `gains` are the tokens that each further row is expected to add,
    falling; `tokens` those of a step without further rows, and `times` those of steps with 0, 1, ... of them, as far as
    there is room."""
    order = sorted(chain.from_iterable([(-gain, i, j) for j, gain in enumerate(row)] for i, row in enumerate(gains)))
    order = order[: len(times) - 1]
    totals = accumulate((-loss for loss, _, _ in order), initial=tokens)
    goodputs = [total / us for total, us in zip(totals, times, strict=False)]
    best = max(range(len(goodputs)), key=lambda count: (goodputs[count], count))
    if goodputs[best] <= MARGIN * goodputs[-1]:
        best = len(order)
    taken = [0] * len(gains)
    for _, index, _ in order[:best]:
        taken[index] += 1
    return taken
