"""Settings of a command: flags over environment over a YAML file over defaults, into one frozen model.

A command declares its settings as a ServiceSettings with a `section`. The field `max_window` of the section `target` is
then `--max-window`, `OUTRIDER_TARGET__MAX_WINDOW` and, in the file of `--config`, `max_window` under `target:`. Fields
of a nested model have dotted names: `--kv.block-size`, `OUTRIDER_TARGET__KV__BLOCK_SIZE`. A name that no field has is
an error wherever it stands, and every complaint says where its value came from.

pydantic-settings is not used: it ignores unknown variables, reads the environment whenever a model is built, and names
neither variable nor flag in its errors.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from outrider.wire.flags import parse_flags
from outrider.wire.options import Option, SettingsError, near_miss, options

ENV_PREFIX = "OUTRIDER_"
SECTION_CUTOFF = 0.8  # a file has sections of other commands: only a near miss of ours is an error


class ServiceSettings(BaseModel):
    """The base of every command's settings. Building one reads nothing but its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    section: ClassVar[str]


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and where it came from."""

    value: Any
    origin: str


def load_settings(
    cls: type[S],
    flags: Mapping[str, Any] | None = None,
    config_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    wanted: Mapping[str, str] | None = None,
) -> S:
    """Reads the settings from flags (by dotted field name), the environment and the file. Raises SettingsError.
    `wanted` has what to say where a required setting is absent, for those with a simpler way than their flag."""
    known = {option.name: option for option in options(cls)}
    given: dict[str, _Given] = {}
    problems: list[str] = []
    if config_path is not None:
        problems += _read_file(cls.section, known, Path(config_path), given)
    problems += _read_environment(cls.section, known, os.environ if environ is None else environ, given)
    problems += _read_flags(known, flags or {}, given)
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return cls.model_validate(_nest({name: item.value for name, item in given.items()}))
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors()]
        details = [detail for detail in details if not _follows(detail, details)]
        problems = [_explain(cls.section, known, given, wanted or {}, detail) for detail in details]
        raise SettingsError("\n".join(dict.fromkeys(problems))) from error


def parse_settings(
    cls: type[S], argv: Sequence[str], prog: str, description: str, wanted: Mapping[str, str] | None = None
) -> S:
    """The settings of a command line; what is wrong with them ends the process with status 2, as argparse does."""
    try:
        parsed = parse_flags(cls, cls.section, argv, prog, description)
        return load_settings(cls, parsed.values, parsed.config_path, wanted=wanted)
    except SettingsError as error:
        lines = "".join(f"{prog}: error: {line}\n" for line in str(error).splitlines())
        sys.stderr.write(f"{lines}See {prog} --help.\n")
        raise SystemExit(2) from error


def _read_flags(known: Mapping[str, Option], flags: Mapping[str, Any], given: dict[str, _Given]) -> Iterator[str]:
    for name, value in flags.items():
        if name not in known:
            yield f"unknown setting {name}: {near_miss(name, known)}"
            continue
        given[name] = _Given(value, known[name].flag)


def _read_environment(
    section: str, known: Mapping[str, Option], environ: Mapping[str, str], given: dict[str, _Given]
) -> Iterator[str]:
    prefix = _variable(section, "")
    variables = {_variable(section, name): option for name, option in known.items()}
    for variable, text in environ.items():
        start, mark, _ = variable.upper().partition("__")
        if not mark or not start.startswith(ENV_PREFIX):
            continue
        if start + mark != prefix:
            if _resembles(start.removeprefix(ENV_PREFIX), section.upper()):
                yield f"unknown variable {variable}: did you mean {prefix}...?"
        elif variable.upper() not in variables:
            yield f"unknown variable {variable}: {near_miss(variable.upper(), variables)}"
        elif text:  # an empty variable counts as absent
            option = variables[variable.upper()]
            try:
                given[option.name] = _Given(_decode(option, text), variable)
            except json.JSONDecodeError as error:
                yield f"{variable} is no JSON: {error}"


def _read_file(section: str, known: Mapping[str, Option], path: Path, given: dict[str, _Given]) -> Iterator[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        yield f"cannot read --config {path}: {_unreadable(error)}"
        return
    values = content.get(section) or {} if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(values, dict):
        yield f"{path} must hold a mapping of sections, {section}: a mapping of settings"
        return
    if section not in content:
        yield from (
            f"unknown section {name} in {path}: did you mean {section}?"
            for name in content
            if _resembles(name, section)
        )
    groups = {".".join(option.path[:end]) for option in known.values() for end in range(1, len(option.path))}
    for name, value in _flatten(values, groups):
        if name in known:
            given[name] = _Given(value, f"{path}: {section}.{name}")
        else:
            yield f"unknown setting {section}.{name} in {path}: {near_miss(name, known)}"


def _unreadable(error: Exception) -> str:
    """One line for what is wrong with a file; YAML's own message has a drawing of the place."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {' '.join(error.problem.split())}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def _flatten(values: Mapping[Any, Any], groups: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a section by dotted name; only nested models are opened, not mappings that are values."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, dict):
            yield from _flatten(value, groups, f"{name}.")
        else:
            yield name, value


def _decode(option: Option, text: str) -> Any:
    """A variable's value: lists are JSON or separated by commas, mappings JSON, all else is left to the model."""
    if option.kind is dict or (option.repeats and text.lstrip().startswith("[")):
        return json.loads(text)
    return [part.strip() for part in text.split(",")] if option.repeats else text


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = nested
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return nested


def _follows(detail: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it says no more than another: a list whose items are wrong counts as too short, too."""
    place = detail["loc"]
    return detail["type"] == "too_short" and any(
        len(other["loc"]) > len(place) and other["loc"][: len(place)] == place for other in others
    )


def _explain(
    section: str,
    known: Mapping[str, Option],
    given: Mapping[str, _Given],
    wanted: Mapping[str, str],
    detail: Mapping[str, Any],
) -> str:
    """One line for one of pydantic's errors: the field, what is wrong, and where the value came from."""
    location = [str(part) for part in detail["loc"]]
    name = next((name for end in range(len(location), 0, -1) if (name := ".".join(location[:end])) in known), None)
    message = str(detail["msg"]).removeprefix("Value error, ")
    if name is None:
        return f"{'.'.join([section, *location])}: {message}"
    if name not in given:
        if detail["type"] != "missing":
            return f"{section}.{name}: {message}"
        return wanted.get(name) or (
            f"{section}.{name} is required: give {known[name].flag}, {_variable(section, name)} "
            f"or {section}.{name} in the file of --config"
        )
    return f"{given[name].origin}: {message[:1].lower()}{message[1:]}, not {detail['input']!r}"


def _variable(section: str, name: str) -> str:
    return f"{ENV_PREFIX}{section}__{name.replace('.', '__')}".upper()


def _resembles(name: object, other: str) -> bool:
    return bool(difflib.get_close_matches(str(name), [other], cutoff=SECTION_CUTOFF))
