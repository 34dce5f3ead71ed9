"""What weights are worth in shadow is what they would have been worth in service, and a wrong promotion is rare."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.lessons import DRAWN, GREEDY, WINDOW, Target, served

from outrider.learning.judgement import Trial, Verdict, share_accepted, worth
from outrider.learning.student import StudentPlan
from outrider.learning.token_student import TokenStudent
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, replace(DRAWN, repetition_penalty=1.3, logit_bias={40: 2.0})])
def test_the_shadow_is_what_a_service_drafts(draft: Path, targets: dict[str, Target], sampling: SamplingParams) -> None:
    """Of a text that another model wrote, accepted over drafted."""
    student = TokenStudent(draft, StudentPlan())
    lesson = replace(targets["one"].lesson(3, 40, replace(sampling, repetition_penalty=1.0, logit_bias={})))
    lesson = replace(lesson, sampling=sampling)
    accepted, drafted, rounds = served(draft, lesson)
    found = worth(lesson, student.logits(lesson), WINDOW)
    assert rounds > 5 and found == pytest.approx(accepted / drafted, abs=1e-9)


def by_hand(agreed: Sequence[bool], window: int) -> float:
    rest, accepted, drafted = list(agreed), 0, 0
    while rest:
        guess = rest[:window]
        count = [*guess, False].index(False)
        accepted, drafted, rest = accepted + count, drafted + len(guess), rest[count + 1 :]
    return accepted / drafted if drafted else 0.0


def test_rounds_are_counted_as_they_come() -> None:
    dice = random.Random(1)
    for _ in range(500):
        agreed = [dice.random() < 0.6 for _ in range(dice.randrange(30))]
        window = dice.randrange(1, 7)
        windows = [agreed[place : place + window] for place in range(len(agreed))]
        assert share_accepted(windows, window) == pytest.approx(by_hand(agreed, window))


def test_under_rejection_it_is_the_texts_probability(draft: Path, targets: dict[str, Target]) -> None:
    lesson = replace(targets["one"].lesson(3), acceptance=AcceptanceRule.REJECTION)
    logits = TokenStudent(draft, StudentPlan()).logits(lesson)
    probs = (logits / lesson.sampling.temperature).softmax(-1)[range(24), list(lesson.output_ids)]
    assert worth(lesson, logits, WINDOW) == pytest.approx(float(probs.mean()))


ERROR = 0.05


@pytest.mark.parametrize("spread", [0.05, 0.4, 1.0])
def test_what_is_no_better_is_promoted_as_seldom_as_is_said(spread: float) -> None:
    """However often one looks, over trials of 300 lessons whose differences have no mean."""
    dice, runs, promoted = random.Random(7), 1000, 0
    for _ in range(runs):
        trial = Trial(ERROR, most=300)
        verdict = Verdict.OPEN
        while verdict is Verdict.OPEN:
            difference = dice.choice((-spread, spread))
            verdict = trial.add((max(0.0, difference), max(0.0, -difference)))
        promoted += verdict is Verdict.BETTER
    print(f"{promoted} of {runs}")
    assert promoted <= ERROR * runs + 3 * (ERROR * runs) ** 0.5


def test_what_is_better_for_one_caller_at_anothers_cost_is_no_better() -> None:
    """A text of each is a round, whose differences are 0 on average, though not of each."""
    dice, runs, gains = random.Random(7), 1000, (0.6, -0.1, -0.2, -0.3)
    promoted = 0
    for _ in range(runs):
        trial, verdict = Trial(ERROR, most=300), Verdict.OPEN
        while verdict is Verdict.OPEN:
            verdict = trial.add(*((max(0.0, gain), max(0.0, -gain) + dice.uniform(-0.2, 0.2)) for gain in gains))
        promoted += verdict is Verdict.BETTER
    assert promoted <= ERROR * runs + 3 * (ERROR * runs) ** 0.5


def test_a_round_of_many_callers_tells_as_much_as_as_many_texts() -> None:
    trial = Trial(0.01)
    assert trial.add(*((0.7, 0.5) for _ in range(50))) is Verdict.BETTER and trial.num_lessons == 50


def test_what_is_better_is_promoted_soon_and_what_is_worse_is_not() -> None:
    dice = random.Random(7)
    for gain, expected in ((0.15, Verdict.BETTER), (-0.15, Verdict.NO_BETTER)):
        trial, verdict = Trial(0.01), Verdict.OPEN
        while verdict is Verdict.OPEN:
            verdict = trial.add((0.5 + gain + dice.uniform(-0.2, 0.2), 0.5))
        assert verdict is expected and trial.num_lessons < 40
        assert trial.mean_gain == pytest.approx(gain, abs=0.1)


def test_a_draft_that_says_no_numbers_is_no_better() -> None:
    trial = Trial(0.01)
    trial.add(*((math.nan, 0.5) for _ in range(60)))
    assert trial.verdict is Verdict.NO_BETTER and trial.mean_gain == -1.0


def test_a_text_counts_no_more_than_others_may() -> None:
    """One that is worth far more says no more than one that is worth a token more a round."""
    few, many = Trial(0.01), Trial(0.01)
    few.add(*((1.0, 0.0) for _ in range(8)))
    many.add(*((0.7, 0.5) for _ in range(8)))
    assert few.evidence == pytest.approx(many.evidence) and few.verdict is Verdict.OPEN
    assert few.mean_gain == 1.0 and many.mean_gain == pytest.approx(0.2)
    assert few.add(*((0.5, 0.7) for _ in range(40))) is Verdict.NO_BETTER
