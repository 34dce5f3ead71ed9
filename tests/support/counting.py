"""Texts and ids that count what is copied of them and looked through: work, without a clock."""

from __future__ import annotations

from typing import Any, ClassVar, SupportsIndex


class CountedText(str):
    """What is made of it counts, too; a pattern's search does not."""

    work: ClassVar[int] = 0

    def __add__(self, other: str) -> CountedText:
        return self._counted(str.__add__(self, other))

    def __radd__(self, other: str) -> CountedText:
        return self._counted(str.__add__(other, self))

    def __getitem__(self, place: Any) -> CountedText:
        return self._counted(str.__getitem__(self, place))

    def find(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None) -> int:
        found, begin = str.find(self, sub, start, end), int(start or 0)
        CountedText.work += max(0, (len(self) if found < 0 else found) - begin)
        return found

    def _counted(self, text: str) -> CountedText:
        CountedText.work += len(text)
        return CountedText(text)


class CountedIds(tuple[int, ...]):
    """Its slices count."""

    work: ClassVar[int] = 0

    def __getitem__(self, place: Any) -> Any:
        got = tuple.__getitem__(self, place)
        if not isinstance(place, slice):
            return got
        CountedIds.work += len(got)
        return CountedIds(got)
