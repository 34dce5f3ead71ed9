"""What is combined: the factors of a request and of what serves it, which of their values exclude one another and why,
and covering arrays over the rest (covertable): every t values of different factors stand together in some row."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

import covertable

from outrider.proposers.registry import HEADS, METHODS

Method = Literal[
    "none", "draft_model", "ngram", "suffix", "prediction", "pard", "eagle", "eagle3", "p-eagle", "medusa",
    "mlp_speculator", "mtp", "dflash", "dflash2", "dspark", "self:int4", "in turn", "draft tree", "head tree",
]  # fmt: skip
TREES = ("draft tree", "head tree")
OF_REGISTRY = {*METHODS, *HEADS}
Model = Literal["dense", "a mixture"]
Rule = Literal["greedy", "coupled", "rejection", "block"]
Constraint = Literal["none", "json schema", "regex", "grammar", "tools", "reasoning"]
Weights = Literal["16 bits", "8 bits", "4 bits"]
Adapter = Literal["none", "one"]
Cache = Literal["cold", "warm", "another tenant's"]
Prompt = Literal["at once", "in chunks"]
Processors = Literal["none", "penalties", "bias", "bad words", "min_p", "top_k and top_p", "min_tokens"]
Logprobs = Literal["none", "of the output", "of the prompt, too"]
Completions = Literal["1", "3"]
Stop = Literal["none", "a string", "an id"]
Blocks = Literal["enough", "too few"]
Kernels = Literal["C", "PyTorch"]
Tokens = Literal["1", "3", "7", "16"]
Answer = Literal["whole", "streamed"]


@dataclass(frozen=True, slots=True)
class Combination:
    """Values of several factors, each a field whose type names what it may be."""

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    @classmethod
    def factors(cls) -> Mapping[str, tuple[Any, ...]]:
        """The values of each."""
        return {name: get_args(hint) for name, hint in get_type_hints(cls).items()}


@dataclass(frozen=True, slots=True)
class Row(Combination):
    """One that runs in one process. The first six say what serves it; the others are the request's."""

    model: Model
    method: Method
    weights: Weights
    kernels: Kernels
    prompt: Prompt
    blocks: Blocks
    rule: Rule
    constraint: Constraint
    adapter: Adapter
    cache: Cache
    processors: Processors
    logprobs: Logprobs
    n: Completions
    stop: Stop
    k: Tokens  # drafted in a round, at most
    answer: Answer

    @property
    def num_words(self) -> range:
        """Of its message."""
        return range(6, 12)

    @property
    def server(self) -> tuple[str, ...]:
        """What has to be started for it."""
        return self.model, self.method, self.weights, self.kernels, self.prompt, self.blocks

    @property
    def plain_server(self) -> tuple[str, ...]:
        """What serves its like without drafts, alone."""
        return self.model, "none", self.weights, self.kernels, "at once", "enough"

    @property
    def is_plain_again(self) -> bool:
        """Whether its tokens have to be those of plain decoding; else they have its law. What a grammar forces is
        drafted, too, where nothing else is."""
        return self.rule in ("greedy", "coupled") or (self.method == "none" and self.constraint == "none")


FACTORS = Row.factors()


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Values that do not stand together, and why."""

    factors: tuple[str, ...]
    excluded: Callable[[Mapping[str, Any]], bool]
    what: str
    why: str


EXCLUSIONS = (
    Exclusion(
        ("method", "rule"),
        lambda row: row["method"] in TREES and row["rule"] in ("rejection", "block"),
        "trees under rejection, token by token or by blocks",
        "a tree's branches are no independent draws of the draft; `LLM` and the services judge trees by coupling",
    ),
    Exclusion(
        ("method", "k"),
        lambda row: row["method"] in TREES and row["k"] != "7",
        "trees with another number of drafted tokens than their nodes",
        "a tree's shape is its own, fixed where it is started",
    ),
    Exclusion(
        ("cache", "blocks"),
        lambda row: row["cache"] != "cold" and row["blocks"] == "too few",
        "a warm cache with too few blocks",
        "what is cached is the first to go; both alone are in the table",
    ),
    Exclusion(
        ("logprobs", "answer"),
        lambda row: row["logprobs"] == "of the prompt, too" and row["answer"] == "streamed",
        "a prompt's log probabilities of streamed answers",
        "refused by name, as vLLM does",
    ),
    Exclusion(
        ("logprobs", "cache"),
        lambda row: row["logprobs"] == "of the prompt, too" and row["cache"] == "warm",
        "a prompt's log probabilities over a warm cache",
        "they are of rows, and what is cached has none: the prompt is computed anew",
    ),
    Exclusion(
        ("rule", "processors"),
        lambda row: row["rule"] == "greedy" and row["processors"] in ("min_p", "top_k and top_p"),
        "min_p, top_k and top_p of greedy requests",
        "they leave the most probable token, and change nothing",
    ),
)


def exclusion_of(row: Mapping[str, Any], exclusions: Sequence[Exclusion] = EXCLUSIONS) -> Exclusion | None:
    """Why values do not stand together; `row` may have some of the factors alone."""
    return next((one for one in exclusions if set(one.factors) <= row.keys() and one.excluded(row)), None)


def covering(
    factors: Mapping[str, Sequence[Any]], exclusions: Sequence[Exclusion], strength: int, seed: int
) -> list[dict[str, Any]]:
    """A covering array; other seeds give other ones."""
    levels = {name: list(values) for name, values in factors.items()}
    if seed:  # which values meet beyond the strength
        for values in levels.values():
            random.Random(f"{seed} {values}").shuffle(values)
    constraints = [
        {"operator": "fn", "requires": list(one.factors), "evaluate": lambda row, one=one: not one.excluded(row)}
        for one in exclusions
    ]
    made: list[dict[str, Any]] = covertable.make(levels, strength=strength, salt=str(seed), constraints=constraints)
    return made


@cache
def rows(strength: int, seed: int = 0) -> tuple[Row, ...]:
    """A covering array of what runs in one process, by what its rows start."""
    made = [Row(**row) for row in covering(FACTORS, EXCLUSIONS, strength, seed)]
    return tuple(sorted(made, key=lambda row: (row.server, str(row))))
