"""What a request's controller may choose among, and what it has from the requests before it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from outrider.gateway.prepare import Prepared
from outrider.gateway.speculation.contest import SharedTrials
from outrider.planner.estimates import StepTime
from outrider.planner.forecast import SharedStats, VerifyCosts
from outrider.planner.policy import AHEAD, Mode, Policy, PolicyLimits
from outrider.rpc.messages import DraftInfo, TargetInfo

MAX_METHODS = 32  # lists of methods that requests may name, of which the experience is kept
MAX_KINDS = 256  # of requests of each, four an adapter; one takes some kB

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RequestKind(NamedTuple):
    """Requests for which the same draft is right about as often."""

    adapter: str = ""  # its digest
    is_drawn: bool = False  # by a temperature; else greedy
    is_constrained: bool = False

    @classmethod
    def of(cls, prepared: Prepared) -> RequestKind:
        """That of one request."""
        sampling = prepared.sampling
        adapter = prepared.model_digest if prepared.request.adapter else ""
        return cls(adapter, not sampling.greedy, sampling.structured_output is not None)


PLAIN = RequestKind()


@dataclass(slots=True)
class OfMethods:
    """What the requests of one list of methods learned."""

    common: SharedStats  # what things take; the acceptance of none
    by_kind: dict[RequestKind, tuple[SharedStats, SharedTrials]] = field(default_factory=dict)


@dataclass(slots=True)
class Learned:
    """What the requests of one pair of models learn together: what a verification takes, all of them; what drafts take,
    those of the same methods; and of those the ones of a kind, how often a draft is right and what is best by that. An
    average over kinds would hold for none: greedy text that repeats itself pays where drawn text does not."""

    pair: tuple[str, str]  # the digests of target and draft
    costs: VerifyCosts
    by_methods: dict[tuple[str, ...], OfMethods] = field(default_factory=dict)

    def of(
        self,
        methods: tuple[str, ...],
        at_target: bool = False,
        kind: RequestKind = PLAIN,
        draft_costs: Sequence[tuple[int, int]] = (),
        apart: bool = True,
    ) -> tuple[SharedStats, SharedTrials]:
        """What was learned of requests of a kind that are drafted for by these methods; by none: the draft's default.
        What a drafted token takes and whether the draft has a machine of its own is what is known to begin with."""

        def new() -> OfMethods:
            return OfMethods(SharedStats(self.costs, StepTime(draft_costs), apart))

        known = _kept(self.by_methods, methods, MAX_METHODS, new)
        if at_target and not known.common.between.weight:
            known.common.between.add(0.0)  # no wire is between: nothing has to be measured
        return _kept(known.by_kind, kind, MAX_KINDS, lambda: (known.common.of_other_acceptance(), SharedTrials()))

    @property
    def of_default(self) -> list[SharedStats]:
        """What was learned of the draft's default, of each kind, else of what was asked for last."""
        known = self.by_methods.get(()) or next(reversed(self.by_methods.values()))
        return [stats for stats, _ in known.by_kind.values()]


def _kept(known: dict[Key, Value], key: Key, most: int, new: Callable[[], Value]) -> Value:
    """That of a key, which is the latest from now on, or a new one; the oldest go."""
    found = known[key] = known.pop(key) if key in known else new()
    if len(known) > most:
        del known[next(iter(known))]
    return found


def draft_costs_of(draft: DraftInfo | None, methods: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Of a drafted token, by sequences, as the draft says of the methods that a request names; none: its default.
    Empty where it says nothing, as of lookups."""
    if draft is None:
        return ()
    named = methods or draft.defaults
    return next((row.step_costs for row in draft.methods if row.name in named and row.step_costs), ())


def are_apart(target: TargetInfo, draft: DraftInfo | None) -> bool:
    """Whether no core that the target computes on drafts, too, as far as both say."""
    if draft is None or not target.machine or target.machine != draft.machine:
        return True
    return "cpu" not in (target.model.device, draft.model.device)


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
