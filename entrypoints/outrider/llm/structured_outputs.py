"""Constraints on the text, by vLLM's names: `StructuredOutputsParams`, and what older versions had in its place."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from outrider.llm.validation import CONFIG, Fixed, Flag, OrDefault, plain_errors, require_fixed, require_known
from outrider.rpc.words.structured import StructuredOutput

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
COMPILER = "x-guidance"  # where a schema tells llguidance how JSON is written
# Which library compiles, by two names that it has had.
COMPILERS = ("auto", "guidance")
ONE_COMPILER = "llguidance compiles every grammar; allowed: 'auto', 'guidance'"
FIXED: Fixed = dict.fromkeys(("backend", "guided_decoding_backend"), ((None, *COMPILERS), ONE_COMPILER))
# Where a schema holds others: by name, or one, or a list.
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMAS = (
    "items", "prefixItems", "additionalItems", "additionalProperties", "unevaluatedProperties", "allOf", "anyOf",
    "oneOf", "not", "if", "then", "else", "contains",
)  # fmt: skip

Text = Annotated[str, Field(strict=True, min_length=1, pattern=r"\S")]
Schema = dict[str, Any] | Text | type[BaseModel]
SCHEMA_FORMS = "a JSON schema, as a dict, a text or a pydantic model's class, or None"


@plain_errors("StructuredOutputsParams")
@dataclass(config=CONFIG)
class StructuredOutputsParams:
    """What an output's text must match: exactly one of six kinds."""

    json: Annotated[Schema | None, Field(description=SCHEMA_FORMS)] = None
    regex: Annotated[Text | None, Field(description="a regular expression, or None")] = None
    choice: Annotated[
        list[Annotated[str, Field(strict=True, min_length=1)]] | None,
        Field(min_length=1, description="a list of texts, neither it nor they empty, or None"),
    ] = None
    grammar: Annotated[Text | None, Field(description="a grammar in Lark's form or EBNF, or None")] = None
    json_object: Annotated[Literal[True] | None, Field(description="True or None")] = None
    # How JSON is written; they say nothing of the other kinds, as in vLLM.
    disable_any_whitespace: Annotated[Flag, OrDefault] = False
    disable_additional_properties: Annotated[Flag, OrDefault] = False
    whitespace_pattern: Annotated[
        Annotated[str, Field(strict=True)] | None, Field(description="a regular expression, or None")
    ] = None
    structural_tag: Annotated[
        dict[str, Any] | Text | None, Field(description="a structural tag, as a dict or its JSON text, or None")
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{', '.join(given)}"
            )
        if not given:
            raise ValueError(
                f"You must use one kind of structured outputs constraint but none are specified: {', '.join(KINDS)}"
            )
        for name in ("json", "structural_tag"):
            if isinstance(text := getattr(self, name), str):
                _parse(name, text)

    def all_constraints_none(self) -> bool:
        """Never, as in vLLM: one that constrains nothing cannot be made."""
        return False

    def constraint(self) -> StructuredOutput:
        """The constraint in the project's own form."""
        if self.json is not None:
            return StructuredOutput(json_schema=self._written(_schema_of(self.json)))
        if self.json_object and self._style:
            return StructuredOutput(json_schema=self._written({"type": "object"}))
        if self.structural_tag is not None:
            tag = self.structural_tag
            return StructuredOutput(structural_tag=tag if isinstance(tag, str) else json_module.dumps(tag))
        return StructuredOutput(
            regex=self.regex,
            grammar=self.grammar,
            choice=None if self.choice is None else tuple(self.choice),
            json_object=bool(self.json_object),
        )

    @property
    def _style(self) -> dict[str, Any]:
        """The constraint in the compiler's words."""
        style: dict[str, Any] = {}
        if self.disable_any_whitespace:
            style["whitespace_flexible"] = False
        if self.whitespace_pattern is not None:
            style["whitespace_pattern"] = self.whitespace_pattern
        return style

    def _written(self, schema: dict[str, Any]) -> str:
        if self.disable_additional_properties:
            schema = _closed(schema)
        if self._style:
            schema = {**schema, COMPILER: {**schema.get(COMPILER, {}), **self._style}}
        return json_module.dumps(schema)


@plain_errors("GuidedDecodingParams")
@dataclass(config=CONFIG)
class GuidedDecodingParams(StructuredOutputsParams):
    """The same in vLLM's versions before it, as `SamplingParams(guided_decoding=...)`."""

    backend: str | None = None
    backend_was_auto: Flag = False
    disable_fallback: Flag = False  # there is none

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fixed(FIXED, vars(self), "GuidedDecodingParams({}={!r})")

    @classmethod
    def from_optional(cls, **given: Any) -> GuidedDecodingParams | None:
        """The constraint in the project's own form; None where nothing constrains."""
        return None if all(given.get(name) is None for name in KINDS) else cls(**given)


GUIDED = {
    f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
} | {"structural_tag": "structural_tag"}


def of_guided_options(given: Any) -> StructuredOutputsParams | None:
    """`guided_options_request` of older `LLM.generate`: a dict, or an object with these fields. Raises ValueError,
    TypeError, Unsupported."""
    if given is None:
        return None
    options = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    require_known(options, (*GUIDED, "guided_decoding_backend"), "guided_options_request")
    require_fixed(FIXED, options, "guided_options_request({}={!r})")
    said = {GUIDED[name]: value for name, value in options.items() if name in GUIDED and value is not None}
    return StructuredOutputsParams(**said)


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        parsed = json_module.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} must be JSON, got {text!r:.100}: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{name} must be a JSON object, got {text!r:.100}")
    return parsed


def _schema_of(given: Schema) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    return _parse("json", given) if isinstance(given, str) else given.model_json_schema()


def _closed(schema: Any) -> Any:
    """Objects that list properties, and do not speak of others, have no others."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name, value in schema.items():
        if name in NAMED_SCHEMAS and isinstance(value, dict):
            closed[name] = {key: _closed(entry) for key, entry in value.items()}
        elif name in SCHEMAS:
            closed[name] = _closed(value)
    lists = any(isinstance(schema.get(name), dict) for name in ("properties", "patternProperties"))
    return {"additionalProperties": False, **closed} if lists else closed
