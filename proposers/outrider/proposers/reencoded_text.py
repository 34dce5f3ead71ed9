"""The tokens of a chain as the target says them, over the draft's cache of its own, where the two vocabularies are
joined by the text alone: the draft draws its own tokens, and what they say is written in the target's.

Either side's tokens are settled: what the target committed, or the draft has sent, is never written otherwise, and the
text goes on behind it. Of what is drafted the last word is held back, since more text may change its tokens, until it
fills what may be drafted: to wait longer would cost more passes than it saves. The text
that the target committed is written anew in the draft's tokens from a little before the first difference; what comes
out as before stays in the cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.proposers.draft_text import DraftText
from outrider.proposers.reencoding import MARK, MARK_BYTES, Reencoding, Written

CONTEXT_BYTES = 48  # read before a text, so that it is written as it goes on
OVERLAP = 4  # own tokens before a difference that are written anew
MOST_HELD = 8  # target's tokens of one word


class ReencodedText(DraftText):
    """Of two vocabularies. There are no branches: they start from a token of the target."""

    __slots__ = ("_ends", "_num_start", "_own_ends", "_text", "_tokens", "pair")

    can_branch = is_own = False

    def __init__(self, sequence: CachedSequence, pair: Reencoding, tokens: Sequence[int] = ()) -> None:
        """`sequence` is empty; `tokens` are the target's."""
        super().__init__(sequence)
        self.pair = pair
        self._tokens: list[int] = []  # settled
        self._ends: list[int] = []  # of each in the text
        self._text = bytearray()  # what the own tokens say
        self._tell(tokens)
        written = list(pair.read(None, bytes(self._text)))
        start = () if self._text.startswith(MARK) else pair.start_ids
        start = start if start or written else (pair.mapping.stand_in,)
        sequence.tokens.extend((*start, *(entry.token_id for entry in written)))
        self._num_start = len(start)
        self._own_ends = [0] * len(start) + [entry.end for entry in written]

    @property
    def tokens(self) -> list[int]:
        """The target's ids; to be changed by the methods here alone."""
        return self._tokens

    def num_own(self, length: int) -> int:
        """How many of the draft's own tokens are within the first `length`."""
        return bisect_right(self._own_ends, self._ends[length - 1]) if length else 0

    def draw(self, token_id: int, limit: int) -> list[int]:
        """Adds a token that the draft drew; those of the target that it settles. It is not added where the target
        cannot say it."""
        chunk = self.pair.drawn(token_id, self._at_start)
        written = None if chunk is None else self._written(chunk, limit - len(self))
        if chunk is None or written is None:
            return []
        self._text += chunk
        self.sequence.tokens.append(token_id)
        self._own_ends.append(len(self._text))
        settled_end = self._settled_end
        self._tokens += [entry.token_id for entry in written]
        self._ends += [settled_end + entry.end for entry in written]
        return [entry.token_id for entry in written]

    def truncate(self, length: int, cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens, and what is drafted behind them as not settled."""
        self.replace(length, (), cache)

    def replace(self, length: int, ids: Sequence[int], cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens, and puts others behind them. What was drafted behind these, too, stays as
        not settled: they may be the same text in other tokens."""
        del self._tokens[length:], self._ends[length:]
        kept, drafted = self._settled_end, self._text
        self._text = drafted[:kept]
        self._tell(ids)
        if drafted.startswith(self._text):
            rest = drafted[len(self._text) :]
            self._text += rest.partition(MARK)[0]
        self._read(kept + _common_length(drafted[kept:], self._text[kept:]), cache)

    @property
    def _settled_end(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def _at_start(self) -> bool:
        """Whether the text begins, anew after a special token."""
        return not self._text or self._text[-MARK_BYTES:].startswith(MARK)

    @property
    def _said_none(self) -> bool:
        """Whether the last settled token says nothing, as a lone space at the start."""
        return bool(self._ends) and self._ends[-1] == (self._ends[-2] if len(self._ends) > 1 else 0)

    def _tell(self, ids: Sequence[int]) -> None:
        """Adds the target's tokens to the text."""
        for token_id in ids:
            self._text += self.pair.told(token_id, self._at_start and not self._said_none)
            self._tokens.append(token_id)
            self._ends.append(len(self._text))

    def _before(self, end: int) -> bytes | None:
        """The text before a place, as far as it is read, and behind the last special token; None where it begins."""
        special = self._text.rfind(MARK, 0, end)
        start = special + MARK_BYTES if special >= 0 else 0
        return bytes(self._text[max(start, end - CONTEXT_BYTES) : end]) if end > start else None

    def _written(self, chunk: bytes, num_wanted: int) -> list[Written] | None:
        """What is settled of the text behind the settled tokens once the draft has said `chunk`; None where the target
        cannot say it. The last word is not waited for where it fills what is wanted."""
        start = self._settled_end
        text, special = bytes(self._text[start:]), chunk.startswith(MARK)
        before = self._before(start)
        before = b"" if before is None and self._said_none else before  # it has begun
        written = self.pair.target.say(before, text if special else text + chunk)
        if written is None:
            return None
        if special:
            token_id = self.pair.mapping.to_target[int(chunk[1:], 16)]
            return [*written, Written(token_id, len(text) + len(chunk))]
        return written[:num_wanted] if len(written) >= num_wanted else _settled(written)

    def _read(self, same: int, cache: KVCacheManager) -> None:
        """Writes the text in own tokens, of which its first `same` bytes are said already."""
        own, kept = self.sequence.tokens, bisect_right(self._own_ends, same)
        new: list[Written] = []
        if same < len(self._text):
            first = max(self._num_start, kept - OVERLAP)
            start = self._own_ends[first - 1] if first else 0
            first = first if start else self._num_start  # a first token may say nothing: it is written again, too
            read = self.pair.read(self._before(start), bytes(self._text[start:]))
            new = [entry._replace(end=start + entry.end) for entry in read]
            kept = first + _common_length([entry.token_id for entry in new], own[first:])
            new = new[kept - first :]
        cache.truncate(self.sequence, kept + bool(new))
        del own[kept:], self._own_ends[kept:]
        own += [entry.token_id for entry in new]
        self._own_ends += [entry.end for entry in new]


def _settled(written: list[Written]) -> list[Written]:
    """Without the last word, of which more may follow; of a long one without its last token."""
    held = sum(entry.word == written[-1].word for entry in written)
    return written[: -held if held <= MOST_HELD else -1] if written else []


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many entries at the start are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
