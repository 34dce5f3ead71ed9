"""What a device is told of the windows of a step: numbers by row, by drafted token and by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device_sampling import OFF, parameters_of, says_all
from outrider.engine.staging import StagedColumns
from outrider.kernels.philox import as_int64
from outrider.target.rule import Rule, rule_of
from outrider.target.verifier import Judged

Columns = dict[str, NDArray[Any]]


@dataclass(slots=True)
class StepNumbers:
    """The numbers of each window, and the drafted tokens and entries of draft weights of all."""

    windows: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _OF_WINDOW})
    draft_ids: list[int] = field(default_factory=list)
    entry_starts: list[int] = field(default_factory=lambda: [0])  # of each drafted token
    entries: list[tuple[bytes, bytes]] = field(default_factory=list)  # ids and weights
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
    def num_windows(self) -> int:
        """Windows of the step."""
        return len(self.windows["rules"])

    @property
    def num_rows(self) -> int:
        """Rows that judge them."""
        return int(sum(self.windows["num_rows"]))

    @property
    def num_entries(self) -> int:
        """Entries of all draft weights."""
        return self.entry_starts[-1]

    def write(self, staged: StagedColumns) -> int:
        """Writes them and their padding to the host's buffer; returns how many words of it hold them."""
        for name, values in self._columns().items():
            staged.write(name, values, OFF.get(name, 0))
        staged.write("entry_starts", self.entry_starts, self.num_entries)
        staged.write("entries", self._packed_entries())
        return staged.words_up_to("entries", 2 * self.num_entries)

    def _add(self, member: Judged) -> None:
        target, window, rule = member.entry.target, member.entry.window, rule_of(member.entry.target)
        of_window = parameters_of(target.sampler) | {
            "seeds": as_int64(target.random_key.seed),
            "completions": target.random_key.completion,
            "committed": member.entry.committed,
            "num_rows": len(member.rows),
            "num_drafted": len(window.ids),
            "rules": rule,
        }
        for name, value in of_window.items():
            self.windows[name].append(value)
        self.draft_ids += window.ids
        vectors = window.weights if rule == Rule.REJECTION else (None,) * len(window.ids)
        for vector in vectors:  # one whose ids and weights differ in number is one-hot, as one that is not there
            usable = vector is not None and len(vector.ids) == len(vector.weights) and len(vector.ids) % 4 == 0
            if vector is not None and usable:
                self.entries.append((vector.ids, vector.weights))
            self.entry_starts.append(self.num_entries + (len(vector.ids) // 4 if vector is not None and usable else 0))
        self.hardest = max(self.hardest, rule)
        self.changes_logits |= not says_all(target.sampler)

    def _columns(self) -> Columns:
        """By row what is one number a window, and where rows and drafted tokens lie."""
        windows: Columns = {name: np.array(self.windows[name], dtype) for name, dtype in _OF_WINDOW.items()}
        num_rows, num_drafted = windows["num_rows"], windows["num_drafted"]  # [n] each
        row_starts, draft_starts = num_rows.cumsum() - num_rows, num_drafted.cumsum() - num_drafted  # [n] each
        rows, drafts = np.arange(num_rows.sum()), np.arange(num_drafted.sum())
        by_row = {name: windows[name].repeat(num_rows) for name in (*OFF, "seeds", "completions")}
        return by_row | {
            "positions": rows + (windows["committed"] - row_starts).repeat(num_rows),
            "greedy_rows": (windows["rules"] == Rule.GREEDY).repeat(num_rows),
            "draft_ids": np.array(self.draft_ids, np.int64),
            "row_of_draft": drafts + (row_starts - draft_starts).repeat(num_drafted),
            "window_of_draft": np.arange(self.num_windows).repeat(num_drafted),
            "offset_of_draft": drafts - draft_starts.repeat(num_drafted),
            "row_starts": row_starts,
            "num_rows": num_rows,
            "num_drafted": num_drafted,
            "draft_starts": draft_starts,
            "rules": windows["rules"],
        }

    def _packed_entries(self) -> NDArray[np.int32]:
        """Side by side. What is above 2^31 turns negative, and is no more usable than before."""
        packed = np.empty((self.num_entries, 2), dtype="<i4")
        for place, column in enumerate(zip(*self.entries, strict=True)):
            packed[:, place] = np.frombuffer(b"".join(column), dtype="<i4")
        return packed.reshape(-1)


_OF_WINDOW: dict[str, type] = {
    "temperature": np.float32, "min_p": np.float32, "top_k": np.int64, "top_p": np.float64, "seeds": np.int64,
    "completions": np.int64, "committed": np.int64, "num_rows": np.int64, "num_drafted": np.int64, "rules": np.int64,
}  # fmt: skip
