"""A constraint on a text, and the reasoning before it, as they travel."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.rpc.words.checks import Checks

TEXT_KINDS = ("json_schema", "regex", "grammar", "structural_tag")
MAX_REASONING_IDS = 32  # that begin it, or end it
MAX_REASONING_TOKENS = 2**31 - 1
# Between the tokens of JSON: a space, or a line's end and its indentation. Any number of them, and a model that is kept
# from all else writes spaces for ever.
JSON_OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,40})?"}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the text; exactly one field is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool = False
    structural_tag: str | None = None  # JSON, as vLLM's

    @property
    def kind(self) -> str:
        """The field that is set; of several, which the validator refuses, the first."""
        return next((name for name in (*TEXT_KINDS, "choice") if getattr(self, name) is not None), "json_object")


REASONING = "reasoning"  # the capability of who tracks it: a target bounds it, and constrains what follows it
CONSTRAINTS = ("sampling.structured_output", REASONING)  # the capabilities of who obeys both


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What comes before the text that `structured_output` applies to, told by token ids."""

    end_ids: tuple[int, ...]  # that end it, one after the other
    start_ids: tuple[int, ...] = ()  # that begin it, where the output starts with them
    max_tokens: int = 0  # after so many only end_ids may follow; 0: no bound
    open: bool = False  # the prompt ends inside it


def check_reasoning(found: Checks, reasoning: Reasoning, vocab_size: int) -> None:
    """The ids that bound reasoning, and how long it may be."""
    for name, least in (("end_ids", 1), ("start_ids", 0)):
        ids = getattr(reasoning, name)
        if not least <= len(ids) <= MAX_REASONING_IDS:
            found.add(f"reasoning.{name}", f"has {len(ids)} entries", f"{least} to {MAX_REASONING_IDS}")
        found.ids(f"reasoning.{name}", ids, vocab_size)
    found.integer("reasoning.max_tokens", reasoning.max_tokens, 0, MAX_REASONING_TOKENS)
