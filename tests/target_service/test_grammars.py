"""Constraints of a target's sequences while they are compiled: how many wait, and what is told of one too many."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from support.engines import GRAMMAR_EOS, AtOnce, TargetHarness, grammar_compiler, opened, tiny_model

from outrider.engine.grammar import queue as grammar_queue
from outrider.rpc.messages import Close, Credit, Failure
from outrider.rpc.words.structured import StructuredOutput
from outrider.target_service.grammars import GIVE_UP_S, Grammars, WorkClock


class Later(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        self.jobs.append(lambda: function(*arguments, **options))
        return Future()

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def test_a_constraint_too_many_is_told_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 2)
    later = Later()
    grammars = Grammars(grammar_compiler(), later, AtOnce())
    harness = TargetHarness.of(tiny_model()[1], eos_ids=(GRAMMAR_EOS,), grammars=grammars)

    def ask(number: int, text: str) -> list[Any]:
        request = opened(number, (5, 6, 7), max_tokens=4, structured_output=StructuredOutput(regex=text))
        harness.send(request, Credit(number, 1 << 20, 0))
        harness.run()
        return harness.events.get(number, [])

    assert not ask(1, "[a-f]{9}") and not ask(2, "[g-k]{9}")
    (refused,) = ask(3, "[l-p]{9}")
    assert isinstance(refused, Failure) and (refused.code, refused.reason) == (8, "BUSY") and refused.is_full
    assert not ask(4, "[a-f]{9}"), "one that waits already is taken"
    harness.send(Close(2))
    assert not ask(5, "[q-t]{9}"), "and one in the place of what nobody waits for"
    later.run()
    harness.run()
    assert [len(harness.output(number)) for number in (1, 4, 5)] == [4, 4, 4]
    assert harness.output(1) == harness.output(4)


@pytest.mark.parametrize("end", ["closed", "too slow"])
def test_nothing_is_kept_of_a_sequence_that_ends_while_its_masks_are_late(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(grammar_compiler(), AtOnce(), Later(), patience_s=0.0)
    harness = TargetHarness.of(tiny_model()[1], eos_ids=(GRAMMAR_EOS,), grammars=grammars)
    request = opened(1, (5, 6, 7), max_tokens=4, structured_output=StructuredOutput(regex="[a-f]{9}"))
    harness.send(request, Credit(1, 1 << 20, 0))
    harness.run()
    assert len(grammars._late) == grammars.num_late == 1
    if end == "closed":
        harness.send(Close(1))
    else:
        monkeypatch.setattr(WorkClock, "seconds", lambda clock: 2 * GIVE_UP_S)
        harness.run()
        assert "takes longer than" in harness.failures(1)[0].message
    assert not harness.engine.scheduler.sequences and not grammars._late
