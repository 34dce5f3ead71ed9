"""What each token of a vocabulary stands for, by which the ids of two vocabularies are matched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Token(NamedTuple):
    """What an id stands for, however its tokenizer writes that down."""

    kind: Literal["text", "byte", "special"]  # byte: a piece that stands for one byte where no text fits
    content: bytes  # of the text; of a special token its name


@dataclass(frozen=True, slots=True)
class Lexicon:
    """The tokens of a vocabulary."""

    fingerprint: str
    tokens: tuple[Token | None, ...]  # by id; None: no token
    roles: Mapping[str, int]  # bos_token, eos_token, ...: those that there are
