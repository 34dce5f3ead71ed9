"""What several models have of one draft: what is not wanted others may use, and a full draft gives each its share."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.engines import DraftHarness, commit, credit, new_open

from outrider.draft_service.settings import DraftSettings
from outrider.draft_service.shares import weights_of
from outrider.rpc.messages import Close, Failure
from outrider.rpc.servicer import Deliver, Detach
from outrider.rpc.words.sampling_params import SamplingParams


class SharedDraft(DraftHarness):
    """A stream of its own for each model."""

    STREAMS = ("", "a", "b", "c")

    def tell(self, model: str, *messages: Any) -> list[Failure]:
        """Who lost its draft by these messages."""
        first = len(self.events)
        stream = self.STREAMS.index(model)
        self.engine.handle(Deliver(stream, messages, self.events.append, None, model))
        return [event for event in self.events[first:] if isinstance(event, Failure)]

    def open(self, model: str, *numbers: int, **sampling: Any) -> list[Failure]:
        params = SamplingParams(temperature=0.0, **sampling)
        return self.tell(model, *(new_open(number, [1, 2, number % 90], params) for number in numbers))

    @property
    def counts(self) -> dict[str, float]:
        return self.engine.sequences_by_model


def test_a_full_draft_gives_each_model_its_share() -> None:
    """The latest of the one with the most leave, until both have as many; and none who has less than its share."""
    draft = SharedDraft(max_sequences=8)
    assert not draft.open("a", *range(8))
    displaced = [failure for number in range(4) for failure in draft.open("b", 100 + number)]
    assert [failure.sequence_id for failure in displaced] == [7, 6, 5, 4]
    assert all(failure.is_full and failure.reason == "BUSY" for failure in displaced)
    assert draft.counts == {"a": 4, "b": 4} and draft.engine.num_displaced == 4
    for model, number in (("a", 50), ("b", 150)):
        (refused,) = draft.open(model, number)
        assert refused.sequence_id == number and "8 sequences are open already" in refused.message
    assert not [event for event in draft.run(*(credit(0, 5),)) if isinstance(event, Failure)]
    draft.check()


def test_what_one_does_not_use_others_may() -> None:
    draft = SharedDraft(max_sequences=6)
    draft.open("a", 1, 2)
    assert not draft.open("b", *range(10, 14)) and draft.counts == {"a": 2, "b": 4}
    (failure,) = draft.open("a", 3)
    assert failure.sequence_id == 13 and draft.counts == {"a": 3, "b": 3}
    draft.tell("b", Close(10))
    assert not draft.open("a", 4)
    (failure,) = draft.open("c", 20)  # of three that want it each has two
    assert failure.sequence_id == 4 and draft.counts == {"a": 3, "b": 2, "c": 1}
    draft.engine.handle(Detach(SharedDraft.STREAMS.index("a")))
    assert draft.counts == {"b": 2, "c": 1}


def test_by_weight() -> None:
    draft = SharedDraft(max_sequences=8, weights={"a": 3.0})
    draft.open("b", *range(8))
    for number in range(10, 18):
        draft.open("a", number)
    assert draft.counts == {"a": 6, "b": 2}


def test_tokens_are_shared_too() -> None:
    draft = SharedDraft(max_sequences=100, max_open_tokens=1000)
    draft.open("a", 1, 2, 3, max_tokens=300)
    (failure,) = draft.open("b", 10, max_tokens=300)
    assert failure.sequence_id == 3
    assert draft.open("b", 11, max_tokens=500)[0].sequence_id == 11  # it would have more than a
    assert draft.counts == {"a": 2, "b": 1}


def test_who_cannot_be_drafted_for_displaces_nobody() -> None:
    draft = SharedDraft(max_sequences=2)
    draft.open("a", 1, 2)
    (refused,) = draft.tell("b", new_open(9, [1, 97]))
    assert refused.reason == "UNKNOWN_TOKEN" and draft.counts == {"a": 2}


def test_who_comes_first_among_its_own_stays() -> None:
    """A sequence that others of its model came after is drafted for while they leave."""
    draft = SharedDraft(max_sequences=2)
    draft.open("a", 1, 2)
    draft.tell("a", credit(1, 5), credit(2, 5))
    draft.open("b", 3)
    draft.run()
    draft.tell("a", commit(1, 3, 7))
    assert sorted(key[1] for key in draft.engine.sequences) == [1, 3]


@pytest.mark.parametrize(
    ("given", "found"),
    [(["a=2", "b/c=0.5"], {"a": 2.0, "b/c": 0.5}), ([], {})],
)
def test_weights_are_given_by_name(given: list[str], found: dict[str, float]) -> None:
    assert weights_of(given) == found == DraftSettings(method="ngram", share=given).weights


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a"], "is 'a'; allowed: NAME=WEIGHT"),
        (["5"], "is '5'; allowed"),
        (["=5"], "is '=5'; allowed"),
        (["a=0"], "over 0"),
        (["a=1001"], "at most 1000"),
        (["a=nan"], "is 'nan' for a; allowed: over 0"),
        (["a=-1"], "allowed"),
        (["a=1e2"], "allowed"),
        (["a=1", "a=2"], "has 'a' more than once"),
        (["\n=1"], "printable"),
    ],
)
def test_weights_that_are_none_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as raised:
        DraftSettings(method="ngram", share=given)
    assert "share (--share)" in str(raised.value)
