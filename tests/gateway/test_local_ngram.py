"""Prompt lookup in process: every round is answered, up to the last token."""

from __future__ import annotations

import time

import pytest
from gateway.toys import ToyTarget

from outrider.gateway.peers.local_ngram import LocalNgramDrafter
from outrider.gateway.speculation.loop import speculate
from outrider.planner.policy import Policy, Round
from outrider.proposers.ngram import NgramProposer
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import SamplingParams

PROMPT = (5, 6, 7, 8, 5, 6, 7, 8, 5, 6)


@pytest.mark.parametrize("max_tokens", [8, 10, 11])
async def test_no_round_waits_out_its_patience_near_the_end(max_tokens: int) -> None:
    """There the draft's credit does not grow any more: a commit alone asks for the next piece."""
    # Few tokens in an order that does not repeat: lookup always finds something, and most of it is wrong.
    target = ToyTarget(rule=lambda tokens, prompt_len: 5 + len(tokens) ** 2 // 3 % 4)
    request = Open(0, PROMPT, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    started, rounds = time.monotonic(), list[Round]()
    async for item in speculate(LocalNgramDrafter(NgramProposer(1, 3)), target, request, Policy(4, patience_ms=500)):
        assert isinstance(item, Round)
        rounds.append(item)
    assert target.num_patiences == 0 and time.monotonic() - started < 0.4
    assert sum(len(closed.commit.ids) for closed in rounds) == max_tokens
    assert all(closed.commit.num_drafted for closed in rounds[1:-1])  # nothing is left to draft for the last one
