"""What a target may have beside plain decoding, each part behind the same hooks: constraints, adapters, and the choice
of windows by what steps cost. A head that drafts (`heads`) and the choice of threads (`profile`) are parts, too.

The engine asks its parts in their order, on the device thread. A step is theirs from `launching` to `ended`, with an
object of its own that holds what they need of it, so that one may be launched before another is finished."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.adapters.resident import ResidentAdapters
from outrider.engine.batch import PreparedAdapter
from outrider.engine.profile import StepProfile
from outrider.engine.token_tree import depths_of
from outrider.rpc.errors import OutriderError
from outrider.rpc.messages import Open
from outrider.rpc.words.expert_costs import ExpertCosts
from outrider.rpc.words.structured import CONSTRAINTS
from outrider.target_service.adapters import AdapterTable, AdapterTurns, ServedAdapter
from outrider.target_service.device_verifier import StepVerifier
from outrider.target_service.goodput import Goodput
from outrider.target_service.grammars import POLL_S, Grammars, StepMasks, refused
from outrider.target_service.outputs import ComputedStep, VerifiedWindow
from outrider.target_service.scheduler import ScheduledSequence, TargetScheduler
from outrider.target_service.sequence import TargetSequence

Refusal = tuple[TargetSequence, OutriderError]


@dataclass(slots=True, eq=False)
class StepUnderWay:
    """A step that was planned, until its windows have been judged."""

    scheduled: Sequence[ScheduledSequence]  # once launched without those whose masks are late
    started_ns: int  # wall clock
    started: float  # on the engine's clock
    masks: StepMasks | None = None  # where some window has a constraint

    @property
    def mask_us(self) -> int:
        """What the device thread spent on masks."""
        return 0 if self.masks is None else round(self.masks.wait_s * 1e6)


class EnginePart:
    """The hooks, which do nothing unless a part says otherwise."""

    capabilities: tuple[str, ...] = ()  # that the target says it has
    lets_follow: bool = True  # a step may be launched before the one before it is finished

    def measured(self, costs: StepProfile, context_us: float, experts: ExpertCosts | None = None) -> None:
        """Steps were measured, and what a token adds that they look back on, and an expert; nothing is open yet."""

    def opened(self, target: TargetSequence) -> None:
        """A sequence comes. Raises an OutriderError where it may not: the parts behind this one never hear of it."""

    def released(self, target: TargetSequence) -> None:
        """A sequence ends, for whatever reason."""

    def refusals(self, sequences: Collection[TargetSequence], now: float) -> Iterator[Refusal]:
        """Between two steps: the sequences that cannot go on, and why."""
        yield from ()

    def next_look(self, sequences: Collection[TargetSequence], now: float) -> float:
        """When `refusals` has to be asked again at the latest."""
        return math.inf

    def launching(self, step: StepUnderWay) -> None:
        """The pass over the model comes next."""

    def judging(self, step: StepUnderWay, pass_s: float) -> None:
        """The pass took so long; its windows are judged next."""

    def ended(self, step: StepUnderWay) -> None:
        """Its windows were judged, or something of it raised; what the part holds for it is given back."""

    def finished(self, step: ComputedStep) -> None:
        """What was computed is committed next."""

    def committing(self, verified: VerifiedWindow) -> None:
        """A window is committed next; what raises here costs its sequence alone."""

    def committed(self, step: ComputedStep) -> None:
        """All was committed that the step has computed."""

    def stats(self) -> Mapping[str, Any]:
        """Fields of EngineStats, by their names; from any thread."""
        return {}

    def close(self) -> None:
        """The device thread has ended."""


class Constraints(EnginePart):
    """Masks of what may follow, made on other threads."""

    capabilities = CONSTRAINTS

    def __init__(self, grammars: Grammars, verifier: StepVerifier) -> None:
        self._grammars, self._verifier = grammars, verifier

    def opened(self, target: TargetSequence) -> None:
        """Starts to compile what it asks for. Raises ResourceExhausted where too many wait."""
        if target.wants_constraint:
            self._grammars.open(target)

    def released(self, target: TargetSequence) -> None:
        """Nobody waits for its constraint any more."""
        if target.is_waiting:
            self._grammars.forget(target)

    def refusals(self, sequences: Collection[TargetSequence], now: float) -> Iterator[Refusal]:
        """Lets sequences go on that waited for their constraint; some of these cannot be served."""
        for target in [target for target in sequences if target.is_waiting]:
            if (error := self._grammars.resume(target, now)) is not None:
                yield target, error

    def next_look(self, sequences: Collection[TargetSequence], now: float) -> float:
        """To be asked again soon, while sequences wait."""
        return now + POLL_S if any(target.is_waiting for target in sequences) else math.inf

    def launching(self, step: StepUnderWay) -> None:
        """Has masks made while the pass runs."""
        if any(scheduled.target.sampler.constrained for scheduled in step.scheduled):
            windows = [scheduled for scheduled in step.scheduled if scheduled.samples]
            step.masks = self._grammars.start(windows, self._verifier.takes_masks_lazily)

    def judging(self, step: StepUnderWay, pass_s: float) -> None:
        """Waits a little for masks that are late."""
        if step.masks is not None:
            step.masks.wait(pass_s)

    def ended(self, step: StepUnderWay) -> None:
        """Counts its masks; nobody else may use a matcher while they are made."""
        if step.masks is not None:
            step.masks.close()

    def stats(self) -> Mapping[str, Any]:
        """What masks took, and what was refused."""
        grammars = self._grammars
        return {
            "num_refused_constraints": grammars.num_refused,
            "num_late_masks": grammars.num_late,
            "mask_seconds": grammars.mask_seconds,
            "mask_wait_seconds": grammars.wait_seconds,
        }

    def close(self) -> None:
        """Ends the threads."""
        self._grammars.close()


class NoConstraints(EnginePart):
    """Refuses constraints: the target has no tokenizer that says its tokens' bytes."""

    def opened(self, target: TargetSequence) -> None:
        """Raises InvalidArgument for a sequence that has a constraint."""
        if target.wants_constraint:
            raise refused("is not supported by this target, which has no tokenizer for it; leave it unset")


def constraints_of(grammars: Grammars | None, verifier: StepVerifier, head: str | None) -> EnginePart:
    """What serves constraints, or refuses them; `head` is the method that drafts beside the model."""
    if grammars is None:
        return NoConstraints()
    grammars.head = head
    return Constraints(grammars, verifier)


class Adapters(EnginePart):
    """The adapters that sequences may name. Without room on the device (`resident`) there never is one."""

    def __init__(self, resident: ResidentAdapters | None, scheduler: TargetScheduler) -> None:
        self.table = AdapterTable(self._forget)
        self.resident, self._scheduler = resident, scheduler
        if resident is not None:
            scheduler.turns = AdapterTurns(resident.room.num_slots)

    @property
    def num_swaps(self) -> int:
        """Adapters that were put on the device, since the start."""
        return 0 if self.resident is None else self.resident.num_swaps

    def find(self, message: Open, inherited: ServedAdapter | None) -> ServedAdapter | None:
        """The adapter of a new sequence, of which a fork inherits its parent's. Raises NotFound or InvalidArgument."""
        return self.table.find(message, inherited) if message.adapter or inherited else None

    def opened(self, target: TargetSequence) -> None:
        """One sequence more has its adapter."""
        if target.adapter is not None:
            target.adapter.num_sequences += 1

    def released(self, target: TargetSequence) -> None:
        """One sequence fewer has it."""
        if target.adapter is not None:
            self.table.close(target.adapter)
            target.adapter = None

    def stats(self) -> Mapping[str, Any]:
        """How many there are, and who has them."""
        return {
            "num_adapters": len(self.table),
            "adapter_sequences": self.table.num_sequences(),
            "num_adapter_swaps": self.num_swaps,
        }

    def _forget(self, prepared: PreparedAdapter) -> None:
        if self.resident is not None:
            self.resident.forget(prepared)
        if self._scheduler.turns is not None:
            self._scheduler.turns.forget(prepared)


class StepCosts(EnginePart):
    """What steps cost and which drafted tokens hold, by which the scheduler cuts windows once steps were measured."""

    def __init__(self, scheduler: TargetScheduler) -> None:
        self._scheduler = scheduler
        self._step_ended = 0.0

    def measured(self, costs: StepProfile, context_us: float, experts: ExpertCosts | None = None) -> None:
        """From now on the scheduler knows what steps cost."""
        if costs:
            self._scheduler.goodput = Goodput(costs, context_us, experts)

    def finished(self, step: ComputedStep) -> None:
        """Learns what a step took that had windows alone."""
        only_windows = all(one.num_rows == one.num_verify_rows for one in step.scheduled)
        if only_windows and (goodput := self._scheduler.goodput) is not None:
            pause_s = step.started - self._step_ended
            context = sum(one.committed for one in step.scheduled)
            counts = {"context": context, "sequences": len(step.scheduled), "num_woken": step.timings.num_woken}
            goodput.add_step(step.timings.num_rows, step.seconds * 1e6, pause_s * 1e6, **counts)
        self._step_ended = step.ended

    def committing(self, verified: VerifiedWindow) -> None:
        """Learns which drafted tokens hold."""
        if (goodput := self._scheduler.goodput) is not None:
            goodput.add_verified(verified.scheduled.target.acceptance, *drafted_and_accepted(verified))


def drafted_and_accepted(verified: VerifiedWindow) -> tuple[int, int]:
    """What a window says of the draft. A plain token tests a held one, too, where a token holds by being the target's
    own; to be asked before the window is committed."""
    target, window = verified.scheduled.target, verified.scheduled.window
    num_drafted = max(depths_of(window.parents)) if window.parents else len(window.ids) - window.num_forced
    if not num_drafted and not target.rejects:
        held = target.chains.window(1).ids
        return len(held), int(held == verified.ids[:1])
    return num_drafted, min(verified.num_accepted, num_drafted)
