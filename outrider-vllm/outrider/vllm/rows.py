"""One running request as its drafts see it: which chains are held for it, how far it may go, how long it waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.rpc.messages import Credit, DraftTokens
from outrider.target_service.draft_buffer import EMPTY_WINDOW, ChainBuffer, Window


@dataclass(slots=True)
class DraftedRow:
    """Of a request that vLLM runs. The words are the protocol's: see draft_buffer.py."""

    request_id: str  # vLLM's
    sequence_id: int  # its own, where its drafts come from
    tokens: Sequence[int]  # vLLM's list of its prompt and output, which grows
    prompt_len: int  # ids that it began with
    max_tokens: int  # it may generate
    weighs: bool  # drawn, so that drafted tokens are judged against what they were drawn from
    chains: ChainBuffer
    until: int = 0
    max_window: int = 0
    patience: float = 0.0  # seconds
    patience_spent: bool = True  # the first token waits for no draft
    last_commit: float = 0.0  # 0: none yet
    window: Window = EMPTY_WINDOW  # of the step under way
    num_cached_ids: int = 0
    suspect: bool = False  # it may be what ended the targets that it was open on
    opened_at: float = field(default_factory=time.monotonic)

    @property
    def committed(self) -> int:
        """The committed length."""
        return len(self.tokens)

    @property
    def num_own_tokens(self) -> int:
        """Tokens generated since it began."""
        return self.committed - self.prompt_len

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be generated."""
        return self.max_tokens - self.num_own_tokens

    @property
    def is_suspect(self) -> bool:
        """Whether it still may be: a token committed clears it."""
        return self.suspect and not self.num_own_tokens

    @property
    def has_credit(self) -> bool:
        """Whether another token may be committed."""
        return self.until > self.committed

    def grant(self, credit: Credit) -> None:
        """Applies a credit at once, also to a wait under way; `until` never falls."""
        self.until = max(self.until, credit.until)
        self.max_window = credit.max_window
        self.patience = credit.patience_ms / 1000

    def add(self, piece: DraftTokens) -> None:
        """Holds a piece, or drops it."""
        self.chains.add(piece)
        self.patience_spent = self.patience_spent and not self.num_own_tokens

    def due(self, now: float) -> float | None:
        """When its next step may start: now or earlier if it may run, later while it waits for a chain, None without
        credit."""
        if not self.has_credit:
            return None
        if self.chains.live() is not None or self.chains.draft_is_idle or self.patience_spent:
            return now
        return self.last_commit + self.patience

    def cut_window(self, most: int) -> Window:
        """The drafted tokens of its next step. vLLM draws a token of the target's own after every window, so that one
        place below `until` and max_tokens stays free. By counts alone, never by what a drafted token is."""
        if self.chains.live() is None and not self.chains.draft_is_idle and self.patience > 0:
            self.patience_spent = True  # the wait ran out; it is not repeated until a piece arrives
        places = min(self.until - self.committed, self.tokens_left) - 1
        self.window = self.chains.window(min(most, self.max_window, places))
        return self.window

    def advance(self, now: float) -> None:
        """Compares what is held with what was committed."""
        self.chains.advance()
        if self.num_own_tokens and self.last_commit == 0.0:
            self.patience_spent = False  # the first token waited for no draft; from here on patience counts
        self.last_commit = now
