"""Several methods for one sequence in one engine: which of them drafts, in which pieces, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from support.engines import GREEDY, SAMPLED, STREAM, DraftHarness, commit, credit, naive, new_open

from outrider.proposers.base import SequenceContext
from outrider.proposers.prediction import PredictionProposer
from outrider.proposers.suffix.proposer import SuffixProposer
from outrider.rpc.messages import DraftTokens, Failure, Open
from outrider.rpc.words.sampling_params import AcceptanceRule

PROMPT = list(range(3, 15))  # without a repetition
GUESS = (20, 21, 22, 23, 24, 25)
LIST = ("prediction", "suffix", "draft_model")


class _Scripted:
    """What it has next, by the last token."""

    def __init__(self, script: dict[int, tuple[int, ...]], asked: list[tuple[int, ...]], tokens: Iterable[int]) -> None:
        self.script, self.asked, self.tokens = script, asked, list(tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, ids: Iterable[int]) -> None:
        self.tokens += ids

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def propose(self, max_tokens: int) -> list[int]:
        self.asked.append(tuple(self.tokens))
        return list(self.script.get(self.tokens[-1], ())[:max_tokens])


class Scripted:
    """A lookup that notes every text that it was asked about."""

    name = "scripted"

    def __init__(self, script: dict[int, tuple[int, ...]]) -> None:
        self.script = script
        self.asked: list[tuple[int, ...]] = []

    def open(self, tokens: Iterable[int], context: SequenceContext) -> _Scripted:
        return _Scripted(self.script, self.asked, tokens)


def asked(methods: tuple[str, ...] = LIST, sampling: Any = GREEDY, **options: Any) -> Open:
    return new_open(1, PROMPT, sampling, methods=methods, method=methods[0], **options)


def pieces(events: Iterable[Any]) -> list[DraftTokens]:
    assert not [event for event in events if isinstance(event, Failure)]
    return [event for event in events if isinstance(event, DraftTokens)]


def test_a_prediction_that_ends_is_gone_on_with_by_the_model_in_the_same_numbering() -> None:
    harness = DraftHarness(more=[PredictionProposer(), SuffixProposer()])
    request = asked(prediction=GUESS)
    (first,) = pieces(harness.run(request, credit(1, 16, 4)))
    assert (first.method, first.chain, first.ids, first.weights) == ("prediction", 0, GUESS[:4], ())
    (second,) = pieces(harness.run(commit(1, 12, *GUESS[:5], chain=0, num_drafted=4, num_accepted=4), credit(1, 21, 4)))
    assert (second.method, second.chain, second.position, second.ids) == ("prediction", 1, 17, GUESS[5:])
    assert not second.more  # in lock-step what a lookup has is the round's
    text = [*PROMPT, *GUESS, 90]
    (third,) = pieces(harness.run(commit(1, 17, 25, 90, chain=1, num_drafted=1, num_accepted=1), credit(1, 23, 4)))
    assert (third.method, third.chain, third.position) == ("draft_model", 2, 19)
    expected = list[int]()
    for _ in range(4):
        expected.append(naive(request, [*text, *expected], harness.loaded)[0])
    assert list(third.ids) == expected
    harness.check()


def test_ahead_of_the_verification_the_next_method_goes_on_in_the_chain() -> None:
    harness = DraftHarness(more=[PredictionProposer()])
    got = pieces(harness.run(asked(("prediction", "draft_model"), prediction=GUESS), credit(1, 12 + 9, 4)))
    assert [(piece.method, piece.chain, piece.position, len(piece.ids)) for piece in got] == [
        ("prediction", 0, 12, 4), ("prediction", 0, 16, 2), ("draft_model", 0, 18, 3),
    ]  # fmt: skip
    assert [piece.more for piece in got] == [True, True, False]
    assert all(piece.draft_us > 0 for piece in got if piece.position != 16)  # of a lookup the first piece has it all


@pytest.mark.parametrize("acceptance", [AcceptanceRule.REJECTION, AcceptanceRule.BLOCK])
def test_while_drawn_tokens_wait_no_lookup_is_asked(acceptance: AcceptanceRule) -> None:
    """No peeking: all that lookups ever saw was committed, or drafted by themselves from what was."""
    scripted = Scripted({14: (50, 51), 61: (70, 71)})
    harness = DraftHarness(more=[scripted])
    request = asked(("scripted", "draft_model"), SAMPLED, seed=5, acceptance=acceptance)
    got = pieces(harness.run(request, credit(1, 12 + 9, 4)))
    assert [(piece.method, piece.position, len(piece.ids)) for piece in got] == [
        ("scripted", 12, 2), ("draft_model", 14, 4), ("draft_model", 18, 3),
    ]  # fmt: skip
    assert not got[0].weights and all(got[1].weights) and all(got[2].weights)
    assert scripted.asked == [tuple(PROMPT), (*PROMPT, 50, 51)]
    drawn = got[1].ids
    # A part of what was drawn is committed: the rest of it still waits.
    harness.run(commit(1, 12, 50, 51, drawn[0], chain=0, num_drafted=3, num_accepted=3), credit(1, 24, 4))
    assert len(scripted.asked) == 2
    # All is refused: the next choice rests on committed tokens.
    other = 61
    got = pieces(harness.run(commit(1, 15, other, chain=0, num_drafted=4), credit(1, 25, 4)))
    assert scripted.asked[2:] == [(*PROMPT, 50, 51, drawn[0], other), (*PROMPT, 50, 51, drawn[0], other, 70, 71)]
    assert [(piece.method, piece.chain, piece.ids) for piece in got[:1]] == [("scripted", 1, (70, 71))]


def test_lookups_see_drafted_tokens_where_nothing_is_weighed() -> None:
    scripted = Scripted({})
    harness = DraftHarness(more=[scripted])
    got = pieces(harness.run(asked(("scripted", "draft_model")), credit(1, 12 + 9, 4)))
    assert [piece.method for piece in got] == ["draft_model"] * 3
    assert scripted.asked == [tuple(PROMPT), (*PROMPT, *got[0].ids), (*PROMPT, *got[0].ids, *got[1].ids)]


def test_the_better_one_is_found_by_measuring() -> None:
    """A lookup that is always wrong and always has something gives way to the model, and is tried now and then."""
    harness = DraftHarness(num_blocks=256, more=[Scripted(dict.fromkeys(range(97), (1, 1, 1, 1)))])
    request = asked(("scripted", "draft_model"))
    harness.send(request)
    tokens, methods, now = list(PROMPT), [], 0.0
    harness.engine.sequences[STREAM, 1].clock = lambda: now
    for _ in range(60):
        (piece,) = pieces(harness.run(credit(1, len(tokens) + 3, 3)))
        methods.append(piece.method)
        right = [naive(request, tokens, harness.loaded)[0]]
        ids = piece.ids if piece.method == "draft_model" else (right[0] % 96 + 2 - (right[0] == 95) * 90,)
        ids = (*ids, 5) if piece.method == "draft_model" else ids  # and the target's own
        num_accepted = 3 if piece.method == "draft_model" else 0
        now += 60.0  # a slow target
        harness.send(commit(1, len(tokens), *ids, chain=piece.chain, num_drafted=3, num_accepted=num_accepted))
        tokens += ids
    assert methods[:4] == ["scripted"] * 4
    assert methods[10:].count("draft_model") > 45


def test_what_the_model_cannot_read_is_not_drafted() -> None:
    harness = DraftHarness(more=[Scripted({14: (50, 97, 51)})])
    got = pieces(harness.run(asked(("scripted", "draft_model")), credit(1, 16, 4)))
    assert [(piece.method, piece.ids) for piece in got] == [("scripted", (50,))]
    alone = pieces(DraftHarness(more=[Scripted({14: (50, 97, 51)})]).run(asked(("scripted",)), credit(1, 16, 4)))
    assert [piece.ids for piece in alone] == [(50, 97, 51)]


def test_a_list_without_a_model_says_when_it_has_nothing() -> None:
    harness = DraftHarness(more=[PredictionProposer(), Scripted({25: (40,)})])
    got = pieces(harness.run(asked(("prediction", "scripted"), prediction=GUESS), credit(1, 12 + 9, 4)))
    assert [(piece.method, piece.ids) for piece in got] == [
        ("prediction", GUESS[:4]), ("prediction", GUESS[4:]), ("scripted", (40,)),
    ]  # fmt: skip
    got = pieces(harness.run(commit(1, 12, *GUESS, 40, 41, chain=0, num_drafted=7, num_accepted=7), credit(1, 29, 4)))
    assert got == [DraftTokens(1, 1, 20, (), draft_us=got[0].draft_us)]


def test_a_default_list_drafts_where_none_is_named() -> None:
    harness = DraftHarness(more=[PredictionProposer()], default_methods=("prediction", "draft_model"))
    harness.run(new_open(1, PROMPT, prediction=GUESS), new_open(2, PROMPT, method="ngram"), credit(1, 16, 4))
    sequences = harness.engine.sequences
    assert sequences[STREAM, 1].methods == ("prediction", "draft_model")
    assert sequences[STREAM, 2].methods == ("ngram",)


def test_a_method_that_is_not_there_is_named() -> None:
    harness = DraftHarness()
    (failure,) = harness.run(asked(("ngram", "suffix", "draft_model")))
    assert isinstance(failure, Failure) and failure.message == "no method 'suffix'; allowed: draft_model, ngram"
