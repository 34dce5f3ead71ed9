"""A constraint as the text that llguidance compiles, and the limits under which it does. Imports no torch: the process
that tries constraints out (`trial`) needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.engine.grammar.ebnf import is_ebnf, lark_of_ebnf
from outrider.engine.grammar.lark import GrammarError, first_line, quoted, schema_object
from outrider.engine.grammar.structural_tag import lark_of
from outrider.rpc.words.structured import Reasoning, StructuredOutput

MAX_BYTES = 256 * 1024  # of a constraint's text, all choices together
Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]
KINDS: tuple[Kind, ...] = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")
_TEXT_KINDS: tuple[Kind, ...] = ("json_schema", "regex", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a text must be: `kind` with its text or choices, behind its reasoning. No kind: anything."""

    kind: Kind | None
    text: str = ""
    choices: tuple[str, ...] = ()
    reasoning: Reasoning | None = None

    @classmethod
    def of(cls, constraint: StructuredOutput | None, reasoning: Reasoning | None) -> GrammarSpec | None:
        """What a request asks for; None where it asks for nothing."""
        if constraint is None and reasoning is None:
            return None
        if constraint is None:
            return cls(None, reasoning=reasoning)
        if constraint.choice is not None:
            return cls("choice", choices=tuple(constraint.choice), reasoning=reasoning)
        for kind in _TEXT_KINDS:
            if (text := getattr(constraint, kind)) is not None:
                return cls(kind, text, reasoning=reasoning)
        return cls("json_object", reasoning=reasoning)


def limits() -> LLParserLimits:
    """What one constraint may take: sizes, states (1 to 2 kB each) and work, at its compilation and at each mask. They
    do not bound every regex's time, which is why a constraint is tried out first."""
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_lexer_states=30_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def new_tokenizer(layout: str, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """A tokenizer.json as masks need it. Raises GrammarError for one without bytes of its tokens, or with more tokens
    than the model has logits."""
    try:
        return LLTokenizer(layout, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
    except (ValueError, RuntimeError) as error:
        raise GrammarError(f"the tokenizer does not serve grammars: {error}") from error


def new_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compiles. Raises GrammarError with the library's reason; may take very long."""
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    return matcher


def source_of(spec: GrammarSpec, special_ids: Mapping[str, int]) -> str:
    """The library's text of a constraint. `special_ids` are those of special tokens, which no text matches. Raises
    GrammarError."""
    size = sum(len(text.encode("utf-8", "replace")) for text in (spec.text, *spec.choices))
    if size > MAX_BYTES:
        raise GrammarError(f"has {size} bytes; allowed: at most {MAX_BYTES}")
    try:
        return _SOURCES[spec.kind](spec, special_ids) if spec.kind is not None else ""
    except GrammarError:
        raise
    except RecursionError as error:
        raise GrammarError("is nested too deeply") from error
    except ValueError as error:  # Python reads infinities and half surrogate pairs in JSON, and the library does not
        raise GrammarError(f"cannot be read: {first_line(str(error))}") from error


def _json_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"is no JSON: {first_line(str(error))}") from error
    return LLMatcher.grammar_from_json_schema(json.dumps(schema_object(schema)))


def _choice(choices: Sequence[str]) -> str:
    if not choices:
        raise GrammarError("has no choices; allowed: 1 or more")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, choices)))


def lark_of_grammar(text: str) -> str:
    """A grammar in Lark's form, whichever it is in. Raises GrammarError."""
    try:
        return lark_of_ebnf(text) if is_ebnf(text) else text
    except RecursionError as error:
        raise GrammarError("is nested too deeply") from error
    except ValueError as error:
        raise GrammarError(f"is no EBNF: {first_line(str(error))}") from error


_SOURCES: Mapping[str, Any] = {
    "json_schema": lambda spec, _: _json_schema(spec.text),
    "json_object": lambda spec, _: _json_schema('{"type": "object"}'),
    "regex": lambda spec, _: LLMatcher.grammar_from_regex(spec.text),
    "grammar": lambda spec, _: LLMatcher.grammar_from_lark(lark_of_grammar(spec.text)),
    "choice": lambda spec, _: _choice(spec.choices),
    "structural_tag": lambda spec, special_ids: LLMatcher.grammar_from_lark(lark_of(spec.text, special_ids)),
}
