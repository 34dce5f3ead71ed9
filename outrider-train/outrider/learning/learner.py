"""A learner: for every key weights that are trained on its lessons, candidates of them that are judged by lessons held
out, and what is in use, which is watched.

A candidate is the mean of the weights of late (Polyak and Juditsky, 1992). Lessons held out judge it against what is in
use: those that have come, the newest first, and those that come until a later one takes its place. The k-th of a
judgement has 6 / (pi k)^2 of its error, so that where none is any better, one is promoted in at most the share of
judgements that is the error; one ends where something is put in use, and after so many lessons. That earlier ones were
judged by the same lessons makes it no likelier: what is in use was chosen by them, and looks the better for it. What
was promoted is judged on, by lessons that come, against the draft's model alone, and taken back where that is better.

Several callers judge together, a text of each, so that nobody outweighs another; and each for itself whether what is
in use drafts its texts worse than the model alone: then that drafts for it, until it is so no more."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

from outrider.learning.judgement import Trial, Verdict
from outrider.learning.student import State, Student
from outrider.learning.traffic import MAX_CALLERS, MOST_READS, Pool, PoolPlan, is_usable
from outrider.learning.versions import Shelf, Version
from outrider.rpc.messages import LearningKey, Lesson

logger = logging.getLogger(__name__)

TURN_STEPS = 8  # of a key, before another's turn
LATEST = 3.0  # equal shares that the latest turn has in a mean of few: what the first ones learned soon counts little
LEAST_LESSONS = 8  # of a key, before anything is learned of it
WORTHS = ("alone", "live", "candidate")
JudgedRound = tuple[list[Lesson], list[float]]  # a lesson of each caller, and what each was worth


@dataclass(frozen=True, slots=True)
class LearnerPlan:
    """What is learned of whom, and how it is judged."""

    pool: PoolPlan = field(default_factory=PoolPlan)
    most_keys: int = 8  # that have something in use, and as many that have nothing yet
    candidate_steps: int = 64  # between two candidates, at least
    candidate_share: float = 0.2  # of all steps as long as these are few: weights change less and less
    most_candidate_steps: int = 512  # then
    averaged: float = 0.05  # of what a candidate is, that comes of the latest turn
    error: float = 0.01  # of a judgement
    most_judges: int = 400  # lessons that come, after which a judgement begins anew
    window: int = 5  # drafted tokens of a round, as judgements count

    def steps_between(self, num_steps: int) -> float:
        """Of two candidates, after so many steps in all."""
        return max(self.candidate_steps, min(self.candidate_share * num_steps, self.most_candidate_steps))


@dataclass(slots=True, eq=False)
class Candidate:
    """Weights that are being judged."""

    state: State
    num_steps: int
    num_lessons: int


class Judged(NamedTuple):
    """What a lesson held out was worth, by what drafts."""

    caller: str
    alone: float
    live: float
    candidate: float


@dataclass(slots=True, eq=False)
class Watches:
    """Of each of several callers, whether what is in use drafts its texts worse than the model alone."""

    left_out: dict[str, None] = field(default_factory=dict)  # for whom it does, in the order in which that was found
    _trials: OrderedDict[str, Trial] = field(default_factory=OrderedDict)

    def begin(self) -> None:
        """Something else is in use."""
        self._trials.clear()

    def add(self, judged: Judged, new_trial: Callable[[], Trial]) -> bool:
        """A text of one of them; whether that changes who is left out."""
        caller, is_out = judged.caller, judged.caller in self.left_out
        trial = self._trials.setdefault(caller, new_trial())
        self._trials.move_to_end(caller)
        better, than = (judged.live, judged.alone) if is_out else (judged.alone, judged.live)
        verdict = trial.add((better, than))
        if verdict is not Verdict.OPEN:
            self._trials.pop(caller)
        if verdict is Verdict.BETTER and is_out:
            del self.left_out[caller]
        elif verdict is Verdict.BETTER:
            self.left_out[caller] = None
        while len(self._trials) > MAX_CALLERS:
            self._trials.popitem(last=False)
        while len(self.left_out) > MAX_CALLERS:
            del self.left_out[next(iter(self.left_out))]
        return verdict is Verdict.BETTER


@dataclass(slots=True, eq=False)
class Judgement:
    """Candidates that share an error."""

    began_at: int  # steps
    last_at: int = 0  # steps after that, of the latest candidate
    num_candidates: int = 0
    num_lessons: int = 0  # that have come since


@dataclass(slots=True, eq=False)
class Pupil:
    """The weights of one key."""

    key: LearningKey
    pool: Pool
    state: State  # that are trained
    average: State  # of these, of the latest turns
    optimizer: torch.optim.Optimizer
    trial: Trial  # of the candidates, against what is in use
    live: State | None = None  # in use; None: the model alone
    watch: Trial | None = None  # of the model alone, against what is in use
    callers: Watches = field(default_factory=Watches)
    candidate: Candidate | None = None
    judgement: Judgement = field(default_factory=lambda: Judgement(0))
    live_worths: list[JudgedRound] = field(default_factory=list)  # with what is in use
    num_turns: int = 0  # since its weights began
    num_steps: int = 0
    loss: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)  # worth of a lesson, smoothed, by what drafts

    def wants_steps(self, batch_size: int) -> bool:
        """Whether there is something to learn that was not read often enough."""
        most = MOST_READS * self.pool.num_taken // batch_size
        return self.pool.num_learnt_from >= LEAST_LESSONS and self.num_steps < most

    def note(self, name: str, value: float) -> None:
        """What a lesson was worth with what drafts."""
        self.scores[name] = value if name not in self.scores else 0.95 * self.scores[name] + 0.05 * value


class Learner:
    """Lessons in, versions out. `take` may be called from any thread; all else belongs to the one that trains."""

    def __init__(
        self,
        student: Student,
        shelf: Shelf,
        plan: LearnerPlan,
        on_change: Callable[[LearningKey, Version | None], None] = lambda key, version: None,
    ) -> None:
        """Goes on with what the shelf says is in use. `on_change` is told of every promotion and every one that is
        taken back."""
        self.student, self.shelf, self.plan, self._on_change = student, shelf, plan, on_change
        self._pupils: OrderedDict[LearningKey, Pupil] = OrderedDict()  # the one taught longest ago first
        self._turns: list[LearningKey] = []
        self._lock = Lock()
        self.num_promoted = self.num_taken_back = self.num_lost = self.num_left_aside = 0
        self._strangers: set[str] = set()  # targets of which something was left aside
        for key, version in list(shelf.live.items()):
            self._go_on(key, version)
        self._make_room(in_use=True)

    def take(self, lessons: Sequence[Lesson], num_lost: int = 0) -> None:
        """Keeps what a draft handed out."""
        with self._lock:
            self.num_lost += num_lost
            for lesson in lessons:
                if not self.student.takes(lesson):
                    self._leave_aside(lesson)
                elif (pupil := self._pupil(lesson)) is not None:
                    pupil.pool.take(lesson)
                else:
                    self.num_left_aside += 1

    def _leave_aside(self, lesson: Lesson) -> None:
        self.num_left_aside += 1
        if lesson.target_digest not in self._strangers:
            self._strangers.add(lesson.target_digest)
            logger.warning("target %s: texts of it, or so long ones, cannot be learned from", lesson.target_digest[:12])

    def turn(self) -> bool:
        """A few steps of one key, and what its lessons judge; whether there was anything to do."""
        pupil = self._next()
        if pupil is None:
            return False
        self._learn(pupil)
        self._judge(pupil, pupil.pool.rounds())
        self._nominate(pupil)
        return True

    def pupils(self) -> list[Pupil]:
        """Those that there are."""
        with self._lock:
            return list(self._pupils.values())

    def _next(self) -> Pupil | None:
        with self._lock:
            size = self.student.plan.batch_size
            waiting = [key for key, one in self._pupils.items() if one.wants_steps(size) or one.pool.has_rounds]
            if not waiting:
                return None
            behind = [key for key in self._turns if key in waiting]
            new = [key for key in waiting if key not in behind]
            key = (new or behind)[0]
            self._turns = [other for other in self._turns if other != key and other in self._pupils] + [key]
            return self._pupils[key]

    def _learn(self, pupil: Pupil) -> None:
        size = self.student.plan.batch_size
        if not pupil.wants_steps(size):
            return
        self.student.hold(pupil.state)
        for _ in range(TURN_STEPS):
            pupil.num_steps += 1
            try:
                pupil.loss = self.student.step(pupil.optimizer, pupil.pool.batch(size), pupil.num_steps)
            except FloatingPointError as error:
                logger.warning("%s: %s; its weights begin anew", pupil.key.said, error)
                self._begin_anew(pupil)
                return
        pupil.state = self.student.state()
        pupil.num_turns += 1
        share = max(self.plan.averaged, min(1.0, LATEST / pupil.num_turns))
        pupil.average = {name: old.lerp(pupil.state[name], share) for name, old in pupil.average.items()}

    def _nominate(self, pupil: Pupil) -> None:
        """A candidate, if enough was learned since the one before; judged by what has come, if that decides."""
        judgement, plan = pupil.judgement, self.plan
        now = pupil.num_steps - judgement.began_at
        if now - judgement.last_at < plan.steps_between(pupil.num_steps):
            return
        judgement.last_at, judgement.num_candidates = now, judgement.num_candidates + 1
        candidate = pupil.candidate = Candidate(pupil.average, pupil.num_steps, pupil.pool.num_taken)
        pupil.trial = Trial(plan.error * share_of(judgement.num_candidates), plan.most_judges)
        judged: list[JudgedRound] = []
        for lessons, live in self._live_worths(pupil):
            judged.append((lessons, self._worths(lessons, candidate.state)))
            if pupil.trial.add(*zip(judged[-1][1], live, strict=True)) is not Verdict.OPEN:
                break
        if pupil.trial.verdict is Verdict.BETTER:
            self._promote(pupil, candidate)
            pupil.live_worths = judged

    def _live_worths(self, pupil: Pupil) -> list[JudgedRound]:
        """Of what has come, the newest first, with what is in use."""
        known = {id(lessons): worths for lessons, worths in pupil.live_worths}  # which live as long as these
        missing = [lessons for lessons in pupil.pool.judged if id(lessons) not in known]
        known |= {id(lessons): self._worths(lessons, pupil.live) for lessons in missing}
        pupil.live_worths = [(lessons, known[id(lessons)]) for lessons in pupil.pool.judged]
        return pupil.live_worths

    def _judge(self, pupil: Pupil, rounds: Sequence[Sequence[Lesson]]) -> None:
        """By rounds of a lesson of each caller."""
        candidate, lessons = pupil.candidate, [lesson for one in rounds for lesson in one]
        alone = self._worths(lessons, None)
        live = alone if pupil.live is None else self._worths(lessons, pupil.live)
        new = live if candidate is None else self._worths(lessons, candidate.state)
        worths = (Judged(*row) for row in zip((lesson.caller for lesson in lessons), alone, live, new, strict=True))
        for one in rounds:
            found = [next(worths) for _ in one]
            pupil.judgement.num_lessons += len(one)
            self._watch_callers(pupil, found)
            for name in WORTHS:
                pupil.note(name, mean_of(found, name))
            users = [row for row in found if row.caller not in pupil.callers.left_out]
            if self._falls_behind(pupil, [(row.alone, row.live) for row in users]):
                self._take_back(pupil)
                return
            if candidate is None or pupil.trial.verdict is not Verdict.OPEN:
                continue  # the next one is waited for
            if pupil.trial.add(*((row.candidate, row.live) for row in found)) is Verdict.BETTER:
                self._promote(pupil, candidate)
                return
        if pupil.judgement.num_lessons >= self.plan.most_judges:
            pupil.judgement = Judgement(pupil.num_steps)

    def _watch_callers(self, pupil: Pupil, found: Sequence[Judged]) -> None:
        """Leaves out those for whose texts the model alone is better. One caller alone is judged with all."""
        if pupil.live is None or (pupil.pool.num_callers == 1 and not pupil.callers.left_out):
            return
        changes = [pupil.callers.add(one, self._new_trial) for one in found]
        version = self.shelf.live.get(pupil.key)
        if any(changes) and version is not None:
            left_out = tuple(sorted(pupil.callers.left_out))
            self._change(pupil, replace(version, left_out=left_out), f"callers that are left out: {len(left_out)}")

    def _falls_behind(self, pupil: Pupil, worths: Sequence[tuple[float, float]]) -> bool:
        """Whether the model alone is better than what is in use. That is judged anew again and again: what was good for
        long may fall behind."""
        verdict = Verdict.OPEN if pupil.watch is None else pupil.watch.add(*worths)
        if verdict is Verdict.NO_BETTER:
            pupil.watch = self._new_trial()
        return verdict is Verdict.BETTER

    def _new_trial(self) -> Trial:
        return Trial(self.plan.error, self.plan.most_judges)

    def _worths(self, lessons: Sequence[Lesson], state: State | None) -> list[float]:
        """Of each lesson; None: with the model alone."""
        if state is not None:
            self.student.hold(state)
        student, is_learned = self.student, state is not None
        return [student.worth(lesson, self.plan.window, is_learned) for lesson in lessons]

    def _promote(self, pupil: Pupil, candidate: Candidate) -> None:
        number, path = self.shelf.place(pupil.key)
        digest, trial = self.student.write(candidate.state, path), pupil.trial
        version = Version(
            number, digest, str(path), candidate.num_lessons, candidate.num_steps, trial.num_lessons, trial.mean_gain,
            self.plan.error, time.time(), tuple(sorted(pupil.callers.left_out)),
        )  # fmt: skip
        pupil.live, pupil.watch, pupil.judgement = candidate.state, self._new_trial(), Judgement(pupil.num_steps)
        pupil.live_worths = []
        pupil.callers.begin()
        self.num_promoted += 1
        self._change(pupil, version, version.said)
        with self._lock:
            self._make_room(in_use=True)

    def _take_back(self, pupil: Pupil) -> None:
        self._begin_anew(pupil)
        pupil.live, pupil.watch, pupil.live_worths = None, None, []
        pupil.callers = Watches()
        self.num_taken_back += 1
        self._change(pupil, None, "the model alone drafts better: taken back")
        with self._lock:
            self._make_room(in_use=False)

    def _begin_anew(self, pupil: Pupil) -> None:
        """Its weights are those of the model alone again; what is in use stays, unless it was taken back."""
        pupil.state, pupil.optimizer, pupil.candidate = self.student.untrained(), self.student.new_optimizer(), None
        pupil.average, pupil.num_turns, pupil.trial = pupil.state, 0, self._new_trial()
        pupil.judgement = Judgement(pupil.num_steps)

    def _change(self, pupil: Pupil, version: Version | None, said: str) -> None:
        with self._lock:
            if self._pupils.get(pupil.key) is not pupil:
                return  # it had to make room meanwhile
            self.shelf.put(pupil.key, version)
        logger.info("%s: %s", pupil.key.said, said)
        self._on_change(pupil.key, version)

    def _pupil(self, lesson: Lesson) -> Pupil | None:
        """Of a lesson's key; a new one, if something can be learned from it, from the weights of the same salt's latest
        other target, if there is one."""
        key = lesson.key
        pupil = self._pupils.get(key)
        if pupil is None and is_usable(lesson, self.student.vocab_size, self.plan.pool):
            akin = next((one for one in reversed(self._pupils.values()) if one.key.group == key.group), None)
            state = self.student.untrained() if akin is None else dict(akin.state)
            pupil = self._pupils[key] = self._new(key, state)
            self._make_room(in_use=False)
        if pupil is not None:
            self._pupils.move_to_end(key)
        return pupil

    def _make_room(self, in_use: bool) -> None:
        """There are so many that have something in use, and as many that have nothing yet, so that what is better gives
        its place to what is, too, and to no new name. The one goes that was taught longest ago."""
        those = [key for key, one in self._pupils.items() if (one.live is not None) is in_use]
        for key in those[: max(0, len(those) - self.plan.most_keys)]:
            del self._pupils[key]
            if in_use:
                self.shelf.put(key, None)
                self._on_change(key, None)

    def _new(self, key: LearningKey, state: State) -> Pupil:
        pool, optimizer = Pool(self.plan.pool, self.student.vocab_size), self.student.new_optimizer()
        return Pupil(key, pool, state, state, optimizer, self._new_trial())

    def _go_on(self, key: LearningKey, version: Version) -> None:
        try:
            state = self.student.read(Path(version.path))
        except ValueError as error:
            logger.warning("%s: version %d is left aside: %s", key.said, version.number, error)
            self.shelf.put(key, None)
            return
        pupil = self._pupils[key] = self._new(key, state)
        pupil.live, pupil.watch = state, self._new_trial()
        pupil.callers.left_out = dict.fromkeys(version.left_out)


def share_of(number: int) -> float:
    """What the judgement of one of many candidates has of an error that all have together."""
    return 6 / (math.pi * number) ** 2


def mean_of(judged: Sequence[Judged], name: str) -> float:
    """Of one of WORTHS."""
    return float(sum(getattr(one, name) for one in judged)) / len(judged)


def run(learner: Learner, is_over: Callable[[], bool], pause_s: float = 0.2) -> None:
    """Learns until it is over."""
    while not is_over():
        if not learner.turn():
            time.sleep(pause_s)
