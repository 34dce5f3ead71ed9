"""Drafting methods as a user would bring them, by their dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.proposers.base import SequenceContext


class _State:
    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = list(tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, ids: Iterable[int]) -> None:
        self.tokens += ids

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def propose(self, max_tokens: int) -> list[int]:
        return self.tokens[-1:] * max_tokens


class LastToken:
    """Drafts the last token over and over, and keeps what it is told of sequences that ended."""

    name = "last_token"

    def __init__(self) -> None:
        self.learned: list[tuple[list[int], SequenceContext]] = []
        self.closed = False

    def open(self, tokens: Iterable[int], context: SequenceContext) -> _State:
        return _State(tokens)

    def learn(self, tokens: Sequence[int], context: SequenceContext) -> None:
        self.learned.append((list(tokens), context))

    def held(self) -> dict[str, int]:
        return {"sequences": len(self.learned)}

    def close(self) -> None:
        self.closed = True


class _Broken(_State):
    def __init__(self, tokens: Iterable[int], ids: list[int]) -> None:
        super().__init__(tokens)
        self._ids = ids

    def propose(self, max_tokens: int) -> list[int]:
        if not self._ids:
            raise RuntimeError("nothing to propose")
        return self._ids


class Broken:
    """Proposes what no method may, or raises where there is nothing to propose."""

    name = "broken"

    def __init__(self, *ids: int) -> None:
        self._ids = list(ids)

    def open(self, tokens: Iterable[int], context: SequenceContext) -> _State:
        return _Broken(tokens, self._ids)

    def learn(self, tokens: Sequence[int], context: SequenceContext) -> None:
        raise RuntimeError("nothing to learn")

    def held(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class NoMethod:
    """Has neither a name nor `open`."""


class Ngram(LastToken):
    """Takes the name of another one."""

    name = "ngram"
