"""Drafts of which more may come, as after a scale-out: a new one takes its part of the sequences under way. Without
that it would stand idle until the long ones end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from outrider.gateway.peers.remote import RemoteDrafts
from outrider.gateway.peers.replicas import Replica, allowed_by_breaker
from outrider.gateway.speculation.backends import Lost
from outrider.rpc.messages import DraftInfo

MOVE_PAUSE_S = 0.02  # between two sequences that move: the new draft has their texts to compute

log = logging.getLogger(__name__)


class MovingDrafts(RemoteDrafts):
    """RemoteDrafts whose sequences move to a replica that comes later. Only drafts can: their caches hold nothing that
    a sequence needs, and a target's are worth more than an even load."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._known_usable: set[Replica[DraftInfo]] = set()

    def _changed(self) -> None:
        usable = {replica for replica in self.replicas if replica.usable}
        fresh, self._known_usable = usable - self._known_usable, usable
        if fresh and any(replica.num_sequences for replica in usable - fresh):
            task = asyncio.create_task(self._move_to(fresh))
            self._others.add(task)
            task.add_done_callback(self._others.discard)
        super()._changed()

    async def _move_to(self, fresh: set[Replica[DraftInfo]]) -> None:
        """Each sequence that would now be opened at a new replica goes there, one after another."""
        others = [replica for replica in self.replicas if replica not in fresh]
        links = [(replica, link) for replica in others for link in replica.links.values()]
        num_moved = 0
        for replica, link in links:
            if not replica.holds(link):
                continue  # it ended meanwhile
            if self._place(link.request, allowed_by_breaker(self._able(link.request))) in fresh:
                link.on_event(Lost("moves to a new draft", moved=True))
                num_moved += 1
                await asyncio.sleep(MOVE_PAUSE_S)
        log.info("drafts: %d of %d sequences moved to new ones", num_moved, len(links))
