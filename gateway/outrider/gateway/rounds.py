"""What one verification did, and the sums over a completion's rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from outrider.wire.messages import Commit

AHEAD = ("chains", "branches")


@dataclass(frozen=True, slots=True)
class Round:
    """One commit with its times. Seconds are on the gateway's monotonic clock, microseconds are durations."""

    index: int
    commit: Commit
    num_draft_tokens: int  # k of the policy; 0: plain decoding
    started: float
    ended: float
    draft_us: int  # device time of the pieces that arrived in this round
    mode: str = ""  # off, sequential, chains or branches
    inputs: Mapping[str, float] = field(default_factory=dict)  # what the mode was chosen by
    at_end: bool = False  # no more drafted tokens would have fitted before max_tokens
    moved: bool = False  # since the round before, which another target (or stream) committed
    near_ties: bool = False  # this round or one before moved to a target whose logits need not be equal to the bit

    @property
    def total_us(self) -> int:
        """From the commit before to this one."""
        return round((self.ended - self.started) * 1e6)

    @property
    def wire_us(self) -> int:
        """What is neither draft, queue, verify nor sample: transport, event loops, the gateway itself."""
        timings = self.commit.timings
        return max(0, self.total_us - self.forward_us - timings.queue_us - timings.sample_us)

    @property
    def overhead_us(self) -> int:
        """The control overhead: the round's time less its forward passes (draft and verify)."""
        return max(0, self.total_us - self.forward_us)

    @property
    def forward_us(self) -> int:
        """Forward passes: one after the other, or, where the draft runs ahead, both at the same time."""
        both = self.draft_us, self.commit.timings.verify_us
        return max(both) if self.mode in AHEAD else sum(both)


@dataclass(slots=True)
class SpeculationTally:
    """Sums over one completion, under the meanings of vLLM's spec_decode metrics."""

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    tested_per_position: list[int] = field(default_factory=list)
    overheads_us: list[int] = field(default_factory=list)
    mode: str = ""  # of the last round
    rounds_by_mode: dict[str, int] = field(default_factory=dict)

    def add(self, closed: Round) -> None:
        """Counts a round; a plain step is a round without a draft."""
        commit = closed.commit
        self.num_rounds += 1
        self.mode = closed.mode
        self.rounds_by_mode[closed.mode] = self.rounds_by_mode.get(closed.mode, 0) + 1
        if closed.index > 0:  # the first round holds the prompt
            self.overheads_us.append(closed.overhead_us)
        if commit.num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += commit.num_drafted
        self.num_accepted_tokens += commit.num_accepted
        missing = commit.num_drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        self.tested_per_position.extend([0] * missing)
        for position in range(commit.num_drafted):
            if position <= commit.num_accepted:
                self.tested_per_position[position] += 1
            if position < commit.num_accepted:
                self.accepted_per_position[position] += 1

    @property
    def overhead_us(self) -> int:
        """Median control overhead a round."""
        return round(median(self.overheads_us)) if self.overheads_us else 0
