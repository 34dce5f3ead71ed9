"""What a request's controller may choose among, and what it has from the requests before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.prepare import Prepared
from outrider.gateway.speculation.contest import SharedTrials
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import AHEAD, Mode, Policy, PolicyLimits

MAX_ADAPTERS = 256  # of which the experience is kept; each takes some kB
MAX_METHODS = 32  # lists of methods that requests may name, of which it is


@dataclass(slots=True)
class Learned:
    """What the requests of one pair of models learn together: those of the same methods, since drafts differ in what
    they take and in how often they are right, and of those the ones of the same adapter, since it changes how often the
    same draft is right; what a verification takes all of them."""

    pair: tuple[str, str]  # the digests of target and draft
    costs: VerifyCosts
    by_methods: dict[tuple[str, ...], tuple[SharedStats, SharedTrials]] = field(default_factory=dict)
    by_adapter: dict[tuple[str, tuple[str, ...]], tuple[SharedStats, SharedTrials]] = field(default_factory=dict)

    def of(
        self, methods: tuple[str, ...], at_target: bool = False, adapter: str = ""
    ) -> tuple[SharedStats, SharedTrials]:
        """What was learned of requests that are drafted for by these methods; by none: the draft's default. Those of an
        adapter (its digest) share with those of none what things take, and judge acceptance by their own."""
        common = self.by_methods.pop(methods, None) or (SharedStats(self.costs), SharedTrials())
        if at_target and not common[0].between.weight:
            common[0].between.add(0.0)  # no wire is between: nothing has to be measured
        self.by_methods[methods] = common  # the latest is the last
        if len(self.by_methods) > MAX_METHODS:
            del self.by_methods[next(iter(self.by_methods))]
        if not adapter:
            return common
        key = adapter, methods
        found = self.by_adapter.pop(key, None) or (common[0].of_other_acceptance(), SharedTrials())
        self.by_adapter[key] = found  # the latest is the last
        if len(self.by_adapter) > MAX_ADAPTERS:
            del self.by_adapter[next(iter(self.by_adapter))]
        return found

    @property
    def stats(self) -> SharedStats:
        """What was learned of the draft's default, else of what was asked for last."""
        return (self.by_methods.get(()) or next(reversed(self.by_methods.values())))[0]


def limits_of(prepared: Prepared, base: Policy, max_draft_tokens: int, max_window: int) -> PolicyLimits | None:
    """None where nothing is to be chosen. A request that names a number of tokens gets that many in every round: it is
    not switched off, and the target waits for its draft."""
    fixed = prepared.request.speculation.num_draft_tokens is not None
    weighs = prepared.acceptance.weighs and not prepared.sampling.greedy
    modes = {
        "auto": (Mode.OFF, Mode.SEQUENTIAL, Mode.CHAINS, Mode.BRANCHES),
        "chains": (Mode.CHAINS,),
        "branches": (Mode.BRANCHES,),
    }.get(prepared.mode, ())
    if not modes:
        return None
    modes = tuple(mode for mode in modes if not (weighs and mode is Mode.BRANCHES)) or (Mode.CHAINS,)
    if not prepared.can_run_ahead:
        modes = tuple(mode for mode in modes if mode not in AHEAD)
    if fixed:
        modes = tuple(mode for mode in modes if mode is not Mode.OFF)
    adapts = prepared.mode == "auto" and not fixed
    most = max(base.num_draft_tokens, max_draft_tokens) if adapts else base.num_draft_tokens
    most = min(most, max_window)
    return PolicyLimits(base, most, not adapts, modes, weighs=weighs, waits=prepared.mode == "auto" and fixed)
