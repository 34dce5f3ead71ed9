"""Prompt lookup: the last tokens occurred before, so what followed them then is likely to follow them now.

The longest n-gram, of `prompt_lookup_max` down to `prompt_lookup_min` tokens, that ends the sequence and occurred
before is looked up, as in vLLM. Two choices differ, since they raise acceptance: of its earlier occurrences the most
recent one counts (vLLM takes the earliest), and where the copy reaches the end of the sequence it goes on into itself
(vLLM stops there), so that a repetition of period 2 still fills a window of 8.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.proposers.base import SequenceContext

DEFAULT_LOOKUP = 5  # tokens


class NgramProposer:
    """Prompt lookup; a bound that is absent copies the other one, and both are 5 without either."""

    name = "ngram"

    def __init__(self, prompt_lookup_min: int | None = None, prompt_lookup_max: int | None = None) -> None:
        least, most = prompt_lookup_min, prompt_lookup_max
        self.prompt_lookup_min = next(n for n in (least, most, DEFAULT_LOOKUP) if n is not None)
        self.prompt_lookup_max = next(n for n in (most, least, DEFAULT_LOOKUP) if n is not None)
        if self.prompt_lookup_min < 1:
            raise ValueError(f"prompt_lookup_min must be at least 1, not {self.prompt_lookup_min}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must be at most "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )

    def open(self, tokens: Iterable[int], context: SequenceContext | None = None) -> NgramState:
        """Starts a sequence; of the context nothing is used."""
        state = NgramState(self.prompt_lookup_min, self.prompt_lookup_max)
        state.append(tokens)
        return state


class NgramState:
    """A sequence and where its n-grams ended. A token costs one dictionary entry per n, added or taken back."""

    def __init__(self, least: int, most: int) -> None:
        self._tokens: list[int] = []
        self._indices = [_NgramIndex(n) for n in range(most, least - 1, -1)]

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    def append(self, ids: Iterable[int]) -> None:
        """Adds tokens at the end."""
        for token_id in ids:
            self._tokens.append(token_id)
            for index in self._indices:
                index.push(self._tokens)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, as if the others had never been there."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot truncate {len(self._tokens)} tokens to {length}")
        while len(self._tokens) > length:
            for index in self._indices:
                index.pop(self._tokens)
            self._tokens.pop()

    def propose(self, max_tokens: int) -> list[int]:
        """What followed the longest n-gram's most recent occurrence; empty if no n-gram occurred before."""
        for index in self._indices:
            if start := index.last_match():
                return self._copy(start, max_tokens)
        return []

    def _copy(self, start: int, count: int) -> list[int]:
        """`count` tokens from `start` on, as if the sequence went on with them."""
        followed = self._tokens[start : start + max(count, 0)]
        period = len(self._tokens) - start
        while len(followed) < count:
            followed.extend(followed[-period:][: count - len(followed)])
        return followed


class _NgramIndex:
    """For one n: where each n-gram ended last, and for every length where its last n-gram had ended before that. The
    second makes a lookup a read, and undoing a token exact."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last_end: dict[tuple[int, ...], int] = {}
        self._earlier_end: list[int] = []  # by number of tokens less one; 0: never

    def push(self, tokens: list[int]) -> None:
        """Counts in the last token."""
        if len(tokens) < self._n:
            self._earlier_end.append(0)
            return
        ngram = tuple(tokens[-self._n :])
        self._earlier_end.append(self._last_end.get(ngram, 0))
        self._last_end[ngram] = len(tokens)

    def pop(self, tokens: list[int]) -> None:
        """Takes the last token back, which is still there."""
        earlier = self._earlier_end.pop()
        if len(tokens) < self._n:
            return
        ngram = tuple(tokens[-self._n :])
        if earlier:
            self._last_end[ngram] = earlier
        else:
            del self._last_end[ngram]

    def last_match(self) -> int:
        """Where the n-gram that ends the sequence had ended before; 0: nowhere."""
        return self._earlier_end[-1] if self._earlier_end else 0
