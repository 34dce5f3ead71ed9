"""What a draft is worth, tried before it is believed: the target goes on from short texts, greedily, and what it keeps
of the drafted tokens is counted. A draft that was made for another target, or is read otherwise than it was trained,
fails nowhere: its tokens are refused, and nobody is told. So it is held against the poorest draft there is, which
always proposes the token that the target says most often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from outrider.planner.policy import Round, SpeculationTally
from outrider.rpc.messages import Commit, DraftTrial

NUM_TOKENS = 16  # generated behind each text
MOST_DRAFTED = 7  # tokens of a window
MOST_CONTEXT = 96  # tokens of a text that are read
# Of the kinds that models meet, each long enough to be in the middle of something.
TEXTS = (
    "The lighthouse stood on the last rock before the open sea. Every evening the keeper climbed the stairs, wound up "
    "the clockwork, lit the lamp and wrote the weather into the book. In the winter of that year the",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\n"
    "def variance(values):\n    average = mean(values)\n    total = 0.0\n    for value in values:\n",
    "Question: What is the capital of France?\nAnswer: The capital of France is Paris.\n\nQuestion: How many days does "
    "a week have?\nAnswer: A week has seven days.\n\nQuestion: At which temperature does water boil?\nAnswer:",
    '[\n  {"name": "Ada", "year": 1815, "city": "London"},\n  {"name": "Alan", "year": 1912, "city": "London"},\n'
    '  {"name": "Grace", "year": 1906, "city": "New York"},\n',
    "To bake bread, mix the flour with water, salt and yeast. Knead the dough for ten minutes, cover it and let it "
    "rest in a warm place. Then shape the loaf, heat the oven and",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n"
    "    def read(self):\n        with open(self.path) as file:\n            return file.read()\n\n"
    "    def lines(self):\n",
)


def trial_prompts(encode: Callable[[str], Sequence[int]], max_model_len: int) -> list[tuple[int, ...]]:
    """The texts' ids, as far as a context has room for what comes behind them; none where it has not."""
    room = min(MOST_CONTEXT, max_model_len - NUM_TOKENS - MOST_DRAFTED)
    return [tuple(ids[:room]) for ids in map(encode, TEXTS) if ids and room > 0]


def judge_trial(method: str, commits: Iterable[Commit]) -> DraftTrial:
    """Of all that was committed; windows without a draft say what the target says, and no more."""
    commits, tally = list(commits), SpeculationTally()
    for commit in commits:
        if commit.num_drafted:
            tally.add(Round(0, commit, commit.num_drafted, 0.0, 0.0, 0))
    tokens = Counter(chain.from_iterable(commit.ids for commit in commits))
    pairs = zip(tally.num_accepted_per_position, tally.num_tested_per_position, strict=True)
    accepted = tuple(kept / tested for kept, tested in pairs if tested)
    guess = max(tokens.values(), default=0) / max(1, tokens.total())
    return DraftTrial(method, accepted, guess, tally.num_drafts)
