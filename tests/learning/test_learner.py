"""What a learner does with lessons: what is better is put in use and kept, what falls behind is taken back, nobody
else's traffic has a part in it, and it goes on where it was ended."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lessons import GREEDY, VOCAB, Target, counting

from outrider.learning.learner import Candidate, Learner, LearnerPlan
from outrider.learning.student import State, Student, StudentPlan
from outrider.learning.token_student import TokenStudent
from outrider.learning.traffic import PoolPlan
from outrider.learning.versions import CARD_NAME, KEPT, Shelf, Version, owned
from outrider.rpc.messages import LearningKey, Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

HOW = StudentPlan(rank=8, learning_rate=1e-2, batch_size=4, replay_weight=0.0)
PLAN = LearnerPlan(PoolPlan(hold_out=3), candidate_steps=16, error=0.05, window=4)


@pytest.fixture(scope="module")
def student(draft: Path) -> Student:
    return TokenStudent(draft, HOW)


@pytest.fixture(scope="module")
def lessons() -> list[Lesson]:
    """Of a target that counts by sevens, which the draft's model knows nothing of."""
    return counting("1" * 64, 80)


def new_learner(
    student: Student, folder: Path, plan: LearnerPlan = PLAN
) -> tuple[Learner, list[tuple[LearningKey, bool]]]:
    told: list[tuple[LearningKey, bool]] = []
    shelf = Shelf(folder, student.digest)
    return Learner(student, shelf, plan, lambda key, version: told.append((key, version is not None))), told


def fed(learner: Learner, lessons: Sequence[Lesson], until: str, at_once: int = 10) -> int:
    """Feeds them by and by until a counter of the learner rises; how many it took."""
    before = getattr(learner, until)
    for start in range(0, len(lessons), at_once):
        learner.take(lessons[start : start + at_once])
        for _ in range(3):
            learner.turn()
            if getattr(learner, until) > before:
                return start + at_once
    raise AssertionError(f"{until} stayed {before}")


def same(left: State, right: State) -> bool:
    return all(left[name].equal(right[name]) for name in left)


def test_what_is_better_is_put_in_use_and_goes_on_after_an_end(
    student: Student, lessons: list[Lesson], tmp_path: Path
) -> None:
    learner, told = new_learner(student, tmp_path)
    key = LearningKey(lessons[0].target_digest, "")
    fed(learner, lessons, "num_promoted")
    (pupil,) = learner.pupils()
    version = learner.shelf.live[key]
    card = json.loads((Path(version.path) / CARD_NAME).read_text())
    assert told == [(key, True)] and version.gain > 0 and card["digest"] == version.digest
    assert card["target_digest"] == key.target_digest and card["num_lessons"] >= card["num_judged"] > 0
    assert version.said.startswith("version 1 (") and "error at most 0.05" in version.said
    assert pupil.live is not None and same(student.read(Path(version.path)), pupil.live)
    again, _ = new_learner(student, tmp_path)
    (went_on,) = again.pupils()
    assert went_on.live is not None and same(went_on.live, pupil.live) and same(went_on.state, pupil.live)
    assert again.shelf.live == {key: version}


def test_what_falls_behind_is_taken_back(
    student: Student, lessons: list[Lesson], targets: dict[str, Target], tmp_path: Path
) -> None:
    """The traffic is now what the draft's own model says; it is the same target to the draft."""
    learner, told = new_learner(student, tmp_path)
    fed(learner, lessons, "num_promoted")
    key = LearningKey(lessons[0].target_digest, "")
    (pupil,) = learner.pupils()
    assert not any(learner._falls_behind(pupil, [(0.2, 0.9)]) for _ in range(500)), "it was good for long"
    learner.plan = replace(PLAN, candidate_steps=10**6)  # none that has learned the new traffic is in time
    other = [replace(targets["own"].lesson(number, 16), target_digest=key.target_digest) for number in range(200, 290)]
    fed(learner, other, "num_taken_back")
    assert told[-1] == (key, False) and learner.shelf.live == {} and pupil.live is None
    assert same(pupil.state, student.untrained())


def nonsense(count: int, group: str) -> list[Lesson]:
    dice = random.Random(4)
    texts = [[dice.randrange(VOCAB) for _ in range(22)] for _ in range(count)]
    return [
        Lesson("1" * 64, group, text[:6], text[6:], GREEDY, AcceptanceRule.COUPLED, number)
        for number, text in enumerate(texts)
    ]


def test_a_caller_who_sends_nonsense_changes_nothing_of_anothers(
    student: Student, lessons: list[Lesson], tmp_path: Path
) -> None:
    """The bound is 0: not a bit of the other salt's weights, nor of what is in use for it; and nonsense is never put in
    use."""
    key, found = LearningKey(lessons[0].target_digest, ""), []
    for name, more in (("alone", []), ("beside", nonsense(60, "b" * 32))):
        learner, told = new_learner(student, tmp_path / name)
        for start in range(0, 60, 10):
            learner.take([*lessons[start : start + 10], *more[start : start + 10]])
            before = learner._pupils[key].num_steps
            while learner._pupils[key].num_steps == before and learner.turn():
                pass
        found.append(learner._pupils[key])
        assert {row[0] for row in told} <= {key}
    alone, beside = found
    assert alone.num_steps == beside.num_steps > 30 and same(alone.state, beside.state)
    assert (alone.live is None) == (beside.live is None)


def test_a_caller_who_sends_nonsense_beside_another_of_the_same_salt_takes_little_of_it(
    student: Student, lessons: list[Lesson], tmp_path: Path
) -> None:
    """The bound is ten points of acceptance (of 90), with six times as many texts."""
    key, honest = LearningKey(lessons[0].target_digest, ""), [replace(one, caller="honest") for one in lessons]
    wrong = [replace(one, caller="wrong") for one in nonsense(6 * len(honest), "")]
    found = {}
    for name, more in (("alone", []), ("beside", wrong)):
        learner, _ = new_learner(student, tmp_path / name)
        for start in range(0, len(honest), 10):
            learner.take([*more[6 * start : 6 * start + 60], *honest[start : start + 10]])
            for _ in range(2):
                learner.turn()
        live = learner._pupils[key].live
        assert live is not None
        student.hold(live)
        found[name] = sum(student.worth(one, PLAN.window) for one in honest[:20]) / 20
    print(found)
    assert found["alone"] > 0.3 and found["beside"] > found["alone"] - 0.1


@pytest.mark.parametrize("temperature", [1e-5, 1e-2])
def test_cold_nonsense_takes_no_more(
    student: Student, lessons: list[Lesson], tmp_path: Path, temperature: float
) -> None:
    """What a cold law asks of the logits is as many times as much; the bound is the same."""
    key, honest = LearningKey(lessons[0].target_digest, ""), [replace(one, caller="honest") for one in lessons]
    cold = SamplingParams(temperature=temperature, max_tokens=64)
    wrong = [replace(one, caller="wrong", sampling=cold) for one in nonsense(len(honest), "")]
    learner, _ = new_learner(student, tmp_path)
    for start in range(0, len(honest), 10):
        learner.take([*wrong[start : start + 10], *honest[start : start + 10]])
        for _ in range(3):
            learner.turn()
    live = learner._pupils[key].live
    assert live is not None
    student.hold(live)
    found = sum(student.worth(one, PLAN.window) for one in honest[:20]) / 20
    print(found)
    assert found > 0.8


def test_what_is_in_use_gives_its_place_to_no_new_name(student: Student, lessons: list[Lesson], tmp_path: Path) -> None:
    learner, told = new_learner(student, tmp_path, replace(PLAN, most_keys=2))
    fed(learner, lessons, "num_promoted")
    (kept,) = learner.pupils()
    for number in range(5):
        learner.take([replace(one, group=f"{number:032x}", output_ids=one.output_ids[:1]) for one in lessons[:1]])
    assert learner.pupils() == [kept] and learner.num_left_aside == 5, "texts that teach nothing make no key"
    for number in range(5):
        learner.take([replace(one, group=f"{number:032x}") for one in lessons[:3]])
    assert [one.key.group for one in learner.pupils()] == ["", f"{3:032x}", f"{4:032x}"] and len(told) == 1
    for place, pupil in enumerate(learner.pupils()[1:]):
        learner._promote(pupil, Candidate(kept.state, 1, 1))
        assert len(learner.shelf.live) == 2 and [shown for _, shown in told[1:]] == [True, True, False][: 1 + 2 * place]
    assert told[-1] == (kept.key, False), "what is better, too, does: it was taught longest ago"


def test_one_that_was_left_out_is_judged_on_where_nobody_else_asks(
    student: Student, lessons: list[Lesson], tmp_path: Path
) -> None:
    first = [replace(one, caller="first") for one in lessons]
    learner, _ = new_learner(student, tmp_path)
    fed(learner, first, "num_promoted")
    (key,) = learner.shelf.live
    learner.shelf.put(key, replace(learner.shelf.live[key], left_out=("first",)))
    again, _ = new_learner(student, tmp_path, replace(PLAN, candidate_steps=10**6))
    again.take(first)
    while again.turn():
        pass
    assert again.shelf.live[key].left_out == ()


def test_a_name_that_is_a_path_is_none_of_a_folder(student: Student, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf", student.digest)
    for name in ("../../other", "/etc", "..", "a/b"):
        _, path = shelf.place(LearningKey(name, name))
        assert path.resolve().is_relative_to(shelf.folder.resolve()) and path.parent.parent == shelf.folder
    assert shelf.place(LearningKey("1" * 64, ""))[1].parent.name == "1" * 16 + "-unsalted"


def test_a_folder_is_one_learners(tmp_path: Path) -> None:
    with owned(tmp_path / "own"), pytest.raises(ValueError, match="is a learner's that runs"), owned(tmp_path / "own"):
        pass
    with owned(tmp_path / "own"):
        pass


def test_one_whose_texts_are_drafted_worse_is_left_out_until_they_are_not(
    student: Student, lessons: list[Lesson], targets: dict[str, Target], tmp_path: Path
) -> None:
    """It writes what the draft's own model says. The other keeps what was learned, also where the learner starts
    again."""
    learner, _ = new_learner(student, tmp_path)
    first = [replace(one, caller="first") for one in lessons]
    fed(learner, first, "num_promoted")
    (pupil,) = learner.pupils()
    version = learner.shelf.live[pupil.key]
    learner.plan = replace(PLAN, candidate_steps=10**6)
    own = [
        replace(targets["own"].lesson(number, 16), target_digest=pupil.key.target_digest, caller="own")
        for number in range(300, 324)
    ]
    rounds = [list(pair) for pair in zip(first[:24], own, strict=True)]
    learner._judge(pupil, rounds)
    pupil.pool.take(own[0])
    learner._judge(pupil, rounds)
    left_out = learner.shelf.live[pupil.key]
    assert left_out == replace(version, left_out=("own",)) and pupil.live is not None
    assert new_learner(student, tmp_path)[0].pupils()[0].callers.left_out == {"own": None}
    same_now = [list(pair) for pair in zip(first, (replace(one, caller="own") for one in first), strict=True)]
    learner._judge(pupil, same_now)
    assert learner.shelf.live[pupil.key] == version


def test_another_targets_weights_begin_with_those_of_the_same_salt(
    student: Student, lessons: list[Lesson], tmp_path: Path
) -> None:
    learner, _ = new_learner(student, tmp_path, replace(PLAN, most_keys=2))
    learner.take(lessons[:20])
    learner.turn()
    trained = learner.pupils()[0].state
    assert not same(trained, student.untrained())
    learner.take([replace(one, target_digest="e" * 64) for one in lessons[:2]])
    learner.take([replace(one, target_digest="e" * 64, group="c" * 32) for one in lessons[:2]])
    akin, stranger = learner.pupils()
    assert [one.key for one in (akin, stranger)] == [LearningKey("e" * 64, ""), LearningKey("e" * 64, "c" * 32)], (
        "at most two"
    )
    assert same(akin.state, trained) and akin.live is None and same(stranger.state, student.untrained())


def test_a_loss_that_is_not_finite_begins_anew_and_leaves_what_is_in_use(
    student: Student, lessons: list[Lesson], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, told = new_learner(student, tmp_path)
    fed(learner, lessons, "num_promoted")

    def fails(*arguments: object) -> float:
        raise FloatingPointError("the loss is not finite")

    monkeypatch.setattr(student, "step", fails)
    learner.take([replace(one, output_ids=[*one.output_ids, 3]) for one in lessons[:40]])
    assert learner.turn()
    (pupil,) = learner.pupils()
    assert same(pupil.state, student.untrained()) and pupil.candidate is None
    assert pupil.live is not None and len(told) == 1 and len(learner.shelf.live) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"), ('{"model_digest": "x", "live": [{"number": 1}]}', "cannot be read"),
        ('{"model_digest": "another", "live": []}', "is of another draft's model"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_its_own_is_refused(student: Student, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "live.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        Shelf(tmp_path, student.digest)


def test_a_version_that_is_broken_is_left_aside(student: Student, lessons: list[Lesson], tmp_path: Path) -> None:
    learner, _ = new_learner(student, tmp_path)
    fed(learner, lessons, "num_promoted")
    (version,) = learner.shelf.live.values()
    (Path(version.path) / "adapter_model.safetensors").write_bytes(b"broken")
    again, _ = new_learner(student, tmp_path)
    assert again.pupils() == [] and again.shelf.live == {}


def test_old_versions_go(student: Student, tmp_path: Path) -> None:
    shelf, key = Shelf(tmp_path, student.digest), LearningKey("d", "")
    for _ in range(KEPT + 3):
        number, path = shelf.place(key)
        shelf.put(key, Version(number, student.write(student.untrained(), path), str(path), 1, 1, 1, 0.1, 0.01, 0.0))
    assert [path.name for path in sorted(path.parent.iterdir())] == [f"{n:05}" for n in range(4, KEPT + 4)]


class Guesser:
    """In a student's place: whatever it has learned is worth the same on average, and another number for every text."""

    digest, vocab_size = "d" * 64, VOCAB

    def __init__(self) -> None:
        self.plan, self._number, self._held = StudentPlan(batch_size=1), 0.0, 0.0

    def untrained(self) -> State:
        return {"number": torch.zeros(())}

    def state(self) -> State:
        return {"number": torch.tensor(self._number)}

    def hold(self, state: State) -> None:
        self._held = float(state["number"])

    def takes(self, lesson: Lesson) -> bool:
        return True

    def new_optimizer(self) -> None:
        return None

    def step(self, optimizer: object, lessons: Sequence[Lesson], number: int) -> float:
        self._number = float(number)
        return 0.0

    def worth(self, lesson: Lesson, window: int, with_learned: bool = True) -> float:
        return random.Random(f"{self._held if with_learned else -1} {lesson.seed} {lesson.completion}").random()

    def write(self, state: State, folder: Path) -> str:
        folder.mkdir(parents=True)
        return f"{float(state['number'])}"


def test_candidates_come_more_seldom_as_weights_change_less() -> None:
    assert [LearnerPlan().steps_between(number) for number in (0, 320, 1000, 10**6)] == [64, 64, 200, 512]


def promoted_by_chance(folder: Path, number_of: int, error: float) -> int:
    """Of so many judgements those that put something in use that is no better."""
    count = 0
    for number in range(number_of):
        student: Any = Guesser()
        shelf = Shelf(folder / str(number), student.digest)
        plan = LearnerPlan(PoolPlan(hold_out=2), candidate_steps=8, error=error, most_judges=10**6)
        learner = Learner(student, shelf, plan)
        for text in range(160):
            ids = [text % 200 + 3, text // 200 + 5, number % 200]
            learner.take([Lesson("d" * 64, "", ids, [7] * 9, GREEDY, AcceptanceRule.COUPLED, text, number)])
            learner.turn()
            if learner.num_promoted:
                count += 1
                break
    return count


def test_what_is_no_better_is_put_in_use_in_no_more_judgements_than_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many candidates, all of which the same texts judge: their errors are shares of one."""
    found = promoted_by_chance(tmp_path / "shares", 60, 0.2)
    monkeypatch.setattr("outrider.learning.learner.share_of", lambda number: 1.0)
    whole = promoted_by_chance(tmp_path / "whole", 60, 0.2)
    print(f"{found} of 60 with shares of the error, {whole} with all of it for each")
    assert found <= 60 * 0.2 + 3 * (60 * 0.2 * 0.8) ** 0.5 and whole > 2 * found and whole > 20
