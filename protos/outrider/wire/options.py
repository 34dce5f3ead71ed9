"""The fields of a settings model as options: one dotted name each, from which flags, variables and help follow."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class SettingsError(ValueError):
    """Settings that cannot be used. The message has one line per problem."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field that can be set, of the settings or of a model nested in them."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def name(self) -> str:
        """The dotted name."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The command line's name."""
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> Any:
        """The field's type without None; the generic one of a list or mapping."""
        annotation = plain_type(self.field.annotation)
        return get_origin(annotation) or annotation

    @property
    def repeats(self) -> bool:
        """Whether it takes several values."""
        return self.kind in (list, tuple, set, frozenset)


def options(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Every field that can be set, those of nested models in their place."""
    for name, field in model.model_fields.items():
        nested = plain_type(field.annotation)
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from options(nested, (*path, name))
        else:
            yield Option((*path, name), field)


def plain_type(annotation: Any) -> Any:
    """A type without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [arg for arg in get_args(annotation) if arg is not type(None)]
        if len(others) == 1:
            return others[0]
    return annotation


def near_miss(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What was probably meant, or what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(names))}"
