"""Which random counters are asked for, and which of them decide what: read off Philox itself and off the places where
its numbers are used. A use is traced back to its counter by its value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from outrider.engine import random as engine_random
from outrider.kernels.random import reference as philox
from outrider.kernels.random.reference import Purpose
from outrider.proposers import draft_model
from outrider.target_service import verifier

Counter = tuple[int, int, int, int, int, int]  # seed, position, purpose, draw, completion, token id >> 2
Raw = tuple[int, ...]  # the four words of the counter and the two of the key

PURPOSE_OF = {
    "draft": Purpose.DRAFT,
    "accept": Purpose.ACCEPT,
    "recovered": Purpose.RECOVERED,
    "bonus": Purpose.BONUS,
    "coupled draft": Purpose.BONUS,
    "coupled target": Purpose.BONUS,
}
SHARED = {"coupled draft", "coupled target"}  # one decision, taken on both sides


class CounterLog:
    """Listens while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requested: set[Counter] = set()
        self.meaning: defaultdict[Raw, set[Counter]] = defaultdict(set)  # of what is encrypted
        self.uses: defaultdict[Counter, set[str]] = defaultdict(set)
        self._counters: dict[object, list[Counter]] = {}  # by four words, or by a row of noise
        self._raw: list[Raw] = []
        self._full: list[bool] = []
        self._listen_to_philox(monkeypatch)
        self._listen_to_uses(monkeypatch)

    def check(self) -> None:
        """No counter is encrypted under two meanings, none decides two things; both sides of coupling share theirs."""
        assert all(len(meanings) == 1 for meanings in self.meaning.values()), "two requests have one counter"
        for counter, kinds in self.uses.items():
            assert len(kinds) == 1 or kinds <= SHARED, f"{counter} decides {sorted(kinds)}"
            assert {PURPOSE_OF[kind] for kind in kinds} == {counter[2]}, f"{counter} decides {sorted(kinds)}"

    def kinds(self) -> set[str]:
        """What was decided."""
        return {kind for kinds in self.uses.values() for kind in kinds}

    def _listen_to_philox(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(philox, "cpu_library", lambda: None)  # its noise is not overheard
        run, grouped = philox._run, philox._grouped_words

        def listen_run(groups: Any, columns: Any) -> Any:
            position, purpose, completion, low, high = (column.squeeze(-1).tolist() for column in columns)
            self._raw = [
                (group, *rest)
                for rest in zip(position, purpose, completion, low, high, strict=True)
                for group in groups[0].tolist()
            ]
            return run(groups, columns)

        def listen(
            groups: Tensor, seeds: Tensor, positions: Tensor, purpose: Any, completions: Tensor, draw: int
        ) -> Tensor:
            words = grouped(groups, seeds, positions, purpose, completions, draw)
            purposes = purpose.tolist() if isinstance(purpose, Tensor) else [int(purpose)] * len(seeds)
            rows = zip(seeds.tolist(), positions.tolist(), purposes, completions.tolist(), strict=True)
            counters = [(*row[:3], draw, row[3], group) for row in rows for group in groups.tolist()]
            self.requested.update(counters)
            for raw, counter, four in zip(self._raw, counters, words.flatten(0, 1).tolist(), strict=True):
                self.meaning[raw].add(counter)
                self._counters[tuple(four)] = [counter]
            return words

        monkeypatch.setattr(philox, "_run", listen_run)
        monkeypatch.setattr(philox, "_grouped_words", listen)

    def _listen_to_uses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        noise, accept = engine_random.exponential_noise, verifier.accept

        def listen_noise(seeds: Tensor, positions: Tensor, completions: Tensor, vocab: int, purpose: Any) -> Tensor:
            rows = noise(seeds, positions, completions, vocab, purpose)
            for row, *key in zip(rows, seeds.tolist(), positions.tolist(), completions.tolist(), strict=True):
                seed, position, completion = key
                groups = range(-(-vocab // 4))
                counters = [(seed, position, int(purpose), 0, completion, group) for group in groups]
                self._counters[row.numpy().tobytes()] = counters
            return rows

        def listen_accept(probs: Tensor, windows: Any, *rest: Any) -> Any:
            num_accepted, weights = accept(probs, windows, *rest)
            self._full = (num_accepted == windows.num_drafted).tolist()
            return num_accepted, weights

        monkeypatch.setattr(engine_random, "exponential_noise", listen_noise)
        monkeypatch.setattr(verifier, "accept", listen_accept)
        self._trace(monkeypatch, verifier, "accept_uniforms", 0, lambda index: "accept")
        self._trace(monkeypatch, verifier, "draw", 1, lambda index: "bonus" if self._full[index] else "recovered")
        self._trace(monkeypatch, verifier, "coupled_choice", 1, lambda index: "coupled target")
        self._trace(monkeypatch, draft_model, "coupled_choice", 1, lambda index: "coupled draft")
        self._trace(monkeypatch, draft_model, "draft_sample", 1, lambda index: "draft")

    def _trace(
        self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, argument: int, kind: Callable[[int], str]
    ) -> None:
        """Notes the counters behind each row of one argument of a function."""
        function = getattr(module, name)

        def traced(*arguments: Any) -> Any:
            for index, row in enumerate(arguments[argument]):
                value = row.numpy().tobytes() if row.is_floating_point() else tuple(row.tolist())
                for counter in self._counters[value]:
                    self.uses[counter].add(kind(index))
            return function(*arguments)

        monkeypatch.setattr(module, name, traced)
