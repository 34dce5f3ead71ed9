"""A checkpoint's chat template: sandboxed Jinja with the names and settings of transformers, which the templates are
written for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(Exception):
    """The template cannot be read, or it refused a conversation."""


class ChatTemplate:
    """One template; compiled at its first use."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(self, messages: Iterable[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation; keys that are None count as absent."""
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if not plain:
            raise TemplateRefusal("it has no message")
        try:
            return self._compiled.render(messages=plain, **variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # what a template does to odd content
            raise TemplateRefusal(str(error)) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def find_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a checkpoint's folder: its own file, else the one in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source) if isinstance(source, str) else None


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here its content is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(style: str) -> str:
    return datetime.now().strftime(style)
