"""Drafting in the gateway's own process, by methods that need no model: a Drafter without a service. Its drafts are
one-hot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from outrider.gateway.speculation.backends import Lost
from outrider.proposers.base import LearningProposer, ProposerState, SequenceContext, TokenProposer, drafted_ids, teach
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
    """Opens a state of the method that a request names, else of the first one, for each sequence; always there."""

    def __init__(self, proposers: Sequence[TokenProposer]) -> None:
        self._proposers = {proposer.name: proposer for proposer in proposers}
        self._learners = [proposer for proposer in proposers if isinstance(proposer, LearningProposer)]
        model = ModelInfo(name=proposers[0].name, digest="", vocab_size=0, max_model_len=0)
        rows = [(method_of(each.name), isinstance(each, LearningProposer)) for each in proposers]
        self._info = DraftInfo(
            model, tuple(DraftMethod(row.name, row.needs_features, row.can_run_ahead, learns) for row, learns in rows)
        )

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
        proposer = self._proposers.get(request.method or next(iter(self._proposers)))
        if proposer is None:
            return None
        tokens = [*request.prompt_ids, *request.output_ids]
        context = SequenceContext(len(request.prompt_ids), request.salt, request.prediction)
        return _LocalLink(
            proposer.open(tokens, context), tokens, context, self._learners, request.first_chain, on_event
        )

    def close(self) -> None:
        """Ends the methods that have learned."""
        for learner in self._learners:
            learner.close()


class _LocalLink:
    """One sequence: every credit, and every commit within it, is answered by one piece, a new chain at the committed
    length. What a turn of the event loop sends is taken together, and answered in the next, as a service would."""

    def __init__(
        self,
        state: ProposerState,
        tokens: list[int],
        context: SequenceContext,
        learners: Sequence[LearningProposer],
        first_chain: int,
        on_event: Callable[[DraftEvent | Lost], None],
    ) -> None:
        self._state, self._context, self._learners = state, context, learners
        self._tokens = tokens  # those committed
        self._num_known = len(tokens)  # to the state
        self._chain = first_chain
        self._on_event: Callable[[DraftEvent | Lost], None] | None = on_event
        self._until = 0
        self._loop = asyncio.get_running_loop()

    def send(self, *messages: Commit | Credit) -> None:
        """Commits extend the text, credit asks for its continuation."""
        before, committed = self._until, False
        for message in messages:
            if isinstance(message, Commit):
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
        if self._on_event is None:
            return
        position = len(self._tokens)
        try:
            self._state.append(self._tokens[self._num_known :])
            self._num_known = position
            ids = tuple(drafted_ids(self._state, self._until - position))
        except Exception as error:  # of a method that may be a user's own: the request goes on without
            log.exception("a draft failed")
            self._on_event(to_failure(0, Internal(f"a draft failed: {type(error).__name__}")))
            return
        piece = DraftTokens(0, self._chain, position, ids)
        self._chain += bool(ids)
        self._on_event(piece)
