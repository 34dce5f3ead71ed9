"""The command line of a settings model: its options as flags, with help. Values stay text, for the model to judge."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from pydantic import BaseModel

from outrider.wire.options import Option, SettingsError, near_miss, options

PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", dict: "JSON"}


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """What a command line gives: values by dotted name, and the file that it names."""

    values: dict[str, Any]
    config_path: str | None


def parse_flags(model: type[BaseModel], section: str, argv: Sequence[str], prog: str, description: str) -> ParsedFlags:
    """Reads a command line. Raises SettingsError; `--help` ends the process."""
    known = list(options(model))
    parser = _build_parser(known, section, prog, description)
    parsed, rest = parser.parse_known_args(_bind_numbers(argv))
    if rest:
        names = [*(option.flag for option in known), "--config", "--help"]
        names += [f"--no-{option.flag[2:]}" for option in known if option.kind is bool]
        raise SettingsError("\n".join(_unknown(arg, names) for arg in rest if arg.startswith("-") or arg == rest[0]))
    values = vars(parsed)
    config_path = values.pop("--config")
    return ParsedFlags(values, config_path)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _build_parser(known: Sequence[Option], section: str, prog: str, description: str) -> argparse.ArgumentParser:
    variable = f"OUTRIDER_{section}__".upper()
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=f"Every setting can also be given by a variable, --max-size as {variable}MAX_SIZE, or in the file of "
        f"--config, as max_size under {section}:. Flags win over variables, variables over the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", dest="--config", metavar="PATH", default=None, help="a YAML file of settings")
    groups: dict[tuple[str, ...], Any] = {(): parser}
    for option in known:
        path = option.path[:-1]
        if path not in groups:
            groups[path] = parser.add_argument_group(".".join(path))
        _add(groups[path], option)
    return parser


def _add(group: Any, option: Option) -> None:
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=_help(option))
        return
    action = "append" if option.repeats else "store"
    group.add_argument(option.flag, dest=option.name, action=action, metavar=_metavar(option), help=_help(option))


def _help(option: Option) -> str:
    notes = ["required"] if option.field.is_required() else []
    default = None if notes else option.field.get_default(call_default_factory=True)
    if option.repeats:
        notes.append("may be repeated")
    if shown := _show(default):
        notes.append(f"default: {shown}")
    text = (option.field.description or "").rstrip(".")
    return (f"{text} ({', '.join(notes)})" if notes else text).replace("%", "%%")


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(_show(item) for item in value)
    return "" if value is None or value == {} else str(value)


def _metavar(option: Option) -> str:
    kind = option.kind
    if kind is Literal:
        return "{" + ",".join(str(choice) for choice in _choices(option)) + "}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "{" + ",".join(str(member.value) for member in kind) + "}"
    return PLACEHOLDERS.get(kind, "TEXT")


def _choices(option: Option) -> Sequence[Any]:
    args = get_args(option.field.annotation)
    return [choice for arg in args for choice in (get_args(arg) or (arg,)) if choice is not type(None)]


def _bind_numbers(argv: Sequence[str]) -> list[str]:
    """Ties a negative number to the flag before it: argparse takes some (-1e-3) for flags."""
    bound: list[str] = []
    for arg in argv:
        if bound and bound[-1].startswith("--") and "=" not in bound[-1] and _is_negative_number(arg):
            bound[-1] += f"={arg}"
        else:
            bound.append(arg)
    return bound


def _is_negative_number(arg: str) -> bool:
    try:
        float(arg)
    except ValueError:
        return False
    return arg.startswith("-")


def _unknown(arg: str, names: Sequence[str]) -> str:
    name = arg.partition("=")[0]
    return f"unknown flag {name}: {near_miss(name, names)}" if arg.startswith("-") else f"unexpected argument {arg}"
