"""The tokens of a chain as the target says them, over the draft's cache of them as its own model reads them.

Where both have one vocabulary the two are the same list. A draft of another vocabulary reads a token of the target as
its own counterpart, or as several tokens where there is none: positions then differ by what was spelled so far. What it
drafts itself has counterparts, one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from outrider.engine.kv_cache_manager import CachedSequence, KVCacheManager
from outrider.proposers.vocabulary_map import VocabularyMap

BlockCopy = tuple[int, int]  # from, to


class DraftText:
    """Of one vocabulary. Lengths and positions are the target's, but for `num_own`."""

    __slots__ = ("sequence",)

    can_branch = True  # whether a text can go on from any token of the target
    is_own = True  # whether the target's ids are the draft's

    def __init__(self, sequence: CachedSequence) -> None:
        self.sequence = sequence  # the draft's own tokens

    @property
    def tokens(self) -> list[int]:
        """The target's ids."""
        return self.sequence.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def num_own(self, length: int) -> int:
        """How many of the draft's own tokens the first `length` are."""
        return length

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens at the end; blocks are not looked at."""
        self.sequence.tokens.extend(ids)

    def draw(self, token_id: int, limit: int) -> list[int]:
        """Adds a token that the draft drew, and returns what it adds for the target; positions below `limit` may be
        drafted. Where not even the draft's own is added, the text cannot go on."""
        self.append([token_id])
        return [token_id]

    def truncate(self, length: int, cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens; the last one's logits are wanted next."""
        cache.truncate(self.sequence, self.num_own(length))
        self._forget(length)

    def replace(self, length: int, ids: Sequence[int], cache: KVCacheManager) -> None:
        """Keeps the first `length` tokens, and puts others behind them. With any, all that is kept may stay computed:
        a token behind it is replaced, not truncated and computed again."""
        own = self.num_own(length)
        cache.truncate(self.sequence, own + bool(ids))
        del self.sequence.tokens[own:]
        self._forget(length)
        self.append(ids)

    def fork(self, length: int, cache: KVCacheManager) -> tuple[Self, BlockCopy | None]:
        """As KVCacheManager's, of the first `length` tokens."""
        sequence, copy = cache.fork(self.sequence, self.num_own(length))
        return self._over(sequence, length), copy

    def _forget(self, length: int) -> None:
        """What is known beside the own tokens ends there, too."""

    def _over(self, sequence: CachedSequence, length: int) -> Self:
        return type(self)(sequence)


class MappedText(DraftText):
    """Of two vocabularies."""

    __slots__ = ("_ends", "_tokens", "mapping")

    is_own = False

    def __init__(self, sequence: CachedSequence, mapping: VocabularyMap, tokens: Sequence[int] = ()) -> None:
        """`sequence` is empty; `tokens` are the target's."""
        super().__init__(sequence)
        self.mapping = mapping
        self._tokens: list[int] = []
        self._ends: list[int] = []  # of each token: how many own tokens there are up to it
        self.append(tokens)

    @property
    def tokens(self) -> list[int]:
        """The target's ids; to be changed by the methods here alone."""
        return self._tokens

    def num_own(self, length: int) -> int:
        """How many of the draft's own tokens the first `length` are."""
        return self._ends[length - 1] if length else 0

    def append(self, ids: Sequence[int]) -> None:
        """Adds tokens at the end; blocks are not looked at."""
        for token_id in ids:
            self._tokens.append(token_id)
            self.sequence.tokens.extend(self.mapping.spell(token_id))
            self._ends.append(len(self.sequence.tokens))

    def _forget(self, length: int) -> None:
        del self._tokens[length:], self._ends[length:]

    def _over(self, sequence: CachedSequence, length: int) -> Self:
        forked = type(self)(sequence, self.mapping)
        forked._tokens, forked._ends = self._tokens[:length], self._ends[:length]
        return forked
