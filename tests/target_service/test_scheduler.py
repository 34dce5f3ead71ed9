"""How a step's rows are divided: prompts get theirs, windows take turns, and the oldest is in every step. Nothing is
computed: rows of a step count as computed, and windows are committed whole, though estimates hear that none held."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.engines import COUPLED, REJECTION, VOCAB, opened

from outrider.engine.kv_cache_manager import BlockPool, KVCacheManager
from outrider.rpc.messages import Credit, DraftTokens
from outrider.rpc.words.sampling_params import AcceptanceRule
from outrider.target_service.goodput import Goodput
from outrider.target_service.scheduler import PROMPT_SHARE, ScheduledSequence, TargetScheduler
from outrider.target_service.sequence import TargetLimits, TargetSequence, admit

LIMITS = TargetLimits(VOCAB, 1 << 20, (), num_blocks=20_000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FLAT = tuple((rows, 10_000) for rows in ROWS)
HALF = tuple((rows, 10_000 + 100 * rows) for rows in ROWS)
K = 4


@dataclass
class Crowd:
    """Sequences under a scheduler, of which every round commits a window and finds the next one there."""

    scheduler: TargetScheduler
    chains: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, costs: tuple[tuple[int, int], ...] | None, max_rows: int = 512, cut_windows: bool = True) -> Crowd:
        scheduler = TargetScheduler(KVCacheManager(BlockPool(LIMITS.num_blocks)), max_rows, 32, cut_windows)
        scheduler.goodput = None if costs is None else Goodput(costs)
        return cls(scheduler)

    def add(self, number: int, prompt_len: int, acceptance: AcceptanceRule = COUPLED, **fields: Any) -> TargetSequence:
        prompt = [(number + at) % VOCAB for at in range(prompt_len)]
        request = opened(number, prompt, temperature=1.0, max_tokens=1 << 16, acceptance=acceptance, **fields)
        target = admit(request, None, (1, number), lambda event: None, LIMITS, number, 0.0)
        target.grant(Credit(number, 1 << 20, K))
        self.scheduler.add(target)
        return target

    def add_decoding(self, numbers: range, acceptance: AcceptanceRule = COUPLED) -> None:
        """Past their prompts, with windows held."""
        for number in numbers:
            self.add(number, 8, acceptance)
        while any(not target.num_own_tokens for target in self.scheduler.sequences.values()):
            self.step()

    def step(self) -> dict[int, int]:
        """One step; the rows that each sequence had."""
        entries = self.scheduler.plan(self.scheduler.runnable(0.0))
        assert sum(entry.num_rows for entry in entries) <= self.scheduler.max_rows
        for entry in entries:
            self._ran(entry)
        return {entry.target.open.sequence_id: entry.num_rows for entry in entries}

    def _ran(self, entry: ScheduledSequence) -> None:
        target, sequence = entry.target, entry.target.sequence
        sequence.num_computed_tokens = entry.start + entry.num_rows
        if not entry.samples:
            return
        if entry.takes_next:
            sequence.tokens.append(5)
        self.scheduler.cache.truncate(sequence, len(sequence))
        target.acceptance.add(len(entry.window.ids), 0)
        target.chains.advance()
        number = target.open.sequence_id
        self.chains[number] += 1
        target.chains.add(DraftTokens(number, self.chains[number], target.committed, (5,) * K))


@pytest.mark.parametrize("costs", [None, FLAT, HALF])
@pytest.mark.parametrize("acceptance", [COUPLED, REJECTION])
@pytest.mark.parametrize("num_streams", [100, 128])
def test_a_prompt_gets_its_rows_beside_many_windows(
    num_streams: int, acceptance: AcceptanceRule, costs: tuple[tuple[int, int], ...] | None
) -> None:
    crowd = Crowd.of(costs)
    crowd.add_decoding(range(1, num_streams + 1), acceptance)
    prompt = crowd.add(1000, 1000)
    steps = []
    while not prompt.num_own_tokens:
        steps.append(crowd.step())
    assert len(steps) <= 8 and all(step[1000] >= 130 for step in steps[:-1])
    assert all(sum(number < 1000 for number in step) >= num_streams / 3 for step in steps)


@pytest.mark.parametrize("costs", [None, FLAT, HALF])
@pytest.mark.parametrize("with_prompts", [False, True])
def test_nobody_is_passed_over_for_long(with_prompts: bool, costs: tuple[tuple[int, int], ...] | None) -> None:
    """128 windows of five rows do not fit a step: whoever was left out comes next, and the oldest is in every step."""
    crowd = Crowd.of(costs)
    crowd.add_decoding(range(1, 129))
    waited: Counter[int] = Counter()
    for number in range(30):
        if with_prompts and number % 3 == 0:
            crowd.add(1000 + number, 700)
        step = crowd.step()
        assert 1 in step
        waited.update(range(1, 129))
        for done in step:
            waited[done] = 0
        assert max(waited.values()) <= 3


@pytest.mark.parametrize("max_rows", [1, 8])
def test_the_oldest_advances_though_it_is_a_prompt(max_rows: int) -> None:
    crowd = Crowd.of(None, max_rows)
    crowd.add_decoding(range(1, 2 if max_rows == 1 else 20))
    oldest = crowd.add(0, 60)
    while not oldest.num_own_tokens:
        assert 0 in crowd.step()


def test_suspects_run_alone_in_turn_with_the_others_until_they_have_a_token() -> None:
    crowd = Crowd.of(HALF, max_rows=64)
    crowd.add_decoding(range(1, 5))
    suspects = [crowd.add(number, 100, suspect=True) for number in (10, 11)]
    steps = []
    while any(suspect.is_suspect for suspect in suspects):
        steps.append(set(crowd.step()))
    everyone = set(range(1, 5))
    assert steps == [{10}, everyone, {11}, everyone, {10}, everyone | {10}, {11}]
    assert set(crowd.step()) == everyone | {10, 11}


def test_a_prompt_adds_no_more_time_than_its_share_beside_whole_windows() -> None:
    crowd = Crowd.of(tuple((rows, 100 * rows) for rows in ROWS), cut_windows=False)
    crowd.add_decoding(range(1, 41))
    crowd.add(1000, 5000)
    step = crowd.step()
    windows = sum(rows for number, rows in step.items() if number < 1000)
    assert windows == 40 * (K + 1) and 0.6 * windows < step[1000] <= PROMPT_SHARE * windows


def test_a_prompt_adds_no_more_time_than_its_share() -> None:
    crowd = Crowd.of(tuple((rows, 100 * rows) for rows in ROWS))  # time in proportion to rows
    crowd.add_decoding(range(1, 129))
    crowd.add(1000, 5000)
    step = crowd.step()
    windows = sum(rows for number, rows in step.items() if number < 1000)
    assert len(step) == 129 and 0.6 * windows < step[1000] <= PROMPT_SHARE * windows
    for number in range(1001, 1129):  # as many wait as are held up
        crowd.add(number, 5000)
    assert sum(crowd.step().values()) == 512


def test_windows_have_all_rows_where_prompts_are_found_in_the_cache() -> None:
    crowd = Crowd.of(None)
    first = crowd.add(1000, 641)
    while not first.num_own_tokens:
        crowd.step()
    crowd.scheduler.cache.publish(first.sequence, 641)
    crowd.add_decoding(range(1, 101))
    again = crowd.add(2000, 641)
    again.sequence.tokens[:] = first.sequence.tokens[:641]
    step = crowd.step()
    assert step[2000] == 1 and sum(number < 1000 for number in step) >= 100
