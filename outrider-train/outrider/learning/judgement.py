"""Whether weights draft better than others, by texts that neither has learned from.

What a text is worth is counted in shadow. Greedy and coupled tokens do not depend on what drafted them, so that what a
draft would have said at every position follows from the text and its noise: tokens a round, exactly. Under rejection it
is the likelihood that the draft gives the text.

The test is sequential (Ville's inequality, with bets on bounded differences: Waudby-Smith and Ramdas, arXiv
2010.09686): who bets on the candidate begins with 1, and where it is no better on average, comes to 1 / error in at
most that share of all cases, however often one looks. A text counts no more than a token of a round of five: what few
texts say is not what most do, and where no text can say much, more is put at stake, so that fewer are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite

import torch
from torch import Tensor

from outrider.engine.random import RandomAhead, RandomKey, RandomRange, RandomSource, noise_source
from outrider.kernels.verify.reference import coupled_choice
from outrider.rpc.messages import Lesson
from outrider.rpc.words.sampling_params import AcceptanceRule

MOST_COUNTED = 0.2  # of what a text is worth more or less
STAKES = (0.5, 2.0, 4.5)  # of what a bettor has, on a text worth 1 more; each has a share, which none can lose whole


def worth(lesson: Lesson, logits: Tensor, window: int) -> float:
    """What a draft is worth for a lesson, 0 to 1, whose logits are [drawn, vocab]: for greedy and coupled tokens the
    share of drafts of `window` tokens that is accepted, over all rounds; else the mean probability of the text."""
    ids = torch.tensor(lesson.drawn_ids)  # [drawn]
    if is_weighed(lesson):
        probs = (logits / lesson.sampling.temperature).softmax(-1)  # [drawn, vocab]
        return float(probs.gather(1, ids[:, None]).mean())
    agreed = (drafted(lesson, logits, torch.arange(len(ids))) == ids).tolist()
    return share_accepted([agreed[place : place + window] for place in range(len(agreed))], window)


def is_weighed(lesson: Lesson) -> bool:
    """Whether its drafts are accepted by their probabilities: then they follow from no noise that is known."""
    return not (lesson.sampling.greedy or lesson.acceptance == AcceptanceRule.COUPLED)


def drafted(lesson: Lesson, logits: Tensor, places: Tensor) -> Tensor:  # [rows, vocab], [rows] -> [rows]
    """What a draft with these logits says at places among the tokens that were drawn."""
    if lesson.sampling.greedy:
        return logits.argmax(-1)
    probs = (logits / lesson.sampling.temperature).softmax(-1)
    return coupled_choice(probs, noise_of(lesson, logits.shape[1])[places])


def share_accepted(windows: Sequence[Sequence[bool]], window: int) -> float:
    """Of rounds of `window` drafted tokens and one more: (tokens a round - 1) / window. `windows` say, of every place
    where a round may begin, where its drafts agree with the text. Where the text ends within a round, the round counts
    as the part of it that there is."""
    place, rounds, accepted = 0, 0.0, 0
    while place < len(windows):
        agreed = windows[place]
        rest = len(agreed)
        found = next((index for index in range(rest) if not agreed[index]), rest)
        rounds += rest / window
        accepted += found
        place += found + 1
    return min(1.0, accepted / (rounds * window)) if rounds else 0.0


def noise_of(lesson: Lesson, vocab_size: int) -> Tensor:  # [drawn, vocab]
    """What the target's race had at these positions."""
    source: RandomSource = noise_source(vocab_size, torch.device("cpu"))
    first, count = len(lesson.prompt_ids) + lesson.num_given, lesson.num_drawn
    span = RandomRange(RandomKey(lesson.seed, lesson.completion), RandomAhead(), first, count, first + count)
    return source.rows([span])


class Verdict(Enum):
    """Of a sequential test."""

    OPEN = "open"
    BETTER = "better"
    NO_BETTER = "no better"  # it is worse, by the same error


@dataclass(slots=True)
class Trial:
    """One that is said to be better than another, lesson by lesson."""

    error: float = 0.01
    most: int = 2000  # lessons, after which it is given up
    num_lessons: int = 0
    gain: float = 0.0  # summed up
    _for: list[float] = field(default_factory=lambda: [1.0] * len(STAKES))
    _against: list[float] = field(default_factory=lambda: [1.0] * len(STAKES))

    def add(self, *worths: tuple[float, float]) -> Verdict:
        """What lessons were worth with each, 0 to 1: one, or one of each of several callers, who then weigh the same.
        It holds of their mean, too: where that is no better, the product of what they bring is no more than 1 on
        average."""
        for new, old in worths:
            self._bet(new, old)
        return self.verdict

    @property
    def verdict(self) -> Verdict:
        """By what was added."""
        if self.evidence >= 1 / self.error:
            return Verdict.BETTER
        if sum(self._against) / len(STAKES) >= 1 / self.error or self.num_lessons >= self.most:
            return Verdict.NO_BETTER
        return Verdict.OPEN

    def _bet(self, new: float, old: float) -> None:
        gain = new - old if isfinite(new - old) else -1.0  # of a draft that says no numbers
        difference = max(-MOST_COUNTED, min(MOST_COUNTED, gain))
        self.num_lessons += 1
        self.gain += gain
        self._for = [held * (1 + stake * difference) for held, stake in zip(self._for, STAKES, strict=True)]
        self._against = [held * (1 - stake * difference) for held, stake in zip(self._against, STAKES, strict=True)]

    @property
    def evidence(self) -> float:
        """What who bet on it has made of 1."""
        return sum(self._for) / len(STAKES)

    @property
    def mean_gain(self) -> float:
        """Of a lesson."""
        return self.gain / max(1, self.num_lessons)
