"""What the commands' settings need beyond outrider.wire.config: bare arguments, and values that are lists in one
text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from outrider.wire.config import ServiceSettings, parse_settings
from outrider.wire.options import options

S = TypeVar("S", bound=ServiceSettings)


def parse(
    cls: type[S],
    argv: Sequence[str],
    prog: str,
    description: str,
    bare: Sequence[str] = (),
    short: Mapping[str, str] | None = None,
) -> S:
    """The settings of a command line whose bare arguments are the settings `bare`, in order: `generate "Hi"` is
    `generate --prompt=Hi`. `short` are flags that stand for others."""
    example = " ".join([prog, *(name.upper() for name in bare)])
    wanted = {name: f"give the {name}, as in {example}" for name in bare}
    return parse_settings(cls, name_bare(cls, argv, bare, short or {}), prog, description, wanted)


def name_bare(model: type[BaseModel], argv: Sequence[str], bare: Sequence[str], short: Mapping[str, str]) -> list[str]:
    """The command line with its bare arguments as flags. What follows `--` is bare, too; more than there are names
    stay as they are, for the parser to refuse."""
    with_value = {"--config"} | {option.flag for option in options(model) if option.kind is not bool}
    named: list[str] = []
    names = [f"--{name.replace('_', '-')}" for name in bare]
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            named += [f"{names.pop(0)}={value}" if names else value for value in rest]
            break
        if arg in short:
            named.append(short[arg])
        elif arg in with_value:
            named += [arg, *rest[:1]]
            del rest[:1]
        elif arg.startswith("-") or not names:
            named.append(arg)
        else:
            named.append(f"{names.pop(0)}={arg}")
    return named


def split_ids(value: Any) -> Any:
    """Ids from "1,2,3", or from several of these; what is no text is left to the model."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if isinstance(value, list | tuple):
        return [part for item in value for part in (split_ids(item) if isinstance(item, str) else [item])]
    return value


def split_each(value: Any) -> Any:
    """Lists of ids, one from each text."""
    if isinstance(value, list | tuple):
        return [split_ids(item) if isinstance(item, str) else item for item in value]
    return value


def read_json(value: Any) -> Any:
    """What a JSON text holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON ({error})") from error
