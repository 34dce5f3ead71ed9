"""The log line of speculation, in vLLM's words, for whoever reads its logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from outrider.gateway.rounds import SpeculationTally

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


class SpeculationLog:
    """Says every ten seconds, if something was drafted, what became of it: counted as completions end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reset()

    def add(self, tally: SpeculationTally) -> None:
        """One completion has ended."""
        self._drafts += tally.num_drafts
        self._drafted += tally.num_draft_tokens
        self._accepted += tally.num_accepted_tokens
        counts = tally.accepted_per_position
        self._per_position.extend([0] * (len(counts) - len(self._per_position)))
        for position, count in enumerate(counts):
            self._per_position[position] += count
        seconds = self._clock() - self._began
        if seconds >= INTERVAL_S:
            self._say(seconds)
            self._reset()

    def _reset(self) -> None:
        self._began = self._clock()
        self._drafts = self._drafted = self._accepted = 0
        self._per_position: list[int] = []

    def _say(self, seconds: float) -> None:
        if self._drafts == 0 or self._drafted == 0:
            return
        log.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
            "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, "
            "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
            1 + self._accepted / self._drafts,
            self._accepted / seconds,
            self._drafted / seconds,
            self._accepted,
            self._drafted,
            ", ".join(f"{count / self._drafts:.3f}" for count in self._per_position),
            100 * self._accepted / self._drafted,
        )
