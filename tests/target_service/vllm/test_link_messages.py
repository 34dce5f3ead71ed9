"""What crosses the link between a target service and its engine, written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from outrider.rpc.messages import (
    Close,
    Commit,
    Credit,
    DraftTokens,
    Failure,
    Load,
    PromptLogprobs,
    StepTimings,
    TokenWeights,
)
from outrider.rpc.words.answer import TokenLogprob
from outrider.rpc.words.sampling_params import FinishReason, TokenOrigin
from outrider.vllm.link_messages import read, write
from outrider.vllm.source import StepReport

TIMINGS = StepTimings(1, 2, 3, 4, 5, 6, 7, 8)
COMMIT = Commit(
    1, 9, (3, 4), (TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
    chain=2, num_drafted=5, num_accepted=1, logprobs=((TokenLogprob(3, -0.1, 1), TokenLogprob(8, -math.inf, 97)), ()),
    finish_reason=FinishReason.STOP, stop_token_id=4, dropped=(6, 7), timings=TIMINGS,
    load=Load(1, 2, 3), num_cached_ids=8, num_forced=1,
)  # fmt: skip
EVENTS = [COMMIT, PromptLogprobs(2, 0, ((), (TokenLogprob(5, -1 / 3, 2),))), Failure(3, 13, "äöü “…”", "WHY", 20)]


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [Credit(1, 9, 4, patience_ms=5, max_branches=6), Close(2)],
        [DraftTokens(1, 2, 3, (4, 5), (TokenWeights.of([4, 1 << 31], [7, 8]), None), 1, True, (0, 1), 90, "eagle")],
        [COMMIT, Commit(1, 9, ())],
        [StepReport(17, 0.1 + 0.2, TIMINGS, cast(Any, EVENTS), Load(4, 5, 6), 7, (0.5, 1e-9))],
    ],
)
def test_what_is_read_is_what_was_written(sent: Sequence[Any]) -> None:
    assert list(read(write(sent))) == sent


@pytest.mark.parametrize("body", [b"{", b'[["Popen","ls"]]', b"[[]]", b'[["Close"]]', b'[["Commit",1,2,3]]'])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, KeyError, IndexError, TypeError)):
        list(read(body))


def test_nothing_is_written_but_messages() -> None:
    with pytest.raises(KeyError):
        write([object()])  # type: ignore[list-item]
    assert json.loads(write([Close(3)])) == [["Close", 3]]
