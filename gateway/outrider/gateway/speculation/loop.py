"""The loop: draft, verify, emit, until the sequence ends. Its driver connects the sans-I/O core with a link at a target
and one at a draft. Events come in from the links' callbacks and effects leave in the same turn of the event loop: no
task stands between the two sides, and a commit is on its way to the draft before the client has seen it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.speculation.backends import Drafter, DrafterLink, Lost, Verifier, VerifierLink
from outrider.gateway.speculation.core import (
    NO_ADAPTER,
    UNAVAILABLE,
    CloseDraft,
    Effect,
    Emit,
    EmitPrompt,
    Fail,
    OpenDraft,
    OpenTarget,
    SpeculationCore,
    ToDraft,
    ToTarget,
)
from outrider.gateway.speculation.retry_budget import Retries
from outrider.planner.policy import Policy, PolicyController, Round
from outrider.rpc.errors import OutriderError, unexpected
from outrider.rpc.logs import of
from outrider.rpc.messages import (
    Commit,
    DraftEvent,
    DraftTokens,
    Failure,
    Open,
    PromptLogprobs,
    TargetEvent,
    from_failure,
    to_failure,
)

log = logging.getLogger(__name__)

DRAFT_RETRY_S = 1.0  # after a draft was lost
FULL_DRAFT_RETRY_S = 0.1  # no sooner is a full one asked again, whatever it says
TARGET_RETRY_S = 0.1  # while a lost target has no successor yet; later where one is full, and says when


def no_target(adapter: str = "") -> Failure:
    """Nobody is there that computes the sequence; one of an adapter goes to targets that have it alone."""
    which = f"target that has the adapter {adapter!r}" if adapter else "target"
    return Failure(0, UNAVAILABLE, f"no {which} can take the request", "NO_TARGET", retry_after_ms=1000)


@dataclass(slots=True, eq=False)
class SpeculationDriver:
    """Connects the core of one sequence with its two links."""

    drafter: Drafter | None
    verifier: Verifier
    core: SpeculationCore
    loop: asyncio.AbstractEventLoop
    fork_of: SpeculationDriver | None
    on_draft_stop: Callable[[str], None]
    retries: Retries | None = None  # of all sequences together; None: any number
    on_piece: Callable[[DraftTokens], None] | None = None  # told of drafted tokens as they come
    items: asyncio.Queue[Round | PromptLogprobs | Failure] = field(default_factory=asyncio.Queue)
    target_link: VerifierLink | None = None
    draft_link: DrafterLink | None = None
    closed: bool = False
    _effects: deque[Effect] = field(default_factory=deque)
    _applying: bool = False
    _draft_epoch: int = 0
    _target_epoch: int = 0
    _draft_retry_at: float | None = None
    _give_up_at: float | None = None  # while no target can take the sequence again
    _refused_by: list[VerifierLink] = field(default_factory=list)  # since a target was last sought
    _timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Opens the sequence at the target, and at the draft if there is one."""
        self._apply(self.core.start(self.loop.time()))

    def read(self, position: int) -> None:
        """The caller has taken every token below `position`."""
        self._apply(self.core.on_read(position, self.loop.time()))

    def fail(self, failure: Failure) -> None:
        """Ends the sequence with an error, as when its time ran out. A timer may call it: it raises nothing."""
        self._guard(lambda: self._apply(self.core.give_up(failure)))

    def close(self) -> None:
        """Releases what is still open on both sides."""
        self.closed = True
        self._effects.clear()
        if self._timer is not None:
            self._timer.cancel()
        links = [link for link in (self.target_link, self.draft_link) if link is not None]
        self.target_link = self.draft_link = None
        with ExitStack() as stack:  # each is closed, whatever another's close raises
            for link in links:
                stack.callback(link.close)

    def _apply(self, effects: list[Effect]) -> None:
        """Effects of events that arise while effects are applied follow behind them."""
        if not effects:
            return
        self._effects.extend(effects)
        if self._applying:
            return
        self._applying = True
        try:
            while self._effects and not self.closed:
                self._apply_one(self._effects.popleft())
        finally:
            self._applying = False

    def _guard(self, handle: Callable[..., None], *arguments: Any) -> None:
        """Handles an event or a timer. One sequence's error must not end the stream that others share, and must not
        leave its own reader waiting for ever."""
        try:
            handle(*arguments)
        except OutriderError as error:  # a message that no frame can hold
            self._end_by(error)
        except Exception as error:
            log.error("a sequence ends by an unexpected error", exc_info=error, extra=of(self.core.request))
            self._end_by(unexpected(error))

    def _end_by(self, error: OutriderError) -> None:
        self._effects.clear()
        self.core.finished = True
        self.items.put_nowait(to_failure(0, error))

    def _apply_one(self, effect: Effect) -> None:
        match effect:
            case ToTarget(messages):
                if self.target_link is not None:
                    self.target_link.send(*messages)
            case ToDraft(messages):
                if self.draft_link is not None:
                    self.draft_link.send(*messages)
            case Emit(closed):
                self.items.put_nowait(closed)
            case EmitPrompt(logprobs):
                self.items.put_nowait(logprobs)
            case OpenTarget():
                self._open_target(effect)
            case OpenDraft():
                self._open_draft(effect)
            case CloseDraft():
                self._close_draft(effect)
            case Fail(failure):
                self.items.put_nowait(failure)

    def _open_target(self, effect: OpenTarget) -> None:
        self._target_epoch += 1
        epoch = self._target_epoch

        def on_event(event: TargetEvent | Lost) -> None:
            if epoch == self._target_epoch and not self.closed:
                self._guard(self._on_target, event)

        if effect.refusal is None:
            self._refused_by.clear()
        elif self.target_link is not None:
            self._refused_by.append(self.target_link)
        if self.target_link is not None:
            self.target_link.close()
        parent = None if self.fork_of is None else self.fork_of.target_link
        again = self.retries if self.core.has_run and effect.refusal is None else None
        self.target_link = None
        if again is None or again.allows_target(self.loop.time()):
            self.target_link = self.verifier.open(effect.request, on_event, parent, effect.like, self._refused_by)
        if self.target_link is None:
            self._wait_for_target(effect.refusal)
            return
        if again is not None:
            again.targets.spend()
        self.core.on_target_open(self.target_link.model)
        self.target_link.send(*effect.messages)

    def _on_target(self, event: TargetEvent | Lost) -> None:
        now = self.loop.time()
        if isinstance(event, Commit | Lost):
            self._give_up_at = None
        self._apply(self.core.on_target(event, now))
        if self._draft_retry_at is not None and now >= self._draft_retry_at:
            self._draft_retry_at = now + DRAFT_RETRY_S
            is_there = self.drafter is not None and self.drafter.info is not None
            if is_there and (self.retries is None or self.retries.take_draft(now)):
                self._apply(self.core.resume_drafting())

    def _on_draft(self, event: DraftEvent | Lost) -> None:
        if self.on_piece is not None and isinstance(event, DraftTokens):
            self.on_piece(event)
        self._apply(self.core.on_draft(event))

    def _wait_for_target(self, refusal: Failure | None) -> None:
        """A sequence that lost its target waits a while for one, a new one for room, or for a target to come back."""
        now, policy = self.loop.time(), self.core.policy
        if self._give_up_at is None:
            wait_s = policy.room_s if refusal is not None else policy.away_s
            self._give_up_at = now + (policy.reopen_s if self.core.has_run else wait_s)
        lacks = refusal is not None and refusal.reason == NO_ADAPTER and not self.core.has_run
        if lacks or self._may_begin_anew or now >= self._give_up_at:
            self._apply(self.core.give_up(refusal or no_target(self.core.request.adapter)))
            return
        pause = TARGET_RETRY_S
        if refusal is not None:
            pause = max(pause, refusal.retry_after_ms / 1000 * self._spread())
        self._timer = self.loop.call_later(min(pause, self._give_up_at - now), self._retry_target)

    @property
    def _may_begin_anew(self) -> bool:
        """Whether nothing is there that another model than the present one shall go on with."""
        request = self.core.request
        if self.core.has_run or request.output_ids or not request.model_digest:
            return False
        return request.model_digest != self.verifier.info.digest_of(request.adapter)

    def _spread(self) -> float:
        """A factor from 1 to 1.5, another one for each sequence: those that lost one target do not come back all at
        once."""
        request = self.core.request
        return 1 + hash((request.seed, request.completion, len(self.core.committed))) % 1024 / 2048

    def _retry_target(self) -> None:
        if not self.closed:
            self._guard(lambda: self._apply(self.core.retry_target(self.loop.time())))

    def _open_draft(self, effect: OpenDraft) -> None:
        self._draft_epoch += 1
        epoch = self._draft_epoch

        def on_event(event: DraftEvent | Lost) -> None:
            if epoch == self._draft_epoch and not self.closed:
                self._guard(self._on_draft, event)

        self.draft_link = self.drafter.open(effect.request, on_event) if self.drafter is not None else None
        if self.draft_link is None:
            self._apply(self.core.stop_drafting("no draft is reachable", may_return=True))
            return
        self._draft_retry_at = None
        self.draft_link.send(*effect.messages)

    def _close_draft(self, effect: CloseDraft) -> None:
        self._draft_epoch += 1
        link, self.draft_link = self.draft_link, None
        if link is not None:
            link.close()
        if effect.reason:
            pause_s = DRAFT_RETRY_S
            if effect.retry_after_ms:
                pause_s = max(effect.retry_after_ms / 1000 * self._spread(), FULL_DRAFT_RETRY_S)
            self._draft_retry_at = self.loop.time() + pause_s if effect.may_return else None
            self.on_draft_stop(effect.reason)


def warn_of_draft(reason: str) -> None:
    """Says that a sequence lost its draft."""
    log.warning("decoding goes on without a draft: %s", reason)


async def speculate(
    drafter: Drafter | None,
    verifier: Verifier,
    request: Open,
    policy: Policy,
    *,
    examines_text: bool = False,
    at_target: bool = False,
    most_drafted: Callable[[], int] | None = None,
    fork_of: SpeculationDriver | None = None,
    driver_out: list[SpeculationDriver] | None = None,
    on_draft_stop: Callable[[str], None] = warn_of_draft,
    controller: PolicyController | None = None,
    retries: Retries | None = None,
    on_piece: Callable[[DraftTokens], None] | None = None,
) -> AsyncGenerator[Round | PromptLogprobs, None]:
    """Yields rounds (and the prompt's log probabilities, if asked for) until the target ends the sequence or the caller
    stops. With `at_target` the target drafts by the request's method, `most_drafted` tokens a round, and there is no
    drafter. A round counts as read when the next one is asked for. Raises OutriderError when no target can go on."""
    info = None if drafter is None else drafter.info
    learns = info is not None and any(method.learns for method in info.methods)
    core = SpeculationCore(request, policy, examines_text, controller, learns, at_target, most_drafted)
    loop = asyncio.get_running_loop()
    driver = SpeculationDriver(drafter, verifier, core, loop, fork_of, on_draft_stop, retries, on_piece)
    if driver_out is not None:
        driver_out.append(driver)
    try:
        driver.start()
        while True:
            item = await driver.items.get()
            if isinstance(item, Failure):
                raise from_failure(item)
            yield item
            if isinstance(item, Round):
                if item.commit.finish_reason is not None:
                    return
                driver.read(item.commit.position + len(item.commit.ids))
    finally:
        driver.close()
