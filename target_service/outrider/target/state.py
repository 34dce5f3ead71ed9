"""One sequence in the target: its tokens and blocks, the chains it holds, its credit and its clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.engine.random_ahead import RandomAhead, RandomKey
from outrider.engine.sampling import SequenceSampler
from outrider.engine.sequence import Sequence
from outrider.target.chains import ChainBuffer
from outrider.target.goodput import Acceptance
from outrider.wire.messages import Credit, Open, PositionLogprobs, TargetEvent
from outrider.wire.sampling import AcceptanceRule

Sink = Callable[[TargetEvent], None]
SequenceKey = tuple[int, int]  # stream number, sequence id


@dataclass(slots=True, eq=False)
class TargetSequence:
    """`sequence.tokens` are the committed tokens whenever no step is under way."""

    key: SequenceKey
    open: Open
    prompt_len: int
    sequence: Sequence
    sampler: SequenceSampler
    chains: ChainBuffer
    random_key: RandomKey
    sink: Sink
    arrival: int  # order of arrival, for fairness and preemption
    deadline: float | None  # on the scheduler's clock
    random_ahead: RandomAhead = field(default_factory=RandomAhead)
    acceptance: Acceptance = field(default_factory=Acceptance)
    group: SequenceKey | None = None  # the sequence whose prompt this one and its siblings share
    last_step: int = 0  # number of the last step that it was in
    admitted: bool = False  # holds blocks (or may take them); false when new or preempted
    until: int = 0
    max_window: int = 0
    patience: float = 0.0  # seconds
    last_commit: float = 0.0
    ready_since: float = 0.0  # when the next round could have started
    patience_spent: bool = True  # the first token waits for no draft; later a wait that ran out is not repeated
    num_cached_ids: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finished: bool = False

    @property
    def committed(self) -> int:
        """The committed length."""
        return len(self.sequence)

    @property
    def num_output(self) -> int:
        """Generated tokens, those of an earlier life included."""
        return len(self.sequence) - self.prompt_len

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be generated."""
        return self.tokens_left_at(self.committed)

    def tokens_left_at(self, length: int) -> int:
        """The same, were the committed length `length`."""
        return self.open.sampling.max_tokens - (length - self.prompt_len)

    @property
    def num_own_tokens(self) -> int:
        """Tokens generated here; those of an earlier life do not count."""
        return self.committed - self.prompt_len - len(self.open.output_ids)

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ended the targets that it was open on; a token committed clears it."""
        return self.open.suspect and not self.num_own_tokens

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.open.sampling.greedy

    @property
    def coupled(self) -> bool:
        """Whether draft and target share their noise."""
        return self.open.acceptance == AcceptanceRule.COUPLED

    @property
    def rejects(self) -> bool:
        """Whether windows are judged by rejection sampling: then the target's own token does not follow one that is
        cut."""
        return self.open.acceptance == AcceptanceRule.REJECTION and not self.greedy

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt rows need logits: asked for, and not all returned yet."""
        return self.open.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    def grant(self, credit: Credit) -> None:
        """Applies a credit at once, also to a wait under way; `until` never falls."""
        self.until = max(self.until, credit.until)
        self.max_window = credit.max_window
        self.patience = credit.patience_ms / 1000

    @property
    def has_credit(self) -> bool:
        """Whether one more token may be committed."""
        return self.until > self.committed and not self.finished

    def due(self, now: float) -> float | None:
        """When the next round may start: now or earlier if it may run, later while it waits for a chain, None
        without credit."""
        if not self.has_credit:
            return None
        if self.chains.live() is not None or self.chains.draft_is_idle or self.patience_spent:
            return now
        return self.last_commit + self.patience
