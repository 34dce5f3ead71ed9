"""How keywords are checked: types for pydantic's dataclasses, and errors that name the keyword, its value and what is
allowed. A value that cannot be is a ValueError, a keyword that does not exist a TypeError, what vLLM has and Outrider
does not is `Unsupported`. numpy's numbers are numbers; True and False are none."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Annotated, Any, ParamSpec, TypeGuard, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUseDefault

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

CONFIG = ConfigDict(extra="forbid")
Fixed = dict[str, tuple[tuple[Any, ...], str]]  # keywords that must have one of these values, and why no other


class Only:
    """In a field's annotation: the values that it must have, and why no other."""

    def __init__(self, *values: Any, why: str) -> None:
        self.values, self.why = values, why


def fixed_fields(cls: Any) -> Fixed:
    """The fields of a pydantic dataclass that say `Only`."""
    every = [(name, entry) for name, info in cls.__pydantic_fields__.items() for entry in info.metadata]
    return {name: (entry.values, entry.why) for name, entry in every if isinstance(entry, Only)}


class Unsupported(NotImplementedError, AttributeError):
    """Something that vLLM has and Outrider does not, with the reason. It is an AttributeError, too, so that `hasattr`
    answers False for a method that is not there."""


def require_fixed(table: Fixed, given: Mapping[str, Any], form: str) -> None:
    """Raises Unsupported for the first keyword of the table whose value is none of its own. `form` formats the
    keyword's name and value."""
    for name, value in given.items():
        if name in table and value not in table[name][0]:
            raise Unsupported(f"{form.format(name, value)} is not supported: {table[name][1]}")


def require_known(given: Iterable[str], known: Iterable[str], of: str) -> None:
    """Raises a TypeError for a keyword that does not exist; it says what was probably meant."""
    names = list(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{of} has no keyword {name!r}{hint}")


def keywords_of(of: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: `require_known` answers a keyword that it has not."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            require_known(kwargs, known, of)
            return function(*args, **kwargs)

        return checked

    return decorate


def plain_errors(of: str) -> Callable[[type[T]], type[T]]:
    """Decorates a pydantic dataclass: in place of a ValidationError comes the first error alone, in one line. A field's
    description says what it may be; a ValueError of a validator passes as it is."""

    def decorate(cls: type[T]) -> type[T]:
        validated: Callable[..., None] = cls.__init__

        @functools.wraps(validated)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            try:
                validated(self, *args, **kwargs)
            except ValidationError as error:
                names = list(inspect.signature(cls).parameters)
                require_known(kwargs, names, of)
                if len(args) > len(names):
                    raise TypeError(f"{of} takes {len(names)} arguments, got {len(args)}") from None
                raise _plain(cls, error, dict(zip(names, args, strict=False)) | kwargs) from None

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return decorate


def _plain(cls: type, error: ValidationError, given: Mapping[str, Any]) -> Exception:
    first = error.errors()[0]
    if first["type"] == "value_error":
        own: ValueError = first["ctx"]["error"]
        return own
    place = first["loc"][0]
    name = list(given)[place] if isinstance(place, int) else place  # of a positional argument
    return must_be(cls, name, given.get(name, first["input"]), first["msg"].lower())


def must_be(cls: Any, name: str, value: object, otherwise: str = "") -> ValueError:
    """The error for a value that the field's description, else `otherwise`, does not allow."""
    allowed = cls.__pydantic_fields__[name].description
    return ValueError(f"{name} {f'must be {allowed}' if allowed else otherwise}, got {value!r:.100}")


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_int(value: Any) -> Any:
    """Python's own integer for any other's."""
    return int(value) if is_int(value) else value


def _as_float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:  # of an integer beyond all floats
        return math.inf


def _or_default(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


Integer = Annotated[int, BeforeValidator(as_int), Field(strict=True)]
Number = Annotated[float, BeforeValidator(_as_float), Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True, description="True or False")]
OrDefault = BeforeValidator(_or_default)  # None is the default
MinusOneIsNone = BeforeValidator(lambda value: None if is_int(value) and value == -1 else value)


def integer(least: int | None = None, most: int | None = None, *, or_none: bool = False) -> Any:
    """The bounds of an integer field, both included, and its description."""
    bounds = "" if least is None else f" from {least} to {most}" if most is not None else f" of at least {least}"
    return Field(ge=least, le=most, description=f"an integer{bounds}{', or None' * or_none}")


def one_of(names: Iterable[str]) -> Any:
    """The values of a text field, and its description."""
    return Field(pattern=f"^({'|'.join(names)})$", description=f"one of {', '.join(names)}")
