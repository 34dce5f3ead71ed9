"""What a device is told of the windows of a step: numbers by row, by drafted token and by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device_sampling import OFF, parameters_of, says_all
from outrider.engine.staging import StagedColumns
from outrider.kernels.philox import as_int64
from outrider.target.judging import COUNTER_COLUMNS, DRAFT_COLUMNS, WINDOW_COLUMNS, Rule, rule_of
from outrider.target.verifier import Judged


@dataclass(slots=True)
class StepNumbers:
    """Columns by name, and the entries of draft weights."""

    columns: dict[str, list[float]] = field(default_factory=dict)
    entry_starts: list[int] = field(default_factory=lambda: [0])  # of each drafted token
    ids: list[bytes] = field(default_factory=list)
    weights: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    num_windows: int = 0
    hardest: Rule = Rule.GREEDY
    changes_logits: bool = False  # biases, bans or penalties: more than the columns say

    @staticmethod
    def of(judged: Sequence[Judged]) -> StepNumbers:
        """The windows' rows lie one after the other."""
        numbers = StepNumbers()
        for member in judged:
            numbers._add(member)
        return numbers

    @property
    def num_entries(self) -> int:
        """Entries of all draft weights."""
        return self.entry_starts[-1]

    def write(self, staged: StagedColumns) -> int:
        """Writes them and their padding to the host's buffer; returns how many words of it hold them."""
        for name in (*OFF, *COUNTER_COLUMNS, "greedy_rows", *DRAFT_COLUMNS, *WINDOW_COLUMNS):
            staged.write(name, self.columns.get(name, []), OFF.get(name, 0))
        staged.write("entry_starts", self.entry_starts, self.num_entries)
        staged.write("entries", self._entries())
        return staged.words_up_to("entries", 2 * self.num_entries)

    def _add(self, member: Judged) -> None:
        target, window = member.entry.target, member.entry.window
        num_rows, num_drafted = len(member.rows), len(window.ids)
        rule, first_draft = rule_of(target), len(self.columns.get("draft_ids", ()))
        self._add_rows(member, rule)
        self._extend("draft_ids", window.ids)
        self._extend("row_of_draft", range(self.num_rows, self.num_rows + num_drafted))
        self._extend("window_of_draft", [self.num_windows] * num_drafted)
        self._extend("offset_of_draft", range(num_drafted))
        of_window = (self.num_rows, num_rows, num_drafted, first_draft, rule)
        for name, value in zip(WINDOW_COLUMNS, of_window, strict=True):
            self._extend(name, [value])
        self._add_entries(member, rule)
        self.num_rows += num_rows
        self.num_windows += 1
        self.hardest = max(self.hardest, rule)
        self.changes_logits |= not says_all(target.sampler)

    def _add_rows(self, member: Judged, rule: Rule) -> None:
        target, num_rows = member.entry.target, len(member.rows)
        for name, value in parameters_of(target.sampler).items():
            self._extend(name, [value] * num_rows)
        self._extend("seeds", [as_int64(target.random_key.seed)] * num_rows)
        self._extend("positions", range(member.entry.committed, member.entry.committed + num_rows))
        self._extend("completions", [target.random_key.completion] * num_rows)
        self._extend("greedy_rows", [int(rule == Rule.GREEDY)] * num_rows)

    def _add_entries(self, member: Judged, rule: Rule) -> None:
        """A vector whose ids and weights differ in number is one-hot, as one that is not there."""
        vectors = member.entry.window.weights if rule == Rule.REJECTION else (None,) * len(member.entry.window.ids)
        for vector in vectors:
            usable = vector is not None and len(vector.ids) == len(vector.weights) and len(vector.ids) % 4 == 0
            if vector is not None and usable:
                self.ids.append(vector.ids)
                self.weights.append(vector.weights)
            self.entry_starts.append(self.num_entries + (len(vector.ids) // 4 if vector is not None and usable else 0))

    def _entries(self) -> NDArray[np.int32]:
        """What is above 2^31 turns negative, and is no more usable than before."""
        entries = np.empty((self.num_entries, 2), dtype="<i4")
        entries[:, 0] = np.frombuffer(b"".join(self.ids), dtype="<i4")
        entries[:, 1] = np.frombuffer(b"".join(self.weights), dtype="<i4")
        return entries.reshape(-1)

    def _extend(self, name: str, values: Sequence[float]) -> None:
        self.columns.setdefault(name, []).extend(values)
