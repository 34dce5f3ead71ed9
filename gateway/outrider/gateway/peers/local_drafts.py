"""Drafting in the gateway's own process, by methods that need no model: a Drafter without a service. Its drafts are
one-hot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from outrider.gateway.speculation.backends import Lost
from outrider.planner.method_choice import MethodChoice, MethodRates, Offer
from outrider.proposers.base import LearningProposer, Lookup, SequenceContext, TokenProposer, teach
from outrider.proposers.registry import method_of
from outrider.rpc.errors import Internal
from outrider.rpc.messages import (
    Commit,
    Credit,
    DraftEvent,
    DraftInfo,
    DraftMethod,
    DraftTokens,
    ModelInfo,
    Open,
    to_failure,
)

log = logging.getLogger(__name__)


class LocalDrafter:
    """Opens the methods that a request names, else the defaults, for each sequence; always there."""

    def __init__(self, proposers: Sequence[TokenProposer], in_turn: bool = False) -> None:
        """By default the first drafts, or all of them `in_turn`."""
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._learners = [proposer for proposer in proposers if isinstance(proposer, LearningProposer)]
        self._rates = MethodRates()
        defaults = tuple(self._proposers) if in_turn and len(proposers) > 1 else ()
        name = ",".join(defaults) or proposers[0].name
        model = ModelInfo(name=name, digest="", vocab_size=0, max_model_len=0)
        rows = [(method_of(each.name), isinstance(each, LearningProposer)) for each in proposers]
        methods = tuple(DraftMethod(row.name, row.needs_features, row.can_run_ahead, learns) for row, learns in rows)
        self._info = DraftInfo(model, methods, default_methods=defaults)

    @property
    def info(self) -> DraftInfo:
        """A draft without a model."""
        return self._info

    @property
    def round_trip_us(self) -> float:
        """None: it is in process."""
        return 0.0

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> _LocalLink | None:
        """Starts a sequence; None for a method that is not here."""
        names = request.named_methods or self._info.defaults
        if not all(name in self._proposers for name in names):
            return None
        tokens = [*request.prompt_ids, *request.output_ids]
        context = SequenceContext(len(request.prompt_ids), request.salt, request.prediction)
        drafted = context if request.may_recall else context.alone()
        lookups = [Lookup.of(self._proposers[name], tokens, drafted) for name in names]
        choice = MethodChoice(self._rates) if len(lookups) > 1 else None
        return _LocalLink(lookups, choice, tokens, context, self._learners, request.first_chain, on_event)

    def close(self) -> None:
        """Ends the methods that have learned."""
        for learner in self._learners:
            learner.close()


class _LocalLink:
    """One sequence: every credit, and every commit within it, is answered by one piece, a new chain at the committed
    length. What a turn of the event loop sends is taken together, and answered in the next, as a service would."""

    def __init__(
        self,
        lookups: Sequence[Lookup],
        choice: MethodChoice | None,
        tokens: list[int],
        context: SequenceContext,
        learners: Sequence[LearningProposer],
        first_chain: int,
        on_event: Callable[[DraftEvent | Lost], None],
    ) -> None:
        self._lookups, self._choice, self._context, self._learners = lookups, choice, context, learners
        self._tokens = tokens  # those committed
        self._last: tuple[int, Offer, float] | None = None  # chain, what it was, and when it left
        self._chain = first_chain
        self._on_event: Callable[[DraftEvent | Lost], None] | None = on_event
        self._until = 0
        self._loop = asyncio.get_running_loop()

    def send(self, *messages: Commit | Credit) -> None:
        """Commits extend the text, credit asks for its continuation."""
        before, committed = self._until, False
        for message in messages:
            if isinstance(message, Commit):
                self._judge_method(message)
                self._tokens += message.ids
                committed = True
            else:
                self._until = max(self._until, message.until)
        if self._until > len(self._tokens) and (committed or self._until > before):
            self._loop.call_soon(self._propose)

    def close(self) -> None:
        """No event follows."""
        if self._on_event is not None and len(self._tokens) > self._context.prompt_len:
            teach(self._learners, self._tokens, self._context)
        self._on_event = None

    def _propose(self) -> None:
        if self._on_event is None or self._until <= len(self._tokens):  # closed, or the credit is used up, meanwhile
            return
        position, started = len(self._tokens), self._loop.time()
        try:
            found = self._look_up(self._until - position)
        except Exception as error:  # of a method that may be a user's own: the request goes on without
            log.exception("a draft failed")
            self._on_event(to_failure(0, Internal(f"a draft failed: {type(error).__name__}")))
            return
        offers = [Offer.of_lookup(method, len(ids)) for method, ids in found.items()]
        now = self._loop.time()
        piece = DraftTokens(0, self._chain, position, (), draft_us=max(1, round(1e6 * (now - started))))
        if offers:
            chosen = offers[0]
            if self._choice is not None:
                chosen = self._choice.choose(offers, is_awaited=True)
                piece.method = chosen.method
                self._last = self._chain, chosen, now
            piece.ids = tuple(found[chosen.method])
            self._chain += 1
        self._on_event(piece)

    def _look_up(self, room: int) -> dict[str, list[int]]:
        """What goes on from the committed tokens, by the methods that have something."""
        found = {}
        for lookup in self._lookups:
            started = self._loop.time()
            if ids := lookup.propose(self._tokens, room):
                found[lookup.method] = ids
            if self._choice is not None:
                self._choice.rates.add_draft(lookup.method, len(ids), 1e6 * (self._loop.time() - started))
        return found

    def _judge_method(self, commit: Commit) -> None:
        """Learns what came of the method that drafted the window."""
        if self._choice is None or self._last is None or not commit.num_drafted or commit.chain != self._last[0]:
            return
        _, offer, left = self._last
        num_drafted = min(commit.num_drafted, offer.num_tokens)
        rest_us = 1e6 * (self._loop.time() - left)
        self._choice.add_round(offer.kind, num_drafted, min(commit.num_accepted, num_drafted), rest_us)
        self._last = None
