"""Constraints that wait for their compiler, those that need not, and who is told what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from support.models import train_byte_level

from outrider.engine.grammar import queue as grammar_queue
from outrider.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.engine.grammar.lark import GrammarError
from outrider.engine.grammar.queue import GrammarQueue, GrammarQueueFull
from outrider.engine.grammar.source import GrammarSpec
from outrider.rpc.words.structured import Reasoning

KNOWN = GrammarSpec("regex", "known")


def hostile(number: int, reasoning: Reasoning | None = None) -> GrammarSpec:
    return GrammarSpec("regex", f"hostile{number}", reasoning=reasoning)


class Compiling:
    """A queue whose hostile constraints are compiled once they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        backend = train_byte_level()
        self.compiler = GrammarCompiler(backend.to_str().encode(), backend.get_vocab_size(), (0,))
        self.queue = GrammarQueue(lambda: self.compiler)
        self.let_go = threading.Event()
        self.tried: list[str] = []
        patch.setattr(self.compiler._trials, "check", self._check)

    def _check(self, source: str) -> None:
        self.tried.append(source)
        if "hostile" in source and not self.let_go.wait(60):
            raise TimeoutError

    def ask(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        return self.queue.submit(spec, lambda compiled, seconds: compiled)

    def num_tried(self, spec: GrammarSpec) -> int:
        return sum(spec.text in source for source in self.tried)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    made = Compiling(monkeypatch)
    yield made
    made.let_go.set()
    made.queue.close(wait=True)


def test_a_known_constraint_does_not_wait_behind_hostile_ones(compiling: Compiling) -> None:
    compiling.ask(KNOWN).result(60)
    waiting = [compiling.ask(hostile(number)) for number in range(8)]
    again = compiling.ask(KNOWN).result(60)
    assert again.matcher().constrains and not any(one.done() for one in waiting)
    refused = compiling.ask(GrammarSpec("regex", "(a"))  # a new one does: known ones alone are sure to be quick
    assert not refused.done()
    compiling.let_go.set()
    assert all(one.result(60).matcher().constrains for one in waiting)
    with pytest.raises(GrammarError):
        refused.result(60)
    with pytest.raises(GrammarError):
        compiling.ask(GrammarSpec("regex", "(a")).result(60)


def test_each_text_is_compiled_once_however_many_ask_for_it(compiling: Compiling) -> None:
    before = [Reasoning((number,), open=True) for number in range(1, 5)]
    waiting = [compiling.ask(hostile(0, reasoning)) for reasoning in before]
    compiling.let_go.set()
    matchers = [one.result(60).matcher() for one in waiting]
    assert compiling.num_tried(hostile(0)) == 1
    assert [matcher._reasoning for matcher in matchers] == before


def test_so_many_wait_and_no_more(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.ask(KNOWN).result(60)
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 4)
    waiting = [compiling.ask(hostile(number)) for number in range(4)]
    with pytest.raises(GrammarQueueFull, match="4 constraints that are new wait") as full:
        compiling.ask(hostile(4))
    assert full.value.wait_ms >= grammar_queue.LEAST_WAIT_MS
    assert compiling.ask(KNOWN).result(60)
    waiting.append(compiling.ask(hostile(3)))  # with the one that waits
    compiling.let_go.set()
    assert all(one.result(60) for one in waiting)
    assert compiling.ask(hostile(4)).result(60).matcher().constrains, "that it was refused is not kept"


def test_what_nobody_waits_for_is_not_compiled_and_takes_no_room(
    compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 4)
    waiting = [compiling.ask(hostile(number)) for number in (0, 1, 2, 2, 3)]
    assert [waiting.pop(index).cancel() for index in (2, 3)] == [True, True]  # one of the third's two, and the fourth
    waiting.append(compiling.ask(hostile(4)))
    compiling.let_go.set()
    assert all(one.result(60) for one in waiting)
    assert [compiling.num_tried(hostile(number)) for number in range(5)] == [1, 1, 1, 0, 1]


def test_what_fails_otherwise_is_told_and_tried_again(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> GrammarCompiler:
        raise FileNotFoundError("tokenizer.json")

    make: Callable[[], Any] = compiling.queue._make
    monkeypatch.setattr(compiling.queue, "_make", missing)
    with pytest.raises(FileNotFoundError):
        compiling.ask(KNOWN).result(60)
    monkeypatch.setattr(compiling.queue, "_make", make)
    assert compiling.ask(KNOWN).result(60)
