"""What a sequence's tokens must follow, beside its other sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.engine.grammar.masks import clear_bit

if TYPE_CHECKING:
    from outrider.engine.grammar.compiler import Matcher

MAX_FORCED = 128  # tokens of one answer


class Constraint:
    """What a sequence's tokens must follow. `ends` may not come before `min_tokens` tokens, and `ignored` never, but
    where nothing else may follow both yield: the constraint knows no other way on."""

    def __init__(self, matcher: Matcher, ends: Iterable[int], min_tokens: int, ignored: Iterable[int] = ()) -> None:
        self.matcher = matcher
        self._ends, self._ignored, self._min_tokens = tuple(ends), tuple(ignored), min_tokens
        self._forced: tuple[tuple[int, tuple[int, ...]], list[int]] = (-1, ()), []  # where asked last, and the answer

    @property
    def holds_ends_back(self) -> bool:
        """Whether it does so in the place of the sampler: not where only reasoning is bounded."""
        return self.matcher.is_text

    def write_masks(self, num_output: int, drafted: Sequence[int], first: int, out: Tensor) -> None:
        """What may follow the prefixes of `drafted` from length `first` on, behind `num_output` tokens: to `out`,
        [rows, ceil(vocab / 32)] int32 on the host. From any thread, while nothing is committed. Raises GrammarError."""
        self.matcher.masks(drafted, first, out)
        if not self.holds_ends_back:
            return
        for row in range(len(out)):
            early = self._ends if num_output + first + row < self._min_tokens else ()
            if early or self._ignored:
                _hold_back(out[row], (*early, *self._ignored))

    def num_allowed(self, num_output: int, ids: Sequence[int]) -> int:
        """How many of these tokens, behind `num_output`, its masks allow, each behind those before it. An end that is
        held back counts as forbidden: what masks say of it depends on what else may follow. 0 where it gives up: its
        masks will say so."""
        held = (place for place, token in enumerate(ids) if self._is_held_back(num_output + place, token))
        try:
            return self.matcher.num_allowed(ids[: next(held, None)])
        except ValueError:
            return 0

    def first_allowed(self, num_output: int, drafted: Sequence[int], candidates: Iterable[int]) -> int | None:
        """The first of the candidates that the mask behind `num_output` and then `drafted` tokens allows, or what is
        forced there, candidate or not; None: only the mask says it."""
        position = num_output + len(drafted)
        try:
            tokens = (token for token in candidates if not self._is_held_back(position, token))
            found = self.matcher.first_allowed(drafted, tokens)
        except ValueError:
            return None
        return None if found is None or self._is_held_back(position, found) else found

    def _is_held_back(self, num_output: int, token: int) -> bool:
        """Whether a token, behind so many, is an end that may not come unless nothing else may."""
        is_held = token in self._ignored or (num_output < self._min_tokens and token in self._ends)
        return is_held and self.holds_ends_back

    def forced_after(self, committed: int, drafted: tuple[int, ...], limit: int) -> Sequence[int]:
        """At most `limit` tokens that it forces behind drafted ones, which follow so many committed ones; none where it
        gives up: its masks will say so. A step asks several times."""
        if self._forced[0] != (committed, drafted):
            try:
                forced = [] if self.matcher.is_slow else self.matcher.forced(MAX_FORCED, drafted)
            except ValueError:
                forced = []
            self._forced = (committed, drafted), forced
        return self._forced[1][: max(0, limit)]


def _hold_back(row: Tensor, ids: Iterable[int]) -> None:  # [words] int32
    held = row.clone()
    for token in ids:
        clear_bit(held, token)
    if held.any():
        row.copy_(held)
