"""A head is tried before it is believed: an engine of its own goes on from known texts with it, and what the target
keeps of its drafts says whether it was made for this target, and read as it was trained. Where few tokens are kept, or
its files leave something open, the same weights are tried by the other known conventions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from outrider.engine.models.base import UnsupportedModel
from outrider.planner.draft_trial import MOST_DRAFTED, NUM_TOKENS, judge_trial
from outrider.proposers.heads.conventions import Convention
from outrider.proposers.heads.loading import AnyHead
from outrider.rpc.messages import WORTH_HAVING, Commit, Credit, DraftTrial, Open, TargetEvent
from outrider.rpc.servicer import Deliver
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams
from outrider.target_service.engine import TargetEngine

BETTER = 1.1  # times the tokens a round: less may be chance
FEW = 2  # tokens of a window tell one convention from another, at a third of a long one's rows

Verdict = Literal["refuse", "warn", "off"]
log = logging.getLogger(__name__)


class TriedHead(NamedTuple):
    """A head, if there is one that was not refused, and what it was found to be worth, if it was tried."""

    head: AnyHead | None
    trial: DraftTrial | None = None


NO_HEAD = TriedHead(None)


@dataclass(frozen=True, slots=True)
class HeadTrials:
    """How a head is tried: what it is tried on, by which engine, and how its files are read otherwise."""

    prompts: Sequence[tuple[int, ...]]
    engine_for: Callable[[AnyHead], TargetEngine]  # in which nothing is open
    read_as: Callable[[Mapping[str, Any]], AnyHead]  # with changes of its config.json. Raises UnsupportedModel
    max_window: int

    def judge(self, head: AnyHead, conventions: Iterable[Convention], verdict: Verdict) -> TriedHead:
        """The head as its files say, or, where they leave that open, as the target keeps more of it."""
        best, trial = head, self.run(head)
        is_worth_having = bool(trial.accepted) and trial.accepted[0] >= WORTH_HAVING
        hint = ""
        for convention in conventions:
            if is_worth_having and not convention.is_open:
                continue
            other = self._read_by(convention)
            found = None if other is None else self.run(other, FEW)
            if other is None or found is None or found.tokens_per_round <= BETTER * trial.within(FEW).tokens_per_round:
                continue
            if convention.is_open:
                best, trial, hint = other, self.run(other), f"{convention.name}, which its files do not say"
            elif not hint:
                hint = f"its files say otherwise, but if {convention.name}, {found}"
        return _judged(best, replace(trial, remark=hint), verdict)

    def run(self, head: AnyHead, most_drafted: int = MOST_DRAFTED) -> DraftTrial:
        """What the target keeps of a head's drafts."""
        num_drafted = min(most_drafted, self.max_window, head.most_tokens)
        return judge_trial(
            head.name, completed(self.engine_for(head), head.name, self.prompts, num_drafted, NUM_TOKENS)
        )

    def _read_by(self, convention: Convention) -> AnyHead | None:
        """None where the weights cannot be read so."""
        try:
            return self.read_as(convention.changes)
        except UnsupportedModel:
            return None


def _judged(head: AnyHead, trial: DraftTrial, verdict: Verdict) -> TriedHead:
    """Says what was found, and whether the head drafts."""
    log.info("%s was tried: %s", trial.method, trial)
    if trial.remark:
        log.warning("%s: %s", trial.method, trial.remark)
    if not trial.is_useless:
        return TriedHead(head, trial)
    why = f"the {trial.method} head is no draft for this target: {trial}. Was it trained for it, and for these weights?"
    if verdict == "warn":
        log.warning("%s It drafts all the same", why)
        return TriedHead(head, trial)
    log.error("%s It does not draft; everything is decoded plainly (--head-trial warn lets it draft)", why)
    return TriedHead(None, replace(trial, refused=True))


def completed(
    engine: TargetEngine,
    method: str,
    prompts: Sequence[Sequence[int]],
    num_drafted: int,
    num_tokens: int,
    temperature: float = 0.0,
) -> list[Commit]:
    """All that an engine commits behind prompts, whose windows have at most so many drafted tokens."""
    said: list[TargetEvent] = []
    for number, prompt in enumerate(prompts, 1):
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
        opened = Open(number, tuple(prompt), sampling, seed=number, method=method, acceptance=AcceptanceRule.REJECTION)
        credit = Credit(number, len(prompt) + num_tokens, num_drafted)
        engine.handle(Deliver(1, [opened, credit], said.append))
    while engine.step(time.monotonic()) is not None:
        continue
    return [event for event in said if isinstance(event, Commit)]
