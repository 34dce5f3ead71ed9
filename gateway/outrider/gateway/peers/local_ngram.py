"""Prompt lookup in the gateway's own process: a Drafter that needs no service. Its drafts are one-hot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.gateway.speculation.backends import Lost
from outrider.proposers.ngram import NgramProposer, NgramState
from outrider.rpc.messages import Commit, Credit, DraftEvent, DraftInfo, DraftMethod, DraftTokens, ModelInfo, Open


class LocalNgramDrafter:
    """Opens a lookup for each sequence; always there."""

    def __init__(self, proposer: NgramProposer | None = None) -> None:
        self._proposer = proposer or NgramProposer()
        model = ModelInfo(name="ngram", digest="", vocab_size=0, max_model_len=0)
        self._info = DraftInfo(model, (DraftMethod("ngram"),))

    @property
    def info(self) -> DraftInfo:
        """A draft without a model."""
        return self._info

    @property
    def round_trip_us(self) -> float:
        """None: it is in process."""
        return 0.0

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> _NgramLink:
        """Starts a sequence."""
        state = self._proposer.open((*request.prompt_ids, *request.output_ids))
        return _NgramLink(state, request.first_chain, on_event)


class _NgramLink:
    """One sequence: every credit, and every commit within it, is answered by one piece, a new chain at the committed
    length. What a turn of the
    event loop sends is taken together, and answered in the next, as a service would."""

    def __init__(self, state: NgramState, first_chain: int, on_event: Callable[[DraftEvent | Lost], None]) -> None:
        self._state = state
        self._chain = first_chain
        self._on_event: Callable[[DraftEvent | Lost], None] | None = on_event
        self._until = 0
        self._loop = asyncio.get_running_loop()

    def send(self, *messages: Commit | Credit) -> None:
        """Commits extend the text, credit asks for its continuation."""
        before, committed = self._until, False
        for message in messages:
            if isinstance(message, Commit):
                self._state.append(message.ids)
                committed = True
            else:
                self._until = max(self._until, message.until)
        if self._until > self._state.num_tokens and (committed or self._until > before):
            self._loop.call_soon(self._propose)

    def close(self) -> None:
        """No event follows."""
        self._on_event = None

    def _propose(self) -> None:
        if self._on_event is None:
            return
        position = self._state.num_tokens
        ids = tuple(self._state.propose(self._until - position))
        piece = DraftTokens(0, self._chain, position, ids)
        self._chain += bool(ids)
        self._on_event(piece)
