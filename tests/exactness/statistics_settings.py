"""What is drawn: under which sampling parameters, how it is drafted, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from conftest import SEED

from outrider.planner.policy import Policy
from outrider.rpc.sampling_params import AcceptanceRule, SamplingParams

PATIENCE_MS = 60_000  # the target waits for every draft: then a seed fixes the draws, whatever the timing
VOCAB, WIDE_VOCAB = 16, 4096
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": -0.6, "frequency_penalty": -1.8}  # it likes to repeat
EVERY_TOKEN = (7, 2, 11, 0, 5, 14, 9, 3, 12, 6, 1, 15, 8, 4, 13, 10, 7)  # whatever comes next, n-grams have a match
TOKENS_5K, TOKENS_20K, TOKENS_200K = 1_667, 6_667, 66_667  # sequences of 3 tokens


@dataclass(frozen=True)
class Setting:
    """What is asked for, and how it is drafted."""

    name: str
    sampling: dict[str, Any] = field(default_factory=dict)
    acceptance: AcceptanceRule = AcceptanceRule.REJECTION
    draft: str = "opposite"
    method: str = "draft_model"
    prompt: tuple[int, ...] = (3, 1, 4, 1, 5)
    k: int = 2
    depth: int = 3  # tokens of every sequence: at the first two a draft is judged, the third may be a bonus
    windows_ahead: int = 0  # drafted during the verification
    max_branches: int = 0
    cut_windows: bool = False  # the target verifies fewer drafted tokens where that pays
    short: int = TOKENS_20K  # sequences
    long: int = TOKENS_200K

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of every request."""
        return SamplingParams(**self.sampling, max_tokens=self.depth, ignore_eos=True)

    @property
    def policy(self) -> Policy:
        """The gateway's."""
        return Policy(
            self.k, PATIENCE_MS, windows_ahead=self.windows_ahead, max_branches=self.max_branches, max_target_opens=1
        )

    @property
    def depends_on_time(self) -> bool:
        """Whether clocks decide what is verified when: then a seed does not fix how tokens come about."""
        return self.windows_ahead > 0 or self.cut_windows

    def seeds(self, count: int) -> range:
        """Of `count` sequences; no two settings share any."""
        first = random.Random(f"{SEED} {self.name}").getrandbits(63)
        return range(first, first + count)


COUPLED = AcceptanceRule.COUPLED
ALL = {"temperature": 0.6, "top_p": 0.97, "min_p": 0.01, **PENALTIES}
TEMPERATURE_1 = Setting("temperature 1")
WITH_PENALTIES = Setting("penalties", PENALTIES)
EACH = [
    TEMPERATURE_1,
    Setting("temperature 0.6", {"temperature": 0.6}),
    Setting("top_p", {"top_p": 0.8}),
    Setting("min_p", {"min_p": 0.05}),
    WITH_PENALTIES,
]
EACH_COUPLED = [replace(setting, name=f"{setting.name}, coupled", acceptance=COUPLED) for setting in EACH]
TEMPERATURE_1_COUPLED = EACH_COUPLED[0]
BONUS = Setting("bonus", draft="tempered", short=TOKENS_5K)
CHAINS = Setting("chains", k=3, depth=4, windows_ahead=1, short=1_250)
SHORT = [
    *EACH,
    BONUS,
    Setting("ngram", method="ngram", prompt=EVERY_TOKEN, short=TOKENS_5K, long=TOKENS_20K),
    CHAINS,
    TEMPERATURE_1_COUPLED,
    Setting("all", ALL, short=TOKENS_5K, long=TOKENS_20K),
    Setting("all, coupled", ALL, COUPLED, long=TOKENS_20K),
    Setting("branches, coupled", ALL, COUPLED, windows_ahead=1, max_branches=2, short=TOKENS_5K, long=TOKENS_20K),
]
LONG = [*EACH_COUPLED[1:], replace(CHAINS, name="cut chains", cut_windows=True, long=TOKENS_20K)]
WIDE = Setting("wide", draft="half", k=1, depth=2, short=2_048, long=40_960)
