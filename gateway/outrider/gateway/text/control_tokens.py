"""Control tokens in a conversation's texts: what holds one, what would make one together with its neighbours, and marks
that keep both from being read as one. Who reads is the tokenizer: its special tokens first, as they are written; then
its normalizer, behind which a text may be one after all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from tokenizers.normalizers import NFC, NFD, NFKC, NFKD

from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.vocabulary import panics_told

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode's noncharacters: no text is written with them
# Many templates make a control token of a role; so a role is no stranger's text.
ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})


class ControlTokens:
    """The control tokens of one tokenizer: the texts of its special tokens that are longer than a character."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._pattern = re.compile(_one_of(texts))
        self._all = "\0".join(texts)
        self._starts = {text[:end] for text in texts for end in range(1, len(text))}
        self._ends = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = max(map(len, texts))
        self._normalizer = tokenizer.backend.normalizer
        self._keeps_ascii = isinstance(self._normalizer, (NFC, NFD, NFKC, NFKD))
        template = tokenizer.chat_template
        self._expected = ROLES | (frozenset() if template is None else template.words)

    def stands_in(self, text: str) -> bool:
        """Whether the tokenizer would read one in this text alone."""
        return bool(self._pattern.search(text) or self._pattern.search(self._normalized(text)))

    def may_join(self, text: str) -> bool:
        """Whether one may begin or end in it that others' texts, or the template's, complete. Not of a word that the
        template itself looks for."""
        return any(self._edges(text))

    def in_written(self, text: str) -> list[str]:
        """The control tokens that the tokenizer reads in a prompt's text."""
        found: list[str] = self._pattern.findall(text)
        if self._normalizer is not None:
            found += self._pattern.findall(self._normalized(MARKS[0].join(self._pattern.split(text))))
        return found

    def broken(self, value: Any, mark: str, *, apart: bool) -> Any:
        """A JSON value whose texts, keys of objects too, hold none; `apart`: nor do they make one with neighbours."""
        if isinstance(value, str):
            text = self._broken(value, mark) if self.stands_in(value) else value
            return self._apart(text, mark) if apart else text
        if isinstance(value, Mapping):
            items = [(self.broken(key, mark, apart=apart), inner) for key, inner in value.items()]
            return {key: self.broken(inner, mark, apart=apart) for key, inner in items}
        if isinstance(value, Sequence):
            return [self.broken(inner, mark, apart=apart) for inner in value]
        return value

    def _broken(self, text: str, mark: str) -> str:
        """A mark stands behind the first character of each. What only the normalizer makes one of is normalized: the
        tokenizer would do so, too."""
        for form in (text, self._normalized(text)):
            broken = form
            while self._pattern.search(broken):  # again: one may have overlapped another
                broken = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], broken)
            if not self._pattern.search(self._normalized(broken)):
                break
        return broken

    def _apart(self, text: str, mark: str) -> str:
        """The text with a mark at the edges that may be a part of one; within the spaces around it, which templates cut
        off."""
        begins, ends = self._edges(text)
        if not (begins or ends):
            return text
        inner = text.strip()
        before, _, after = text.partition(inner)
        return f"{before}{mark if begins else ''}{inner}{mark if ends else ''}{after}"

    def _edges(self, text: str) -> tuple[bool, bool]:
        """Whether it may complete one that begins before it, and begin one that ends behind it."""
        inner = self._normalized(text.strip())
        if not inner or (inner.isidentifier() and inner in self._expected):
            return False, False
        if len(inner) < self._longest and inner in self._all:
            return True, True
        sizes = range(1, min(len(inner) + 1, self._longest))
        return any(inner[:size] in self._ends for size in sizes), any(inner[-size:] in self._starts for size in sizes)

    def _normalized(self, text: str) -> str:
        if self._normalizer is None or (self._keeps_ascii and text.isascii()):
            return text
        with panics_told():
            return str(self._normalizer.normalize_str(text))


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Tokenizer) -> ControlTokens | None:
    """The control tokens of a tokenizer; None where it has none."""
    texts = [text for text in map(tokenizer.added_tokens.__getitem__, tokenizer.special_ids) if len(text) > 1]
    return ControlTokens(tokenizer, texts) if texts else None


def _one_of(texts: Sequence[str]) -> str:
    """A regular expression for the longest of them that stands at a place. What several begin with is read once: some
    tokenizers have hundreds that differ in a number at their end."""
    groups = groupby((text for text in sorted(texts) if text), key=lambda text: text[0])
    branches: list[str] = [re.escape(first) + _one_of([text[1:] for text in group]) for first, group in groups]
    if len(branches) == 1 and "" not in texts:
        return branches[0]
    return (f"(?:{'|'.join(branches)})" if branches else "") + ("?" if branches and "" in texts else "")


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*texts_in(key), *texts_in(inner))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from texts_in(inner)


def mark_for(told: Sequence[str]) -> str:
    """One that stands nowhere, nor what JSON makes of it. ValueError where all do."""
    for mark in MARKS:
        if not any(mark in text or escaped(mark) in text for text in told):
            return mark
    raise ValueError("holds a control token, and all of the characters U+FDD0 to U+FDEF; allowed: not both")


def escaped(mark: str) -> str:
    """A text as JSON of ASCII alone writes it."""
    return json.dumps(mark).strip('"')
