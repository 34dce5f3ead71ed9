"""What a draft service hands to those who make weights of it: the texts of ended sequences, of callers who allow that,
with the law by which they were drawn.

Under rejection a draft is exact if it is independent of the random numbers that judge it. So a sequence whose seed may
have come before teaches nothing under that rule, and nothing that was learned drafts for it; all other output either
depends on no draft, or was drawn with numbers that no sequence had before."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Self

from outrider.rpc.messages import LESSON_BYTES, TOKEN_BYTES, LearningKey, Lesson, Open
from outrider.rpc.words.sampling_params import AcceptanceRule, SamplingParams, without_prompt_logprobs

UNSALTED, SALTED = "unsalted", "salted"  # in place of a salt: sequences without one; those with one, each for itself
MAX_BYTES = 8 << 20  # of lessons that wait
MAX_TOKENS = 8192  # of a lesson; what is longer teaches nothing
MAX_LESSON_BYTES = LESSON_BYTES + TOKEN_BYTES * MAX_TOKENS  # with its biases and lists


@dataclass(frozen=True, slots=True)
class Teaching:
    """Of which others one sequence learns, and by what law it is drawn."""

    key: LearningKey
    sampling: SamplingParams
    acceptance: AcceptanceRule
    seed: int
    completion: int
    num_given: int  # tokens of its output when it was opened
    caller: str = ""  # a digest of whose it is
    is_whole: bool = True  # a token's likelihood follows from the draft's logits

    @classmethod
    def of(cls, request: Open, salts: Collection[str]) -> Self | None:
        """Of a request, where `salts` may learn; None where nothing learned may draft for it."""
        named = request.salt in salts and request.salt not in (UNSALTED, SALTED)
        allowed = named or (SALTED if request.salt else UNSALTED) in salts
        if not (allowed and request.may_recall and request.model_digest):
            return None
        key, num_given = LearningKey(request.model_digest, group_of(request.salt)), len(request.output_ids)
        law = without_prompt_logprobs(request.sampling), request.acceptance, request.seed, request.completion
        return cls(key, *law, num_given, request.caller, is_whole_law(request))

    def lesson(self, tokens: Sequence[int], prompt_len: int) -> Lesson | None:
        """What a sequence teaches that has ended, all of whose tokens were committed; None: nothing."""
        if len(tokens) <= prompt_len + self.num_given or not self.is_whole:
            return None
        return Lesson(
            *self.key,
            array("I", tokens[:prompt_len]),
            array("I", tokens[prompt_len:]),
            self.sampling,
            self.acceptance,
            self.seed,
            self.completion,
            self.num_given,
            self.caller,
        )


def is_whole_law(request: Open) -> bool:
    """Whether a token's likelihood follows from the draft's logits: a cut law's is of tokens that the target alone
    knows, and tokens of a grammar, or behind a bound of reasoning, may be forced."""
    sampling, is_bounded = request.sampling, request.reasoning is not None and request.reasoning.max_tokens > 0
    return sampling.structured_output is None and not is_bounded and (sampling.greedy or not sampling.cuts)


def group_of(salt: str) -> str:
    """By which a salt's sequences are known; nothing tells the salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:32] if salt else ""


class Lessons:
    """Those that wait for who learns of them, the newest in so many bytes. Any thread may ask."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._waiting, self._lock = max_bytes, deque[Lesson](), Lock()
        self._num_lost = 0  # since `take`
        self.num_bytes = 0  # of those that wait
        self.num_added = 0  # since the start

    def add(self, lesson: Lesson) -> None:
        """Takes one, and gives up the oldest where it has no room."""
        with self._lock:
            self.num_added += 1
            if lesson.num_bytes > min(self._max_bytes, MAX_LESSON_BYTES):
                self._num_lost += 1
                return
            self._waiting.append(lesson)
            self.num_bytes += lesson.num_bytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._waiting.popleft().num_bytes
                self._num_lost += 1

    def take(self) -> tuple[list[Lesson], int]:
        """All that wait, and how many were given up since the last time."""
        with self._lock:
            taken, lost = list(self._waiting), self._num_lost
            self._waiting.clear()
            self.num_bytes = self._num_lost = 0
        return taken, lost
