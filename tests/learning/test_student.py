"""The weights that are trained: they learn the target's law behind the request's processors, forget nothing, and a loss
that is not finite changes none of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lessons import DRAWN, GREEDY, VOCAB, Target

from outrider.engine.loader import load_model
from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.sampling.reference import logits_to_probs
from outrider.learning.judgement import worth
from outrider.learning.student import MOST_ASKED, State, StudentPlan
from outrider.learning.token_student import TokenStudent, alike
from outrider.rpc.words.sampling_params import SamplingParams

PLAN = StudentPlan(rank=8, learning_rate=1e-2, batch_size=4, replay_windows=8, replay_length=16)
PROCESSED = SamplingParams(
    temperature=0.6, max_tokens=64, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3,
    logit_bias={40: 3.0, 41: -4.0}, bad_words_ids=((9,), (3, 4)), min_tokens=6, stop_token_ids=(5,),
)  # fmt: skip


@pytest.fixture(scope="module")
def student(draft: Path) -> TokenStudent:
    return TokenStudent(draft, PLAN)


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PROCESSED], ids=["greedy", "drawn", "processed"])
@pytest.mark.parametrize("num_given", [0, 3])
def test_the_loss_is_the_law_that_the_sampler_draws_from(
    student: TokenStudent, targets: dict[str, Target], sampling: SamplingParams, num_given: int
) -> None:
    """Of the same logits: greedily the law is that before temperature."""
    lesson = replace(targets["one"].lesson(2), sampling=sampling, num_given=num_given)
    raw = replace(lesson, sampling=DRAWN)
    given, drawn = lesson.output_ids[:num_given], lesson.output_ids[num_given:]
    sampler = SequenceSampler(sampling, lesson.prompt_ids, given, (), VOCAB)
    rows = assemble([SamplingRows(sampler, drawn[:-1])])
    temperature = 1.0 if sampling.greedy else sampling.temperature
    adjusted = student.logits(lesson)
    probs, _ = logits_to_probs(student.logits(raw), replace(rows, greedy_rows=None))
    assert torch.allclose((adjusted / temperature).softmax(-1), probs, atol=1e-6)
    wanted = -probs[range(len(drawn)), list(drawn)].clamp_min(1e-30).log()
    (loss,) = student._losses([lesson])
    assert float(loss.detach()) == pytest.approx(float(wanted.mean()), rel=1e-3)


def test_texts_of_one_pass_teach_what_each_teaches(student: TokenStudent, targets: dict[str, Target]) -> None:
    """Shorter ones are filled up; those that are much shorter, or of which much less was drawn, are read apart."""
    lessons = [targets["one"].lesson(number, count=12 + 5 * number) for number in range(4)]
    lessons.append(replace(lessons[2], sampling=PROCESSED, num_given=3))
    lessons.append(replace(lessons[3], num_given=20))
    parts = [[lessons.index(lesson) for lesson in part] for part in alike(lessons)]
    assert parts == [[0, 1], [2, 4, 3], [5]] and not list(alike([]))
    alone = sorted(float(loss.detach()) for lesson in lessons for loss in student._losses([lesson]))
    together = sorted(float(loss.detach()) for loss in student._losses(lessons))
    assert together == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("changed", [
    {}, {"temperature": 0.0}, {"temperature": 1.7}, {"temperature": 0.3}, {"repetition_penalty": 1.9},
    {"presence_penalty": 2.0, "logit_bias": {40: 30.0}, "min_tokens": 20, "stop_token_ids": (5,)},
])  # fmt: skip
def test_no_text_asks_more_than_it_may(
    student: TokenStudent, targets: dict[str, Target], changed: dict[str, Any]
) -> None:
    """What is no colder than temperature 1, and not multiplied, need not be looked at: it asks no more by itself."""
    lesson = replace(targets["one"].lesson(3), sampling=replace(DRAWN, **({"temperature": 1.0} | changed)))
    (said,) = student._says([lesson])
    (asked,) = torch.autograd.grad(student._loss(lesson, said), said)  # [drawn, vocab]
    assert 0 < float(asked.norm(dim=-1).sum()) <= MOST_ASKED * 1.0001


def test_it_learns_what_a_target_draws(student: TokenStudent, targets: dict[str, Target]) -> None:
    """On texts that it has not seen, greedy and drawn, and little of its own is forgotten."""
    lessons = [targets["one"].lesson(number, sampling=(GREEDY, DRAWN)[number % 2]) for number in range(60)]
    unseen, own = lessons[:20], [targets["own"].lesson(number) for number in range(100, 110)]
    student.hold(student.untrained())
    before, before_own = (sum(worth(one, student.logits(one), 4) for one in part) / len(part) for part in (unseen, own))
    optimizer = student.new_optimizer()
    for number in range(60):
        student.step(optimizer, [lessons[20 + (4 * number + index) % 40] for index in range(4)], number)
    after, after_own = (sum(worth(one, student.logits(one), 4) for one in part) / len(part) for part in (unseen, own))
    print(f"{before:.3f} -> {after:.3f}, its own {before_own:.3f} -> {after_own:.3f}")
    assert after > before + 0.1


def test_replay_keeps_what_no_traffic_says(draft: Path, targets: dict[str, Target]) -> None:
    lessons = [targets["one"].lesson(number) for number in range(16)]
    own, kept = [targets["own"].lesson(number) for number in range(100, 116)], {}
    for weight in (0.0, 3.0):
        student = TokenStudent(draft, replace(PLAN, replay_weight=weight))
        optimizer = student.new_optimizer()
        for number in range(40):
            student.step(optimizer, [lessons[(4 * number + index) % 16] for index in range(4)], number)
        kept[weight] = sum(worth(one, student.logits(one), 4) for one in own) / len(own)
    assert kept[3.0] > kept[0.0] + 0.03


def test_a_loss_that_is_not_finite_changes_nothing(student: TokenStudent, targets: dict[str, Target]) -> None:
    broken = {name: tensor * float("nan") for name, tensor in student.untrained().items()}
    student.hold(broken)
    with pytest.raises(FloatingPointError):
        student.step(student.new_optimizer(), [targets["one"].lesson(1)], 0)
    student.hold(student.untrained())
    assert same(student.state(), student.untrained())


def test_what_is_written_is_what_a_draft_loads(
    student: TokenStudent, targets: dict[str, Target], tmp_path: Path
) -> None:
    optimizer = student.new_optimizer()
    student.hold(student.untrained())
    student.step(optimizer, [targets["one"].lesson(1)], 0)
    state = student.state()
    digest = student.write(state, tmp_path / "one")
    assert same(student.read(tmp_path / "one"), state) and len(digest) == 64
    assert student.write(student.untrained(), tmp_path / "none") != digest
    with pytest.raises(ValueError, match="adapter_model"):
        (tmp_path / "one" / "adapter_model.safetensors").unlink()
        student.read(tmp_path / "one")
    assert student.digest == load_model(student._base.folder).digest
