"""A draft that drafts in parallel learns what its masks say, and is judged as it drafts in service."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.lessons import DRAWN, GREEDY, VOCAB, WINDOW, Target, served
from transformers import AutoModelForCausalLM

from outrider.engine.sampler import SamplingRows, SequenceSampler, assemble
from outrider.kernels.sampling.reference import adjust_logits
from outrider.learning import window_student
from outrider.learning.parallel_student import ParallelStudent
from outrider.learning.student import LOWEST, StudentPlan
from outrider.learning.students import student_of
from outrider.learning.token_student import TokenStudent
from outrider.learning.window_student import reached_by
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

MASK = VOCAB - 1
PLAN = StudentPlan(rank=8, learning_rate=1e-2, batch_size=4, num_tokens=3, replay_windows=8, replay_length=16)
PROCESSED = SamplingParams(
    temperature=0.7, max_tokens=64, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={40: 2.0}, min_tokens=4,
    stop_token_ids=(41,),
)  # fmt: skip


@pytest.fixture(scope="session")
def parallel(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft with a mask token, at which it was not trained."""
    folder = Path(shutil.copytree(draft, tmp_path_factory.mktemp("parallel") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": MASK}))
    return folder


@pytest.fixture(scope="module")
def student(parallel: Path) -> ParallelStudent:
    made = student_of(parallel, PLAN)
    assert isinstance(made, ParallelStudent)
    return made


def test_a_model_without_a_mask_token_learns_as_it_drafts(draft: Path) -> None:
    assert type(student_of(draft, PLAN)) is TokenStudent


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PROCESSED], ids=["greedy", "drawn", "processed"])
@pytest.mark.parametrize("num_given", [0, 3])
def test_a_row_says_what_the_model_does_behind_its_masks(
    student: ParallelStudent, parallel: Path, targets: dict[str, Target], sampling: SamplingParams, num_given: int
) -> None:
    """Every end by itself, in transformers; through the request's processors, which count what was drafted before."""
    lesson = replace(targets["one"].lesson(2, 10), sampling=sampling, num_given=num_given)
    model = AutoModelForCausalLM.from_pretrained(parallel, dtype=torch.float32).eval()
    given, drawn = lesson.output_ids[:num_given], lesson.output_ids[num_given:]
    ends = torch.tensor([0, 2, len(drawn) - 2, len(drawn) - 1])
    student.hold(student.untrained())
    student._model.eval()
    with torch.inference_mode():
        said, places = student._at(lesson, ends, 3)
        found = student._processed(lesson, ends, said, 3)
    wanted, stands = [], []
    for end in ends.tolist():
        count = min(3, len(drawn) - end)
        text = [*lesson.prompt_ids, *given, *drawn[:end]]
        with torch.no_grad():
            logits = model(torch.tensor([[*text, *[MASK] * (count - 1)]])).logits[0, -count:]
        logits[:, MASK] = LOWEST
        for depth in range(count):
            before = (*given, *drawn[: end + depth])
            sampler = SequenceSampler(sampling, lesson.prompt_ids, before, (), VOCAB)
            rows = assemble([SamplingRows(sampler)], for_argmax=True)
            wanted.append(adjust_logits(logits[depth : depth + 1].clone(), rows).clamp_min(LOWEST))
            stands.append(end + depth)
    assert places.tolist() == stands
    assert torch.allclose(found, torch.cat(wanted), atol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PROCESSED], ids=["greedy", "drawn", "processed"])
@pytest.mark.parametrize("is_learned", [False, True])
def test_the_shadow_is_what_a_service_drafts(
    parallel: Path, targets: dict[str, Target], sampling: SamplingParams, is_learned: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Accepted over drafted, before it has learned anything and after; over several passes of ends."""
    monkeypatch.setattr(window_student, "ENDS_AT_ONCE", 7)
    student = student_of(parallel, PLAN)
    if is_learned:
        optimizer = student.new_optimizer()
        for number in range(20):
            student.step(optimizer, [targets["one"].lesson(number % 8 + 20)], number)
        student.write(student.state(), tmp_path / "learned")
    lesson = replace(targets["one"].lesson(3, 40), sampling=sampling)
    if not sampling.greedy:
        assert lesson.acceptance == AcceptanceRule.COUPLED
    accepted, drafted, rounds = served(parallel, lesson, "pard", tmp_path / "learned" if is_learned else None)
    assert rounds > 5 and student.worth(lesson, WINDOW, is_learned) == pytest.approx(accepted / drafted, abs=1e-9)


def test_it_learns_what_a_target_draws(student: ParallelStudent, targets: dict[str, Target]) -> None:
    """On texts that it has not seen, by all rules; the model alone stays as it was."""
    lessons = [targets["one"].lesson(number, sampling=(GREEDY, DRAWN)[number % 2]) for number in range(60)]
    weighed = [replace(one, acceptance=AcceptanceRule.REJECTION) for one in lessons[:20] if not one.sampling.greedy]
    unseen = [*lessons[:20], *weighed]
    student.hold(student.untrained())

    def worths(with_learned: bool) -> list[float]:
        return [student.worth(one, 3, with_learned) for one in unseen]

    before, optimizer = worths(True), student.new_optimizer()
    for number in range(80):
        student.step(optimizer, [lessons[20 + (4 * number + index) % 40] for index in range(4)], number)
    after = worths(True)
    gains = [new - old for new, old in zip(after, before, strict=True)]
    print(f"by coins {sum(gains[:20]) / 20:.3f}, by weights {sum(gains[20:]) / len(weighed):.3f}")
    assert sum(gains[:20]) / 20 > 0.1 and sum(gains[20:]) > 0
    assert worths(False) == before


def test_a_token_counts_as_much_as_it_is_reached() -> None:
    losses = -torch.tensor([0.5, 0.4, 0.01, 0.9]).log()
    assert torch.allclose(reached_by(losses), torch.tensor([1.0, 0.5, 0.2, 0.1]))
