"""`outrider bench learning`: what a draft wins back that learns from what it serves, after the texts or the target have
changed under it.

The target writes texts of one domain first. They then come to a learner at the rate at which they would be served, by
the clock of the learner's own processor time, so that nothing depends on what else a machine does; what is in use is
measured along the way, in shadow, on texts of this domain and of others that nobody learns from. What is accepted is
exact: greedy and coupled tokens do not depend on the draft."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from outrider.bench.figures import draw_learning, write_figure
from outrider.bench.harness import RESULTS, RESULTS_TEXT, PairSettings, report_failures
from outrider.bench.learning_served import served_beside
from outrider.bench.results import Json, align, bracketed, median_of, new_result, note, where
from outrider.cli.arguments import load_tokenizer, parse
from outrider.rpc.hub import locate
from outrider.rpc.messages import Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams

if TYPE_CHECKING:
    from outrider.cli.local_services import Folders
    from outrider.learning.learner import Learner
    from outrider.learning.student import Student

DOMAINS = {  # what a Debian machine has
    "c": "/usr/include/**/*.h",
    "perl": "/usr/share/perl*/**/*.pm",
    "docs": "/usr/share/doc/**/copyright",
}
FILE_BYTES = range(4_000, 200_000)
PROMPT_TOKENS, ANSWER_TOKENS = 96, 160
EXCERPT = 1000  # characters that hold so many tokens of a prompt
MAX_FILES, TUNED_FILES, REFERENCE_FILES = 400, 20, 600
DIGEST = "target"  # of the lessons: there is one
DESCRIPTION = (
    "Let a draft learn from texts of a domain as the target writes them, and measure what is in use along the way, on "
    "texts that it does not learn from. With --reference, a draft that was distilled offline for the same texts, or "
    "--distil-steps, by which one is, the share of the gap is told that was won back."
)


class LearningSettings(PairSettings):
    """What is learned, and how long."""

    section: ClassVar[str] = "bench_learning"

    domain: list[str] = Field(
        default_factory=lambda: [f"{name}={pattern}" for name, pattern in DOMAINS.items()],
        description="NAME=GLOB: files of a domain; the draft learns the first, the others are watched (default: three "
        "that a Debian machine has)",
    )
    seconds: float = Field(1200.0, gt=0, description="processor time of the learner")
    tokens_per_s: float = Field(100.0, gt=0, description="tokens that are served a second")
    measured: int = Field(60, ge=4, description="texts of each domain that are measured")
    every: float = Field(120.0, gt=0, description="seconds between two measurements")
    served_turns: int = Field(
        0, ge=0, le=100, description="turns of 20 s with a learner beside what is served, and as many without it"
    )
    reference: Path | None = Field(
        None, description="a draft, or a head, that was distilled offline for the same target and texts"
    )
    tune_steps: int = Field(
        0, ge=0, description="steps that the target is trained for on files of the first domain, before anything else"
    )
    distil_steps: int = Field(
        0, ge=0, description="in place of --reference: steps for which the draft is distilled offline, on such files"
    )
    head: Path | None = Field(None, description="folder of a head, which learns in the draft's place")
    rank: int = Field(16, ge=1, le=64, description="of the weights")
    learning_rate: float = Field(2e-3, gt=0, le=1, description="of the optimizer")
    num_draft_tokens: int = Field(5, ge=1, le=32, description="tokens drafted a round")
    results: Path = Field(RESULTS / "learning", description=RESULTS_TEXT)

    @model_validator(mode="after")
    def _check_domains(self) -> Self:
        if not all(name and pattern for name, _, pattern in (text.partition("=") for text in self.domain)):
            raise ValueError("domain: allowed: NAME=GLOB, as in c=/usr/include/**/*.h")
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.distil_steps and (self.reference is not None or self.head is not None):
            raise ValueError("distil_steps (--distil-steps) makes a draft; leave out --reference and --head")
        return self

    @property
    def domains(self) -> dict[str, str]:
        """The patterns, by name."""
        return {name: pattern for name, _, pattern in (text.partition("=") for text in self.domain)}

    @property
    def num_learned(self) -> int:
        """Texts that come within the time."""
        return max(16, round(self.seconds * self.tokens_per_s / ANSWER_TOKENS))


def main(argv: Sequence[str] | None = None, prog: str = "outrider bench learning") -> int:
    """Measures, prints and stores."""
    settings = parse(LearningSettings, argv, prog, DESCRIPTION)

    def work() -> None:
        result = run(settings)
        if path := settings.finish(result, render(result)):
            write_figure(path.with_suffix(".svg"), lambda: draw_learning(result))

    return report_failures(prog, work)


def run(settings: LearningSettings) -> Json:
    """As `measured_by`, of the target as it is or as it was tuned, beside the reference that is given or made."""
    folders, pair = settings.checkpoints()
    pair = pair if settings.head is None else f"{folders.target.name} with {settings.head.name}"
    reference, made = None if settings.reference is None else locate(settings.reference), {}
    with TemporaryDirectory(prefix="outrider-learning-") as folder:
        if settings.tune_steps:
            from outrider.bench.learning_reference import tuned

            texts, steps = first_texts(settings, TUNED_FILES), settings.tune_steps
            folders = replace(folders, target=tuned(folders.target, texts, steps, Path(folder)))
            pair += f", the target tuned for {steps} steps"
        if settings.distil_steps:
            from outrider.bench.learning_reference import distilled

            texts, steps = first_texts(settings, REFERENCE_FILES), settings.distil_steps
            reference, seconds = distilled(folders.draft, folders.target, texts, steps, Path(folder))
            made = {"distilled_steps": steps, "distilled_s": seconds}
        result = measured_by(settings, folders, reference)
    result["setup"] |= {"pair": pair, **made}
    return result


def measured_by(settings: LearningSettings, folders: Folders, reference: Path | None) -> Json:
    """Has the texts written, lets the draft learn, and measures."""
    learned, *watched = settings.domains
    texts = written(settings, folders.target)
    student = new_student(settings, folders, settings.head)
    texts = {name: [of_target(lesson, student) for lesson in lessons] for name, lessons in texts.items()}
    held = {name: lessons[: settings.measured] for name, lessons in texts.items()}
    note(f"{len(texts[learned]) - settings.measured} texts to learn from, {settings.measured} of each domain measured")
    alone = {name: worths(settings, student, lessons, None) for name, lessons in held.items()}
    points = list(learn(settings, student, texts[learned][settings.measured :], held))
    setup = {
        "k": settings.num_draft_tokens, "domains": [learned, *watched], "seconds": settings.seconds,
        "tokens_per_s": settings.tokens_per_s, "rank": settings.rank, "seed": settings.seed,
    }  # fmt: skip
    result = new_result(setup) | {"alone": alone, "points": points}
    if settings.served_turns:
        prompts = [lesson.prompt_ids for lesson in texts[learned]]
        head = settings.head
        result["served"] = served_beside(folders, prompts, settings.served_turns, settings.start_timeout, head)
    if reference is not None:
        other = new_student(settings, replace(folders, draft=reference), reference if settings.head else None)
        result["reference"] = {name: worths(settings, other, lessons, None) for name, lessons in held.items()}
    return result


@dataclass(slots=True)
class Clock:
    """The learner's processor time, without what is only measured, and moved on where it waits."""

    started: float
    beside: float = 0.0
    waited: float = 0.0

    @classmethod
    def start(cls) -> Self:
        return cls(time.thread_time())

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.thread_time() - self.started - self.beside + self.waited


def learn(
    settings: LearningSettings, student: Student, texts: Sequence[Lesson], held: Mapping[str, Sequence[Lesson]]
) -> Iterator[Json]:
    """What is in use is worth, again and again."""
    with TemporaryDirectory(prefix="outrider-learning-") as folder:
        learner = new_learner(settings, student, Path(folder))
        clock, num_come, due = Clock.start(), 0, 0.0
        while (now := clock.now) < settings.seconds:
            come = min(len(texts), int(now * settings.tokens_per_s / ANSWER_TOKENS))
            learner.take(texts[num_come:come])
            num_come = max(num_come, come)
            if not learner.turn():
                clock.waited += ANSWER_TOKENS / settings.tokens_per_s
            if now >= due:
                due += settings.every
                yield point(settings, learner, held, clock)
        yield point(settings, learner, held, clock)


def point(settings: LearningSettings, learner: Learner, held: Mapping[str, Sequence[Lesson]], clock: Clock) -> Json:
    """One measurement, whose own time does not count."""
    before, at = time.thread_time(), clock.now
    live = next((one.live for one in learner.pupils()), None)
    found = {name: worths(settings, learner.student, lessons, live) for name, lessons in held.items()}
    clock.beside += time.thread_time() - before
    steps = sum(one.num_steps for one in learner.pupils())
    said = {
        "seconds": round(at, 1),
        "steps": steps,
        "promoted": learner.num_promoted,
        "taken_back": learner.num_taken_back,
    }
    note(
        f"{at:7.0f} s, {steps} steps, {learner.num_promoted} promoted: "
        + ", ".join(f"{name} {100 * (value['greedy'] + value['sampled']) / 2:.1f} %" for name, value in found.items())
    )
    return said | {"live": found}


def worths(settings: LearningSettings, student: Student, lessons: Sequence[Lesson], state: object) -> dict[str, float]:
    """The share of drafts accepted, greedily and sampled; None: with the model alone."""
    if state is not None:
        student.hold(state)  # type: ignore[arg-type]  # a State
    found: dict[bool, list[float]] = {True: [], False: []}
    for lesson in lessons:
        found[lesson.sampling.greedy].append(student.worth(lesson, settings.num_draft_tokens, state is not None))
    return {
        name: round(sum(found[greedy]) / max(1, len(found[greedy])), 4)
        for name, greedy in (("greedy", True), ("sampled", False))
    }


def written(settings: LearningSettings, target: Path) -> dict[str, list[Lesson]]:
    """Texts of each domain that the target went on with, greedily and at temperature 1 by turns: those to measure
    first, and of the first domain those to learn from."""
    from outrider.llm import LLM, TokensPrompt
    from outrider.llm import SamplingParams as Asked

    tokenizer, found = load_tokenizer(target, "--target"), {}
    with LLM(target, threads=1) as llm:
        for place, (name, pattern) in enumerate(settings.domains.items()):
            number = settings.measured + (settings.num_learned if place == 0 else 0)
            prompts = excerpts(name, pattern, number, settings.seed, tokenizer.encode)
            params = [
                Asked(temperature=float(index % 2), seed=index, max_tokens=ANSWER_TOKENS, ignore_eos=True)
                for index in range(number)
            ]
            note(f"{name}: the target writes {number} texts ...")
            asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
            outputs = llm.generate(asked, params, use_tqdm=False)
            found[name] = [
                Lesson(
                    DIGEST, "", prompt, list(output.outputs[0].token_ids),
                    SamplingParams(temperature=float(index % 2)), AcceptanceRule.COUPLED, index,
                )
                for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
            ]  # fmt: skip
    return found


def excerpts(name: str, pattern: str, number: int, seed: int, encode: object) -> list[list[int]]:
    """The first tokens of so many excerpts of the files. ValueError where there are none."""
    dice = random.Random(f"{name} {seed}")
    texts = texts_of(name, pattern, MAX_FILES, dice)
    found: list[list[int]] = []
    while len(found) < number:
        text = dice.choice(texts)
        start = dice.randrange(max(1, len(text) - EXCERPT))
        ids = encode(text[start : start + EXCERPT])[:PROMPT_TOKENS]  # type: ignore[operator]
        if len(ids) == PROMPT_TOKENS:
            found.append(ids)
    return found


def texts_of(name: str, pattern: str, most: int, dice: random.Random) -> list[str]:
    """So many of the files, or all. ValueError where there are none."""
    files = [path for path in map(Path, sorted(glob(pattern, recursive=True))) if path.is_file()]
    files = [path for path in files if path.stat().st_size in FILE_BYTES]
    if not files:
        raise ValueError(f"domain: {name} has no file of {FILE_BYTES.start} to {FILE_BYTES.stop} bytes, {pattern}")
    return [path.read_text(encoding="utf-8", errors="ignore") for path in dice.sample(files, min(len(files), most))]


def first_texts(settings: LearningSettings, most: int) -> list[str]:
    """Of the domain that is learned."""
    name, pattern = next(iter(settings.domains.items()))
    return texts_of(name, pattern, most, random.Random(f"{name} {settings.seed}"))


def of_target(lesson: Lesson, student: Student) -> Lesson:
    """As the student knows its target, if it knows one."""
    return replace(lesson, target_digest=getattr(student, "target_digest", lesson.target_digest))


def new_student(settings: LearningSettings, folders: Folders, head: Path | None) -> Student:
    """Of a draft's folder, or of a head beside the target."""
    import torch

    from outrider.learning.student import StudentPlan
    from outrider.learning.students import student_of

    torch.set_num_threads(1)
    plan = StudentPlan(settings.rank, settings.learning_rate, num_tokens=settings.num_draft_tokens)
    return student_of(folders.draft, plan) if head is None else student_of(folders.target, plan, head)


def new_learner(settings: LearningSettings, student: Student, folder: Path) -> Learner:
    """With the settings of `outrider learn`, but for those that are given here."""
    from outrider.learning.learner import Learner, LearnerPlan
    from outrider.learning.versions import Shelf

    return Learner(student, Shelf(folder, student.digest), LearnerPlan(window=settings.num_draft_tokens))


def render(result: Json) -> Iterator[str]:
    """A line a measurement, and what was won back."""
    setup = result["setup"]
    learned, *_ = setup["domains"]
    yield f"{setup['tokens_per_s']:g} tokens/s of {learned}; {where(result)}"
    yield ""
    rows = [["seconds", "promoted", *(f"{name}, {how}" for name in setup["domains"] for how in ("greedy", "sampled"))]]
    rows.append(["alone", "", *_cells(result["alone"])])
    rows += [[f"{one['seconds']:.0f}", str(one["promoted"]), *_cells(one["live"])] for one in result["points"]]
    if "reference" in result:
        rows.append(["reference", "", *_cells(result["reference"])])
    yield from align(rows)
    if "served" in result:
        served = result["served"]
        yield ""
        yield (
            f"{served['streams']} streams: {median_of(served['beside'], 1)} tokens/s beside a learner on "
            f"{served['cores_of_the_learner']:.2f} of a core, {median_of(served['alone'], 1)} alone: "
            f"{bracketed(served['ratio'])}"
        )
    if "reference" in result:
        yield ""
        parts = [part[learned] for part in (result["alone"], result["points"][-1]["live"], result["reference"])]
        for hows in (("greedy",), ("sampled",), ("greedy", "sampled")):
            first, last, best = (sum(part[how] for how in hows) for part in parts)
            share = f"{(last - first) / (best - first):.0%}" if best > first else "there is no gap"
            yield f"of the gap to the reference, {' and '.join(hows)}: {share}"


def _cells(found: Json) -> list[str]:
    return [f"{100 * value:.1f}" for one in found.values() for value in (one["greedy"], one["sampled"])]
