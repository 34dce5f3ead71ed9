"""Drafts that are not trusted to have drawn from the weights that they send, nor with what they know of a request.
Under rejection the law rests on both: so their tokens are one-hot, which is exact for any draft that does not know the
coins, and they are not told the seed that these follow from. Nor do they draft for a seed that may have come before:
what it said then, to the same coins, they may have kept. Coupled and greedy output depends on no draft."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outrider.gateway.peers.moving import MovingDrafts
from outrider.gateway.speculation.backends import DrafterLink, Lost
from outrider.rpc.messages import DraftEvent, DraftTokens, Open


class UntrustedDrafts(MovingDrafts):
    """Drafts of which nothing is believed. What they get for a seed follows from it by a secret of this process: seeds
    that people choose are soon guessed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._secret = secrets.token_bytes(32)

    def open(self, request: Open, on_event: Callable[[DraftEvent | Lost], None]) -> DrafterLink | None:
        """Starts a sequence, as RemoteDrafts does; None for one that nobody may draft for who remembers."""
        if not request.may_recall:
            return None
        if not request.acceptance.weighs or request.sampling.greedy:
            return super().open(request, on_event)

        def without_weights(event: DraftEvent | Lost) -> None:
            on_event(unweighted(event) if isinstance(event, DraftTokens) and event.weights else event)

        key = hashlib.blake2b(request.seed.to_bytes(8, "little"), key=self._secret, digest_size=8)
        other = int.from_bytes(key.digest(), "little")
        return super().open(replace(request, seed=other, one_hot=True), without_weights)


def unweighted(piece: DraftTokens) -> DraftTokens:
    """The same with one-hot tokens. Lists that stay as they came would keep the weights."""
    return replace(piece, ids=tuple(piece.ids), weights=(), parents=tuple(piece.parents))
