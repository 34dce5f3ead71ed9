"""What is asked of the gateways while faults happen, and what the answers have to be: every rule with every method, and
every shape that a request may have with every rule whose answers are exact."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.fleet import Drafting, Fleet

from outrider.client import Client, Part, Retry
from outrider.rpc.words.sampling_params import AcceptanceRule, FinishReason
from outrider.rpc.words.structured import StructuredOutput

NUM_TOKENS = 300
TIMEOUT_S = 240.0  # of a stream: longer than any fault, and than a service takes to start
PATIENT = Retry(attempts=60)  # both gateways may be away until one has been started again
DEFAULT = Drafting.of(0)

PROMPTS = (
    "def parse_args(argv):\n",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n        return",
    "import os\nimport sys\n\n\ndef main():\n",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return",
)
LONG_PROMPT = "".join(f"def function_{number}(value):\n    return value + {number}\n\n\n" for number in range(40))
SCHEMA = json.dumps({"type": "array", "minItems": 12, "maxItems": 12, "items": {"enum": ["ada", "grace", "katherine"]}})

# How tokens are chosen. Of the last two nothing but the law is the same each time.
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "acceptance": AcceptanceRule.COUPLED},
    "rejection": {"temperature": 1.0, "acceptance": AcceptanceRule.REJECTION},
    "block": {"temperature": 1.0, "acceptance": AcceptanceRule.BLOCK},
}
EXACT = ("greedy", "coupled")

# What else a request may want; the text decides the length where a constraint ends it.
SHAPES: dict[str, dict[str, Any]] = {
    "plain text": {},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ["\n\n\n"], "ignore_eos": False},
    "schema": {"structured_output": StructuredOutput(json_schema=SCHEMA), "ignore_eos": False},
    "regex": {"structured_output": StructuredOutput(regex="([a-z]{3,9} ){30}"), "ignore_eos": False},
    "long prompt": {"prompt": LONG_PROMPT},
    "two completions": {"n": 2},
}


def ways(drafting: Drafting) -> tuple[dict[str, Any], ...]:
    """How a request may be drafted: every method of the fleet, several in turn, ahead, and as the gateway chooses. As
    many for every fleet, so that requests of one number differ in nothing else."""
    in_turn = f"ngram,{drafting.model}", f"prediction,suffix,{drafting.model}"
    names = (*drafting.methods, drafting.head, *in_turn)
    return (
        *({"method": name, "num_draft_tokens": 4} for name in names),
        {"mode": "branches", "num_draft_tokens": 4},
        {},
    )


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    rule: str
    shape: str
    options: dict[str, Any]

    @property
    def exact(self) -> bool:
        """Whether its answer is the same each time, to the byte."""
        return self.rule in EXACT

    @property
    def predicts(self) -> bool:
        """Whether it is given a guess at its answer."""
        return "prediction" in self.options.get("method", "").split(",")

    @property
    def key(self) -> str:
        """What tells its answer from all others: how it is drafted has no say in that."""
        return f"{self.rule}, {self.shape}, {self.options['seed']}"

    def plain(self) -> dict[str, Any]:
        """Its options without drafts."""
        options = {name: value for name, value in self.options.items() if name not in ("method", "mode", "prediction")}
        return {**options, "num_draft_tokens": 0, "speculate": False}


@dataclass(frozen=True)
class Answer:
    """All that a stream brought of a completion; of several that of the others, too."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None
    logprobs: tuple[Any, ...] = ()
    others: tuple[Answer, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Answer:
        """Of a stream's parts."""
        groups = [[part for part in parts if part.index == place] for place in _places(parts)]
        first, *others = (cls._of_one(group) for group in groups)
        return cls(first.ids, first.text, first.finish, first.logprobs, tuple(others))

    @classmethod
    def _of_one(cls, parts: Sequence[Part]) -> Answer:
        ids = [token for part in parts for token in part.token_ids]
        logprobs = [entry for part in parts for entry in part.logprobs]
        finish = next((part.finish_reason for part in parts if part.finish_reason is not None), None)
        return cls(tuple(ids), "".join(part.text for part in parts), finish, tuple(logprobs))

    @property
    def completions(self) -> tuple[Answer, ...]:
        """Each by itself."""
        return (self, *self.others)

    def difference(self, other: Answer) -> str:
        """Where they part; empty if nowhere."""
        if len(self.others) != len(other.others):
            return f"{len(other.completions)} completions, and were {len(self.completions)}"
        for number, (one, another) in enumerate(zip(self.completions, other.completions, strict=True)):
            if found := one._own_difference(another):
                return f"completion {number}: {found}" if self.others else found
        return ""

    def _own_difference(self, other: Answer) -> str:
        for place, (one, another) in enumerate(itertools.zip_longest(self.ids, other.ids)):
            if one != another:
                return f"token {place} is {another}, and was {one} ({len(self.ids)} tokens, now {len(other.ids)})"
        for name in ("text", "finish", "logprobs"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} differs: {getattr(other, name)!r:.200}, and was {getattr(self, name)!r:.200}"
        return ""

    def begins(self, whole: Answer) -> bool:
        """Whether every completion is the beginning of what it is in `whole`, as far as it came."""
        pairs = zip(self.completions, whole.completions, strict=False)
        return all(one.ids == another.ids[: len(one.ids)] for one, another in pairs)


def _places(parts: Sequence[Part]) -> range:
    return range(1 + max((part.index for part in parts), default=0))


def all_asks(seed: int, num_tokens: int = NUM_TOKENS, drafting: Drafting = DEFAULT) -> list[Ask]:
    """Every rule with every method, each with a shape in turn, and every shape with every exact rule; shuffled."""
    dice, hows = random.Random(f"asks {seed}"), ways(drafting)
    pairs: list[tuple[str, dict[str, Any], str | None]] = [(rule, how, None) for rule in RULES for how in hows]
    pairs += [(rule, dice.choice(hows), shape) for rule in EXACT for shape in SHAPES]
    shapes = itertools.cycle(SHAPES)
    asks = [
        _ask(number, rule, how, shape or next(shapes), num_tokens) for number, (rule, how, shape) in enumerate(pairs)
    ]
    dice.shuffle(asks)
    return asks


def _ask(number: int, rule: str, how: dict[str, Any], shape: str, num_tokens: int) -> Ask:
    name = f"{rule}, {how.get('method') or how.get('mode') or 'auto'}, {shape}"
    options: dict[str, Any] = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": num_tokens, "ignore_eos": True}
    options |= {"seed": number, "salt": f"ask {number}", **RULES[rule], **how, **SHAPES[shape]}
    return Ask(name, rule, shape, options)


FRESH = 100_000  # seeds of requests with a schema that nobody has seen
WORDS = ("ada", "grace", "katherine", "barbara", "frances", "radia")


def fresh_ask(number: int, drafting: Drafting = DEFAULT) -> Ask:
    """One whose JSON schema is no other number's, so that it has to be compiled."""
    rule, hows = EXACT[number % len(EXACT)], [how for how in ways(drafting) if "prediction" not in str(how)]
    fields: dict[str, Any] = {
        f"{word}_{number}": {"enum": [f"{word} {number + place}" for place in range(8)]} for word in WORDS
    }
    counts = {"enum": [1, number + 2, -number]}
    fields[f"counts_{number}"] = {"type": "array", "minItems": 3, "maxItems": 3, "items": counts}
    fields[f"name_{number}"] = {"type": "string", "pattern": "^([a-z]{2,5} ){3}[a-z]{2,5}$"}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    ask = _ask(FRESH + number, rule, hows[number % len(hows)], "schema", NUM_TOKENS)
    ask.options["structured_output"] = StructuredOutput(json_schema=json.dumps(schema))
    return Ask(ask.name.replace("schema", "a new schema"), rule, "a new schema", ask.options)


async def expectations(
    asks: Sequence[Ask], fleet: Fleet, known: Mapping[str, Answer] | None = None
) -> dict[str, Answer]:
    """The answers to those that are exact, beside what is `known`, decoded plainly by services that nothing happens to.
    Requests that predict their answer are given it, with every seventh token wrong."""
    found = dict(known or {})
    async with Client(fleet.addresses) as client:
        for ask in asks:
            if not ask.exact and not ask.predicts:
                continue
            if ask.key not in found:
                parts = [part async for part in client.generate(timeout=TIMEOUT_S, **ask.plain())]
                found[ask.key] = Answer.of(parts)
            if ask.predicts:
                ids = found[ask.key].ids
                ask.options["prediction"] = [token if place % 7 else token // 2 for place, token in enumerate(ids)]
    return found
