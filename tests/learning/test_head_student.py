"""A head learns what is said behind its target's states, and is judged as it drafts in service."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import COUPLED, TargetHarness, opened
from support.heads import random_head_of
from support.lessons import DRAWN, GREEDY, WINDOW, counting

from outrider.engine.adapters.resident import AdapterRoom
from outrider.engine.loader import load_model
from outrider.learning import head_student
from outrider.learning.head_student import HeadStudent
from outrider.learning.student import StudentPlan
from outrider.learning.students import student_of
from outrider.proposers.heads.loading import head_digest, load_head
from outrider.proposers.heads.target import target_weights
from outrider.rpc.learning.lessons import UNSALTED, Lessons
from outrider.rpc.messages import Credit, Lesson
from outrider.rpc.words.sampling_params import SamplingParams
from outrider.target_service.heads.learning import HeadLearning

PLAN = StudentPlan(rank=8, learning_rate=2e-2, batch_size=4, num_tokens=3, replay_windows=8, replay_length=16)
PROCESSED = replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={40: 2.0}, min_tokens=4)
METHODS = ("eagle3", "mtp")


@pytest.fixture(scope="module", params=METHODS)
def head(request: pytest.FixtureRequest, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside the tiny model, which is the target here; it says what it does by the target's own words."""
    folder = random_head_of(draft, request.param, tmp_path_factory.mktemp(request.param))
    state, own = load_file(folder / "model.safetensors"), load_file(draft / "model.safetensors")
    if "lm_head.weight" in state:
        state["lm_head.weight"] = own.get("lm_head.weight", own["model.embed_tokens.weight"]).clone()
        save_file(state, folder / "model.safetensors")
    return folder


class Service:
    """A target's engine with the head, in which everybody learns."""

    def __init__(self, target: Path, head: Path) -> None:
        loaded = load_model(target)
        model = loaded.model
        self.head = load_head(head, target_weights(target, model), model.dtype, model.device)
        room = AdapterRoom(1, 16)
        self.learning = HeadLearning(self.head, head_digest(head), loaded.digest, (UNSALTED,), room, Lessons())
        self.harness = TargetHarness.of(loaded, head=self.head, learning=self.learning)
        self._number = 0

    def lesson(self, seed: int, sampling: SamplingParams, count: int = 40, length: int = 6) -> tuple[Lesson, float]:
        """What a sequence teaches, and the share of its drafts that was accepted."""
        self._number += 1
        prompt = [(13 * seed + 7 * place * place) % 40 + 30 for place in range(length)]
        asked = replace(
            opened(self._number, prompt, seed=seed, acceptance=COUPLED, method=self.head.name),
            sampling=replace(sampling, max_tokens=count, ignore_eos=True),
        )
        self.harness.send(asked, Credit(self._number, 1 << 20, WINDOW))
        self.harness.run()
        (lesson,), _ = self.learning.lessons.take()
        commits = self.harness.commits(self._number)
        return lesson, sum(one.num_accepted for one in commits) / sum(one.num_drafted for one in commits)


@pytest.fixture(scope="module")
def service(draft: Path, head: Path) -> Service:
    return Service(draft, head)


@pytest.fixture(scope="module")
def student(draft: Path, head: Path) -> HeadStudent:
    made = student_of(draft, PLAN, head, 256)
    assert isinstance(made, HeadStudent)
    return made


@pytest.mark.parametrize(
    ("sampling", "length"), [(GREEDY, 1), (DRAWN, 6), (PROCESSED, 6)], ids=["greedy", "drawn", "processed"]
)
def test_the_shadow_is_what_a_service_drafts(
    student: HeadStudent, service: Service, sampling: SamplingParams, length: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Accepted over drafted, before it has learned anything and after; over several passes of ends."""
    monkeypatch.setattr("outrider.learning.window_student.ENDS_AT_ONCE", 7)
    lessons = [service.lesson(number + 50, sampling, length=length)[0] for number in range(6)]
    student.hold(student.untrained())
    optimizer = student.new_optimizer()
    for number in range(48):
        student.step(optimizer, [lessons[(4 * number + index) % 6] for index in range(4)], number)
    key = lessons[0].key
    try:
        alone, share = service.lesson(3, sampling, length=length)
        assert student.worth(alone, WINDOW, with_learned=False) == pytest.approx(share, abs=1e-9)
        student.write(student.state(), tmp_path / "learned")
        service.learning.put_learned(key, service.learning.load_learned(tmp_path / "learned"))
        found = [service.lesson(number + 50, sampling, length=length) for number in range(4)]
        print([share for _, share in found])
        assert sum(share for _, share in found) > 0.2, "it has learned something to be judged by"
        for lesson, share in found:
            assert student.takes(lesson) and student.worth(lesson, WINDOW) == pytest.approx(share, abs=1e-9)
    finally:
        service.learning.put_learned(key, None)


def test_it_learns_what_is_said(student: HeadStudent) -> None:
    """Texts that count, on others that it has not seen; alone it stays as it was."""
    lessons = counting(student.target_digest, 48)
    unseen = lessons[:12]
    student.hold(student.untrained())
    before = [student.worth(one, 3) for one in unseen]
    optimizer = student.new_optimizer()
    for number in range(160):
        student.step(optimizer, [lessons[12 + (4 * number + index) % 36] for index in range(4)], number)
    after = [student.worth(one, 3) for one in unseen]
    print(f"{sum(before) / 12:.3f} -> {sum(after) / 12:.3f}")
    assert sum(after) > sum(before) + 12 * 0.1
    assert [student.worth(one, 3, with_learned=False) for one in unseen] == before


def test_texts_that_it_cannot_learn_from(student: HeadStudent, service: Service) -> None:
    lesson, _ = service.lesson(1, GREEDY)
    assert student.takes(lesson) and not student.takes(replace(lesson, target_digest="e" * 64))
    assert not student.takes(replace(lesson, prompt_ids=[30] * 256))


def test_what_was_read_is_kept_within_its_bytes(
    student: HeadStudent, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons, reader, read = [service.lesson(number, GREEDY)[0] for number in range(3)], student._reader, 0
    one = reader.read(lessons[0])[1].nbytes
    monkeypatch.setattr(head_student, "FEATURES_BYTES", 2 * one)
    features = reader._features

    def counted(ids: list[int]) -> torch.Tensor:
        nonlocal read
        read += 1
        return features(ids)

    monkeypatch.setattr(reader, "_features", counted)
    for number in (0, 1, 1, 0, 2, 0, 1):
        reader.read(lessons[number])
    assert (read, len(reader._kept)) == (3, 2) and reader._bytes == 2 * one


def changed(head: Path, folder: Path, drop: str = "", **config: Any) -> Path:
    folder.mkdir()
    said = json.loads((head / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    state = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in state.items() if name != drop}, folder / "model.safetensors")
    return folder


def test_heads_that_cannot_be_trained_are_refused(draft: Path, tmp_path: Path) -> None:
    medusa = random_head_of(draft, "medusa", tmp_path / "medusa")
    with pytest.raises(ValueError, match="holds a medusa head, which does not learn here; allowed: eagle3 and mtp"):
        HeadStudent(medusa, draft, PLAN)
    eagle3 = random_head_of(draft, "eagle3", tmp_path / "eagle3")
    other = changed(eagle3, tmp_path / "other", norm_output=True, norm_before_fc=False)
    HeadStudent(other, draft, PLAN)  # what is handed on is no part of the first token, and is read as it was trained
    state = load_file(eagle3 / "model.safetensors")
    save_file(state | {"embed_tokens.weight": torch.randn(300, 64)}, eagle3 / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be trained: embed_tokens.weight is not known"):
        HeadStudent(eagle3, draft, PLAN)
