"""Drafting in the gateway's own process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.methods import Broken, LastToken

from outrider.gateway.peers.local_drafts import LocalDrafter
from outrider.proposers.base import SequenceContext
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.messages import Commit, Credit, DraftTokens, Failure, Open
from outrider.rpc.sampling_params import SamplingParams


async def said(drafter: LocalDrafter, request: Open, *messages: Any) -> list[Any]:
    events: list[Any] = []
    link = drafter.open(request, events.append)
    assert link is not None
    for message in messages:
        link.send(message)
        await asyncio.sleep(0)
    link.close()
    return events


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
