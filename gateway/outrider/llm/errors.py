"""What is refused, and how: a ValueError for a value that cannot be, NotImplementedError for what is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Unsupported(NotImplementedError, AttributeError):
    """Something that vLLM has and Outrider does not, with the reason. It is an AttributeError, too, so that `hasattr`
    answers False for a method that is not there."""


def unknown_keyword(name: str, known: Iterable[str], of: str) -> TypeError:
    """The error for a keyword that does not exist; it says what was probably meant."""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{of} has no keyword {name!r}{hint}")
