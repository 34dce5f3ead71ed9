"""Draws through the whole path: the gateway's loop in this process, a draft and a target behind gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from exactness.statistics_settings import Setting
from numpy.typing import NDArray

from outrider.gateway.peers.remote import RemoteDrafts, RemoteTargets
from outrider.gateway.speculation.backends import Lost, VerifierLink
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Round
from outrider.rpc.errors import Unavailable
from outrider.rpc.messages import Arithmetic, Credit, ModelInfo, Open, Piece, TargetEvent, TargetInfo
from outrider.rpc.sampling_params import TokenOrigin

Integers = NDArray[np.int64]
Row = tuple[int, int, int, bool]  # the fields of Draws, for one token
AT_ONCE = 128  # sequences
ATTEMPTS = 3
SEQUENCE_S = 150.0  # one that takes longer hangs: it waits for a draft once at most


@dataclass(frozen=True)
class Draws:
    """Tokens of many sequences with the same prompt, and how each came about. All are [sequences, depth]."""

    tokens: Integers
    origins: Integers
    offsets: Integers  # index in the round that committed the token
    drafted: NDArray[np.bool_]  # a drafted token was judged at the position: accepted, or replaced

    def share(self, origin: TokenOrigin) -> float:
        """How many of the tokens came about in this way."""
        return float((self.origins == origin).mean())


class DraftedFirst:
    """Targets that see a sequence's first credit only behind its first piece, so that the first token is judged against
    a draft as well, and in every run."""

    def __init__(self, targets: RemoteTargets) -> None:
        self._targets = targets

    @property
    def info(self) -> TargetInfo:
        return self._targets.info

    def open(
        self,
        request: Open,
        on_event: Callable[[TargetEvent | Lost], None],
        fork_of: VerifierLink | None = None,
        like: Arithmetic | None = None,
        refused_by: Sequence[VerifierLink] = (),
    ) -> VerifierLink | None:
        link = self._targets.open(request, on_event, fork_of, like, refused_by)
        return None if link is None else _HeldLink(link)


class _HeldLink:
    def __init__(self, link: VerifierLink) -> None:
        self._link = link
        self._held: list[Piece | Credit] | None = []

    @property
    def model(self) -> ModelInfo:
        return self._link.model

    def send(self, *messages: Piece | Credit) -> None:
        if self._held is not None:
            self._held += messages
            if not any(isinstance(message, Piece) for message in messages):
                return
            messages = tuple(sorted(self._held, key=lambda message: isinstance(message, Credit)))
            self._held = None
        self._link.send(*messages)

    def close(self) -> None:
        self._link.close()


async def draw(setting: Setting, target: str, draft: str, seeds: range) -> Draws:
    """One sequence per seed, from the services at these addresses."""
    rows: dict[int, list[Row]] = {}
    remaining = iter(seeds)
    async with RemoteTargets([target]) as targets, RemoteDrafts([draft]) as drafts:

        async def draw_some() -> None:
            for seed in remaining:
                async with asyncio.timeout(SEQUENCE_S):
                    rows[seed] = await _draw_one(setting, drafts, targets, seed)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(draw_some())
    table = np.array([rows[seed] for seed in seeds], dtype=np.int64)  # [sequences, depth, 4]
    return Draws(table[..., 0], table[..., 1], table[..., 2], table[..., 3].astype(bool))


async def _draw_one(setting: Setting, drafts: RemoteDrafts, targets: RemoteTargets, seed: int) -> list[Row]:
    """A process that gets no time for seconds loses its streams. That depends on no token, and a seed that is drawn
    again gives the same ones."""
    request = Open(0, setting.prompt, setting.params, acceptance=setting.acceptance, seed=seed, method=setting.method)
    failures = 0
    while True:
        if not (targets.usable and drafts.usable):
            await asyncio.wait_for(asyncio.gather(targets.wait_usable(), drafts.wait_usable()), 20)
        rounds = speculate(drafts, DraftedFirst(targets), request, setting.policy, on_draft_stop=_raise_unavailable)
        try:
            return [row async for closed in rounds if isinstance(closed, Round) for row in _rows(closed)]
        except Unavailable:
            failures += 1
            if failures == ATTEMPTS:
                raise


def _raise_unavailable(reason: str) -> None:
    raise Unavailable(f"a sequence lost its draft: {reason}")


def _rows(closed: Round) -> Iterator[Row]:
    commit = closed.commit
    for offset, (token, origin) in enumerate(zip(commit.ids, commit.origins, strict=True)):
        yield token, origin, offset, offset < commit.num_drafted
