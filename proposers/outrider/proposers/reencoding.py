"""A draft and a target whose vocabularies have little in common, joined by the text that both write: what one has said
is written again in the tokens of the other. After "string-level exact match" of Timor et al., arXiv 2502.05202.

A text is bytes, in which a special token that both have stands as a mark: MARK and the draft's id. Tokenizers write
strings: a character of which only some bytes are there is spelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from outrider.proposers.vocabulary_map import Speller, VocabularyMap
from outrider.rpc.words.lexicon import Lexicon, Token

MARK = b"\xff"  # in no text of UTF-8
MARK_BYTES = 9  # with the id
_MARKED = re.compile(rb"(\xff[0-9a-f]{8})")
_BROKEN = re.compile("([\udc80-\udcff]+)")  # as surrogateescape decodes them
HALF_BYTES = 3  # at most, of a character that is not whole


class Encoding(Protocol):
    """What a tokenizer makes of a string."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...  # in characters of the string
    @property
    def word_ids(self) -> list[int | None]: ...  # of each token: which word of the string it is a part of


Encode = Callable[[str], Encoding | None]  # without special tokens, nor any read in the string; None: it cannot


class Written(NamedTuple):
    """A token of a text."""

    token_id: int
    end: int  # in bytes, from the start of the text
    word: int = 0  # tokens of one word have one number, which rises


class Writer:
    """A vocabulary, and how its tokenizer writes a text."""

    def __init__(self, lexicon: Lexicon, encode: Encode) -> None:
        self.lexicon, self._encode = lexicon, encode
        self._speller = Speller.of(lexicon)
        self._says_all_bytes = all(bytes([byte]) in self._speller.ids_of for byte in range(256))
        first = encode("a")
        self.adds_space = first is not None and any(self.content(own).startswith(b" ") for own in first.ids[:1])

    def content(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special one its name."""
        token = self.lexicon.tokens[token_id] if token_id < len(self.lexicon.tokens) else None
        return b"" if token is None else token.content.replace(MARK, b"\xef\xbf\xbd")

    def text(self, token_id: int, at_start: bool) -> bytes:
        """The same without the space that stands before the first word alone in tokens."""
        content = self.content(token_id)
        return content.removeprefix(b" ") if at_start and self.adds_space else content

    def is_special(self, token_id: int) -> bool:
        """Whether it is no text."""
        token = self.lexicon.tokens[token_id] if token_id < len(self.lexicon.tokens) else None
        return token is not None and token.kind == "special"

    def can_say(self, text: bytes) -> bool:
        """Whether there are tokens for these bytes."""
        return self._says_all_bytes or bool(self._speller.fewest_tokens(text))

    def say(self, before: bytes | None, text: bytes) -> list[Written] | None:
        """The text as it goes on behind `before` (None: it is the beginning), in tokens that stand for its very bytes;
        None where there are none such."""
        aligned = self._aligned(before, text)
        if aligned is None and (spelled := self._spelled(text)) is not None:
            return [entry._replace(word=index) for index, entry in enumerate(spelled)]
        return aligned

    def read(self, before: bytes | None, text: bytes) -> list[Written]:
        """The same, as near as the vocabulary comes: a tokenizer may know no capitals, or not all characters. Bytes
        that are none of a character are spelled."""
        written: list[Written] = []
        position = 0
        for run in _BROKEN.split(text.decode("utf-8", "surrogateescape")):
            part = run.encode("utf-8", "surrogateescape")
            broken = _BROKEN.fullmatch(run) is not None
            said = (self._spelled(part) or []) if broken else self._aligned(before, part)
            said = self._by_offsets(run) if said is None else said
            written += [entry._replace(end=position + entry.end) for entry in said]
            before, position = b"" if broken else (before or b"") + part if part else before, position + len(part)
        return written

    def _aligned(self, before: bytes | None, text: bytes) -> list[Written] | None:
        """Both written together, of which the text's part is taken; a token across the border is spelled from there.
        None where the tokens stand for something else."""
        starts, before = before is None, _readable(before or b"", text)
        string, half = _whole_characters(before + text)
        encoding = self._encode(string)
        if encoding is None:
            return None
        contents = [self.content(token_id) for token_id in encoding.ids]
        said, wanted = b"".join(contents), string.encode()
        added = int(self.adds_space and said == b" " + wanted)
        if said[added:] != wanted or len(half) > HALF_BYTES:
            return None
        written: list[Written] = []
        start, number, word_before = -added - len(before), 0, None
        for token_id, content, word in zip(encoding.ids, contents, encoding.word_ids, strict=True):
            end = start + len(content)
            number += word != word_before or content.startswith(b" ")  # some tokenizers take a text for one word
            if start >= 0 or starts:
                written.append(Written(token_id, end, number))
            elif end > 0:
                rest = self._spelled(text[:end], number)
                if rest is None:
                    return None
                written += rest
            start, word_before = end, word
        half = half[-len(text) :] if text else b""
        rest = self._spelled(half, written[-1].word if written else 0, len(text) - len(half))
        return None if rest is None else written + rest

    def _spelled(self, text: bytes, word: int = 0, start: int = 0) -> list[Written] | None:
        """In as few tokens as can be."""
        ids = self._speller.fewest_tokens(text)
        if text and not ids:
            return None
        ends = accumulate((len(self.content(token_id)) for token_id in ids), initial=start)
        next(ends)
        return [Written(token_id, end, word) for token_id, end in zip(ids, ends, strict=True)]

    def _by_offsets(self, string: str) -> list[Written]:
        encoding = self._encode(string)
        if encoding is None:
            return []
        ends = list(accumulate((len(character.encode()) for character in string), initial=0))
        return [Written(token_id, ends[end]) for token_id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Reencoding:
    """From the target's tokens to the draft's and back, by their text."""

    target: Writer
    draft: Writer
    mapping: VocabularyMap  # for its special tokens
    start_ids: tuple[int, ...] = ()  # what the draft's tokenizer puts before a text
    drawable: Sequence[int] = field(init=False)  # the draft's ids for what the target can say, too

    def __post_init__(self) -> None:
        said = ((own_id, self.drawn(own_id, at_start=False)) for own_id in range(len(self.draft.lexicon.tokens)))
        own_ids = [own for own, text in said if text is not None and (text[:1] == MARK or self.target.can_say(text))]
        object.__setattr__(self, "drawable", own_ids)

    @property
    def target_tokens(self) -> Sequence[Token | None]:
        """The target's, by id."""
        return self.target.lexicon.tokens

    def told(self, token_id: int, at_start: bool) -> bytes:
        """The text of a token of the target, at the start of a text or behind a special token or not."""
        own = self.mapping.to_draft.get(token_id) if self.target.is_special(token_id) else None
        return self.target.text(token_id, at_start) if own is None else mark(own)

    def drawn(self, own_id: int, at_start: bool) -> bytes | None:
        """The text of one of the draft; None where it has none, or the target lacks it."""
        if not self.draft.is_special(own_id):
            return self.draft.text(own_id, at_start) or None
        return mark(own_id) if own_id in self.mapping.to_target else None

    def read(self, before: bytes | None, text: bytes) -> Iterator[Written]:
        """A text with marks in the draft's tokens. `before` is what stands in front of it, if anything."""
        position = 0
        for part in _MARKED.split(text):
            if part.startswith(MARK):
                yield Written(int(part[1:], 16), position + len(part))
                before = None
            elif part:
                for entry in self.draft.read(before, part):
                    yield entry._replace(end=position + entry.end)
            position += len(part)


PairMap = VocabularyMap | Reencoding


@dataclass(frozen=True, slots=True)
class JoinedVocabulary:
    """A target's vocabulary as a draft of another one drafts for it: by the tokens that both have, or re-encoded."""

    greedy: PairMap  # for requests whose every token is the likeliest
    sampled: PairMap

    @property
    def mapping(self) -> VocabularyMap:
        """The tokens that both have."""
        return self.sampled if isinstance(self.sampled, VocabularyMap) else self.sampled.mapping

    def way(self, greedy: bool) -> PairMap:
        """How one request is drafted for."""
        return self.greedy if greedy else self.sampled


def mark(own_id: int) -> bytes:
    """What stands in a text for a special token of the draft."""
    return MARK + b"%08x" % own_id


def _readable(before: bytes, text: bytes) -> bytes:
    """The end of what stands before a text, behind the last byte that is none of a character."""
    string, start = (before + text).decode("utf-8", "surrogateescape"), 0
    for broken in _BROKEN.finditer(string):
        end = len(string[: broken.end()].encode("utf-8", "surrogateescape"))
        if end - len(broken[0]) < len(before):
            start = min(end, len(before))
    return before[start:]


def _whole_characters(text: bytes) -> tuple[str, bytes]:
    """The characters that are whole, and the bytes at the end that are not."""
    for length in range(len(text), max(0, len(text) - 4), -1):
        try:
            return text[:length].decode(), text[length:]
        except UnicodeDecodeError:
            continue
    return "", text
