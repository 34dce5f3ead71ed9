"""Drafting in the gateway's own process."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
from support.methods import Broken, LastToken

from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.proposers.base import SequenceContext
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.prediction import PredictionProposer
from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure, Open
from outrider.rpc.words.sampling_params import SamplingParams


async def said(drafter: LocalDrafter, request: Open, *messages: Any) -> list[Any]:
    """What it answers; how long it took, which each piece says, is cut off."""
    events: list[Any] = []
    link = drafter.open(request, events.append)
    assert link is not None
    for message in messages:
        link.send(message)
        await asyncio.sleep(0)
    link.close()
    assert all(event.draft_us > 0 for event in events if isinstance(event, DraftTokens))
    return [replace(event, draft_us=0) if isinstance(event, DraftTokens) else event for event in events]


def asked(method: str = "", **fields: Any) -> Open:
    return Open(0, (1, 2, 3, 1, 2), SamplingParams(), method=method, first_chain=7, **fields)


async def test_a_request_names_one_of_its_methods() -> None:
    drafter = LocalDrafter([NgramProposer(2, 2), LastToken()])
    assert await said(drafter, asked(), Credit(0, 8, 3)) == [DraftTokens(0, 7, 5, (3, 1, 2))]
    assert await said(drafter, asked("last_token"), Credit(0, 7, 3), Commit(0, 5, (3, 4)), Credit(0, 9, 3)) == [
        DraftTokens(0, 7, 5, (2, 2)),
        DraftTokens(0, 8, 7, (4, 4)),
    ]
    assert drafter.open(asked("suffix"), print) is None


async def test_a_commit_that_uses_up_the_credit_before_its_answer() -> None:
    """Both come in one turn of the event loop, as after a pause of it; a draft for what is past would be refused."""
    events: list[Any] = []
    link = LocalDrafter([NgramProposer(2, 2)]).open(asked(), events.append)
    assert link is not None
    link.send(Credit(0, 7, 3))
    link.send(Commit(0, 5, (3, 1, 2)))
    await asyncio.sleep(0)
    assert events == []
    link.send(Credit(0, 12, 3))
    await asyncio.sleep(0)
    assert [event.ids for event in events] == [(3, 1, 2, 3)]


async def test_several_draft_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that has something; once each kind was measured, the one that brings more."""
    clock = itertools.count(1)  # every reading a millisecond later: what a busy machine takes is not asked
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.001 * next(clock))
    drafter = LocalDrafter([PredictionProposer(), NgramProposer(2, 2), LastToken()], in_turn=True)
    assert drafter.info.defaults == ("prediction", "ngram", "last_token")
    events: list[Any] = []
    link = drafter.open(asked(prediction=(3, 4, 5)), events.append)
    assert link is not None

    async def goes_on(*messages: Any) -> DraftTokens:
        link.send(*messages)
        await asyncio.sleep(0)
        return cast(DraftTokens, events[-1])

    piece = await goes_on(Credit(0, 8, 3))
    assert (piece.method, piece.chain, piece.ids) == ("prediction", 7, (3, 4, 5)) and piece.draft_us > 0
    piece = await goes_on(Commit(0, 5, (3, 4, 5, 1), chain=7, num_drafted=3, num_accepted=3), Credit(0, 12, 3))
    assert (piece.method, piece.chain, piece.ids) == ("last_token", 8, (1, 1, 1))  # no n-gram occurred before
    piece = await goes_on(Commit(0, 9, (2,), chain=8, num_drafted=3), Credit(0, 13, 3))
    assert (piece.method, piece.ids) == ("ngram", (3, 4, 5))
    position = 10
    for _ in range(8):  # "the n-gram" is right every time, the last token never
        chain = piece.chain
        num_accepted = 3 if piece.method == "ngram" else 0
        ids = (*piece.ids[:num_accepted], 1, 2)
        piece = await goes_on(
            Commit(0, position, ids, chain=chain, num_drafted=3, num_accepted=num_accepted),
            Credit(0, position + len(ids) + 3, 3),
        )
        position += len(ids)
    assert piece.method == "ngram"
    link.close()
    named = drafter.open(asked("ngram", methods=("ngram", "last_token")), events.append)
    assert named is not None and drafter.open(asked("ngram", methods=("ngram", "suffix")), print) is None


async def test_methods_learn_from_every_sequence() -> None:
    learner = LastToken()
    drafter = LocalDrafter([NgramProposer(), learner])
    await said(drafter, asked(salt="mine"), Commit(0, 5, (3, 4)))
    await said(drafter, asked())
    assert learner.learned == [([1, 2, 3, 1, 2, 3, 4], SequenceContext(5, "mine"))]
    drafter.close()
    assert learner.closed


@pytest.mark.parametrize("ids", [(), (1,) * 99, (-1,), (2**32,)])
async def test_a_method_that_fails_ends_its_own_draft(ids: tuple[int, ...]) -> None:
    (failure,) = await said(LocalDrafter([Broken(*ids)]), asked(), Credit(0, 8, 3))
    assert isinstance(failure, Failure) and "a draft failed" in failure.message


async def test_a_method_that_cannot_learn_harms_no_sequence(caplog: pytest.LogCaptureFixture) -> None:
    await said(LocalDrafter([NgramProposer(), Broken()]), asked(), Commit(0, 5, (3, 4)))
    assert "broken could not learn" in caplog.text
