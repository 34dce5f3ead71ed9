"""What is refused, and how: a ValueError for a value that cannot be, NotImplementedError for what is not there."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Unsupported(NotImplementedError, AttributeError):
    """Something that vLLM has and Outrider does not, with the reason. It is an AttributeError, too, so that `hasattr`
    answers False for a method that is not there."""


def unknown_keyword(name: str, known: Iterable[str], of: str) -> TypeError:
    """The error for a keyword that does not exist; it says what was probably meant."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{of} has no keyword {name!r}{hint}")


def keywords_of(of: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: a keyword that it has not is answered by `unknown_keyword`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise unknown_keyword(name, known, of)
            return function(*args, **kwargs)

        return checked

    return decorate
