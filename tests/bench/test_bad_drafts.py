"""Drafts that are bad on purpose, and what of an answer's time counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.bench import bad_drafts
from outrider.bench.bad_drafts import BAD, LEARNING, tokens_a_second
from outrider.proposers.base import MAX_ID, SequenceContext
from outrider.proposers.registry import check_method


@pytest.mark.parametrize("bad", BAD)
def test_each_is_a_method_and_drafts_what_it_says(bad: type[bad_drafts.Constant]) -> None:
    check_method(f"outrider.bench.bad_drafts.{bad.__name__}", True)
    state = bad().open([1, 2, 3], SequenceContext())
    state.append([9])
    assert state.propose(2) == {"constant": [5, 5], "foreign": [MAX_ID] * 2, "late": [9, 9]}[bad.name]
    state.truncate(2)
    assert state.num_tokens == 2


@dataclass
class _Part:
    token_ids: list[int]


class _Clock:
    """Tells a second more with every part."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now

    def generate(self, prompt: str, **options: Any) -> Iterator[_Part]:
        yield from (_Part([0] * 4) for _ in range(options["max_tokens"] // 4))


def test_the_first_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(bad_drafts, "time", clock)
    client: Any = clock
    assert tokens_a_second(client, "", LEARNING + 40) == 4.0
