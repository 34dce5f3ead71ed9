"""How many experts of a mixture a step's rows wake, and what that costs: the weights of each are read, for one row or
for many. Drafted tokens cost as much more as they wake experts that no other row woke.

Of E experts a row chooses c. m rows that chose independently of one another would wake

    D(m) = E (1 - (1 - c / E)^m)

of each layer's. Rows of one text choose alike, those of different texts less so: n sequences with r rows in all count
as m = 1 + apart (n - 1) + along (r - n) of them, where both factors are fitted to what steps woke (recursive least
squares; what woke nearly all says little)."""

from __future__ import annotations

from math import log1p

from outrider.rpc.words.expert_costs import ExpertCosts

PRIOR = 4.0  # steps that chose as those at the start did count as much
MEMORY = 64.0  # steps that the fit looks back on
MOST = 2.0  # of a factor


class WokenExperts:
    """Foresees them, and what they cost more or less than those of the profile did."""

    def __init__(self, costs: ExpertCosts) -> None:
        self.costs = costs
        self._share = costs.num_chosen / costs.num_experts  # of the experts, that a row wakes
        self._apart = self._along = costs.along
        self._squares = (0.0, 0.0, 0.0)  # weighted sums of (n - 1)^2, (n - 1)(r - n) and (r - n)^2
        self._products = (0.0, 0.0)  # of (n - 1) and of (r - n) times what steps said

    def at(self, num_rows: float, num_sequences: float = 1.0) -> float:
        """Experts that all layers together are expected to wake."""
        sequences = min(num_sequences, num_rows)
        return self._of(1 + self._apart * (sequences - 1) + self._along * (num_rows - sequences))

    def extra_us(self, num_rows: float, num_sequences: float = 1.0) -> float:
        """Microseconds that a step takes more than the profile's of as many rows."""
        return self.us_of(self.at(num_rows, num_sequences), num_rows)

    def us_of(self, num_woken: float, num_rows: float) -> float:
        """The same of a step that woke so many."""
        return self.costs.expert_us * (num_woken - self._of(1 + self.costs.along * (num_rows - 1)))

    def add(self, num_rows: int, num_sequences: int, num_woken: int) -> None:
        """A step woke so many."""
        asleep = 1 - num_woken / (self.costs.num_layers * self.costs.num_experts)
        if num_rows < 2 or not num_woken or asleep <= 0:
            return
        weight = asleep * asleep  # the more are awake, the less one more row changes
        apart, along = num_sequences - 1, num_rows - num_sequences
        said = log1p(asleep - 1) / log1p(-self._share) - 1
        fade = 1 - 1 / MEMORY
        both, mixed, alone = self._squares
        self._squares = (
            fade * both + weight * apart * apart, fade * mixed + weight * apart * along,
            fade * alone + weight * along * along,
        )  # fmt: skip
        of_apart, of_along = self._products
        self._products = fade * of_apart + weight * apart * said, fade * of_along + weight * along * said
        self._solve()

    def _solve(self) -> None:
        """Of the normal equations, under the prior that the start's rows are."""
        both, mixed, alone = self._squares
        both, alone = both + PRIOR, alone + PRIOR
        first, second = (product + PRIOR * self.costs.along for product in self._products)
        determinant = both * alone - mixed * mixed
        self._apart = min(MOST, max(0.0, (first * alone - second * mixed) / determinant))
        self._along = min(MOST, max(0.0, (second * both - first * mixed) / determinant))

    def _of(self, independent: float) -> float:
        """D(m) of all layers."""
        asleep: float = (1 - self._share) ** max(1.0, independent)
        return self.costs.num_layers * self.costs.num_experts * (1 - asleep)


def woken_experts(costs: ExpertCosts | None) -> WokenExperts | None:
    """None where there are none, or rows wake them all."""
    if costs is None or not 0 < costs.num_chosen < costs.num_experts or not costs.num_layers:
        return None
    return WokenExperts(costs)
