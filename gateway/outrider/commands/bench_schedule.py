"""The order of the measurements: in every repeat each way once, in random order, the floor beside each of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

from outrider.commands.bench_foreign import ForeignLoad
from outrider.commands.bench_result import Json, describe_block
from outrider.commands.bench_run import Cell, Run, Way
from outrider.commands.bench_worker import Worker

Note = Callable[[str], None]


class Schedule:
    """Measures cells. `floor` answers what bench_floor's worker does."""

    def __init__(
        self, ways: Sequence[Way], floor: Worker, *, repeats: int, max_tokens: int, floor_passes: int, seed: int
    ) -> None:
        self._ways = ways
        self._floor = floor
        self._repeats = repeats
        self._max_tokens = max_tokens
        self._floor_passes = floor_passes
        self._seed = seed
        self._order = random.Random(seed)

    def measure(self, cell: Cell, prompts: Sequence[Sequence[int]], note: Note) -> Json:
        """All repeats of a cell, after one of each way that counts for nothing."""
        ways = [way for way in self._ways if way.fits(cell)]
        batch = prompts[: cell.batch]
        rows = {way.name: way.decode(cell, batch, self._max_tokens, self._seed).rows for way in ways}
        before, foreign = self._floor.ask({}), ForeignLoad()
        runs: dict[str, list[Run]] = {way.name: [] for way in ways}
        for repeat in range(self._repeats):
            for way in self._order.sample(ways, len(ways)):
                run = self._run(way, cell, batch, self._seed + repeat, rows[way.name])
                runs[way.name].append(run)
                rows[way.name] = run.rows
            speeds = ", ".join(f"{name} {own[-1].tokens_per_s:.1f}" for name, own in runs.items())
            note(f"  {repeat + 1} of {self._repeats}: {speeds} tokens/s")
        others = foreign.cpus()
        return describe_block(cell, runs, before, self._floor.ask({}), others)

    def _run(self, way: Way, cell: Cell, prompts: Sequence[Sequence[int]], seed: int, last_rows: int) -> Run:
        """One run, between two measurements of its floor: with the rows of the way's last run, and with its own."""
        times = self._products(last_rows)
        run = way.decode(cell, prompts, self._max_tokens, seed)
        times += self._products(run.rows)
        run.products_ms = median(times) if times else None
        return run

    def _products(self, rows: int) -> list[float]:
        if not rows:
            return []
        times: list[float] = self._floor.ask({"rows": rows, "passes": self._floor_passes})["ms"]
        return times
