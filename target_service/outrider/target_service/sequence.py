"""One sequence in the target: its tokens and blocks, the chains it holds, its credit and its clocks; and how an Open
becomes one, within the target's limits, or is refused with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine.kv_cache_manager import BLOCK_SIZE, CachedSequence
from outrider.engine.random import RandomAhead, RandomKey
from outrider.engine.sampler import SequenceSampler
from outrider.planner.estimates import Acceptance, Lag
from outrider.rpc.errors import (
    OTHER_MODEL,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
    Violation,
)
from outrider.rpc.media import num_bytes, too_many_bytes
from outrider.rpc.messages import (
    MOST_STEPS,
    PRIORITY_STEP_S,
    Adapter,
    Credit,
    Open,
    TargetEvent,
    validate_length,
    validate_open,
)
from outrider.rpc.words.answer import PositionLogprobs
from outrider.rpc.words.sampling_params import MAX_LOGPROBS, AcceptanceRule
from outrider.target_service.adapters import NO_ADAPTER, ServedAdapter
from outrider.target_service.draft_buffer import ChainBuffer


@dataclass(frozen=True, slots=True)
class HeadChain:
    """What a head beside the model drafted last of a sequence."""

    number: int
    draft_us: int  # what the pass took, with those of other sequences


Sink = Callable[[TargetEvent], None]
SequenceKey = tuple[int, int]  # stream number, sequence id


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class TargetSequence:
    """`sequence.tokens` are the committed tokens whenever no step is under way."""

    # What was asked for, by whom.
    key: SequenceKey
    open: Open
    prompt_len: int
    eos_ids: tuple[int, ...]
    sink: Sink
    arrival: int  # order of arrival, for fairness and preemption
    seniority: tuple[float, int]  # when it came, later by its priority, then order of arrival: the least goes first
    deadline: float  # on the scheduler's clock

    # Its tokens, what computes them, and what the next ones are drawn by.
    sequence: CachedSequence
    adapter: ServedAdapter | None = None  # until it ends
    sampler: SequenceSampler
    random_key: RandomKey
    random_ahead: RandomAhead = field(default_factory=RandomAhead)
    waits_for: Future[Any] | None = None  # its constraint, or masks of it that were late
    compile_us: int = 0  # what that took; a commit tells it
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finished: bool = False

    # Its draft: what is held of it, and how much of that was accepted of late.
    chains: ChainBuffer
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(forgets_untested=True))

    # Of a head beside the model.
    head_end: int = 0  # its rows are in the sequence's blocks from place 1 to below it
    head_chain: HeadChain | None = None  # until a window of it is verified
    next_chain: int = 0

    # Its credit, and the wait for a chain.
    until: int = 0
    max_window: int = 0
    patience: float = 0.0  # seconds
    patience_spent: bool = True  # the first token waits for no draft; later a wait that ran out is not repeated
    last_commit: float = 0.0
    ready_since: float = 0.0  # when the next round could have started
    lag: Lag = field(default_factory=Lag)  # from its commits to its next windows

    # Its place among the others.
    group: SequenceKey | None = None  # the sequence whose prompt this one and its siblings share
    last_step: int = 0  # number of the last step that it was in
    last_rows: int = 1  # in that step
    admitted: bool = False  # holds blocks (or may take them); false when new or preempted
    num_cached_ids: int = 0

    @property
    def wants_constraint(self) -> bool:
        """Whether its tokens have to follow anything beside the sampling parameters."""
        return self.open.sampling.structured_output is not None or self.open.reasoning is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is in no step until its constraint, or its masks, are there."""
        return self.waits_for is not None

    @property
    def committed(self) -> int:
        """How many tokens are committed, the prompt's included."""
        return len(self.sequence.tokens)

    @property
    def num_output(self) -> int:
        """Generated tokens, those of an earlier life included."""
        return len(self.sequence) - self.prompt_len

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be generated."""
        return self.tokens_left_at(self.committed)

    def tokens_left_at(self, length: int) -> int:
        """How many tokens might still be generated, were the committed length `length`."""
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
        """Whether windows are judged by rejection sampling, token by token or by blocks: then the target's own token
        does not follow one that is cut."""
        return self.open.acceptance.weighs and not self.greedy

    @property
    def by_block(self) -> bool:
        """Whether windows are judged by blocks."""
        return self.open.acceptance == AcceptanceRule.BLOCK and not self.greedy

    def window_key(self, start: int) -> RandomKey:
        """What the random numbers of a window from position `start` on are a function of. In a block, coins count also
        behind the token that is refused. The next window must not meet them again, so its start is in its counters."""
        return replace(self.random_key, draw=start) if self.by_block else self.random_key

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
    def wants_tokens(self) -> bool:
        """Whether one more token may be committed."""
        return self.until > len(self.sequence.tokens) and not self.finished and self.waits_for is None

    def due(self, now: float) -> float | None:
        """When the next round may start: now or earlier if it may run, later while it waits for a chain, None
        without credit."""
        if not self.wants_tokens:
            return None
        if self.chains.live() is not None or self.chains.draft_is_idle or self.patience_spent:
            return now
        return self.last_commit + self.patience


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What the engine can hold; fixed at start."""

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    num_blocks: int
    block_size: int = BLOCK_SIZE
    max_window: int = 128
    max_sequences: int = 256
    max_open_tokens: int = 0  # prompts and max_tokens of all that are open; 0: any number
    max_logprobs: int = MAX_LOGPROBS  # of a position; -1: as many as the vocabulary has ids
    untrusted_draft: bool = False  # weights are ignored: every drafted token is one-hot
    model_digest: str = ""
    max_media_bytes: int = 0  # of a sequence's pictures; 0: it takes none


def admit(
    message: Open,
    parent: TargetSequence | None,
    key: SequenceKey,
    sink: Sink,
    limits: TargetLimits,
    arrival: int,
    now: float,
    adapter: ServedAdapter | None = None,  # that it has
) -> TargetSequence:
    """Makes the sequence of an Open with its prompt. Raises an OutriderError that says why it is not taken."""
    info = None if adapter is None else adapter.info
    check_open(message, limits, info)
    sampler = _sampler(message, limits)
    digest = "" if info is None else info.digest
    sequence = CachedSequence([*message.prompt_ids, *message.output_ids], salt=message.salt, adapter=digest)
    return TargetSequence(
        key=key,
        open=message,
        prompt_len=len(message.prompt_ids),
        eos_ids=limits.eos_ids,
        sink=sink,
        arrival=arrival,
        seniority=(now + PRIORITY_STEP_S * max(-MOST_STEPS, min(message.priority, MOST_STEPS)), arrival),
        deadline=now + message.timeout_ms / 1000 if message.timeout_ms else math.inf,
        sequence=sequence,
        adapter=adapter,
        sampler=sampler,
        random_key=RandomKey(message.seed, message.completion),
        chains=ChainBuffer(sequence.tokens, limits.vocab_size),
        next_chain=message.first_chain,
        last_commit=now,
        ready_since=now,
        group=(parent.group or parent.key) if parent else key,
    )


def _sampler(message: Open, limits: TargetLimits) -> SequenceSampler:
    sampling, prompt_ids, output_ids = message.sampling, message.prompt_ids, message.output_ids
    try:
        return SequenceSampler(sampling, prompt_ids, output_ids, limits.eos_ids, limits.vocab_size)
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


def with_prompt(message: Open, parent: Open | None) -> Open:
    """An Open with its prompt, which a fork takes from its parent. Raises Unavailable where that is gone."""
    if message.fork_of is None:
        return message
    if parent is None:
        raise Unavailable("the sequence to fork is gone; open with the whole prompt", reason="PARENT_GONE")
    return replace(message, prompt_ids=parent.prompt_ids, media=message.media or parent.media, fork_of=None)


def check_open(message: Open, limits: TargetLimits, adapter: Adapter | None = None) -> None:
    """What holds for every engine; `adapter` is the one that the sequence has. Raises an OutriderError that says why
    it is not taken."""
    if message.adapter and adapter is None:
        raise NotFound(f"adapter: is {message.adapter!r:.130}; this target has none", reason=NO_ADAPTER)
    digest = limits.model_digest if adapter is None else adapter.digest
    if message.model_digest not in ("", digest):  # the gateway took this target for another
        text = f"the sequence is of model {message.model_digest[:12]}, this target serves {digest[:12]}"
        raise Unavailable(text, reason=OTHER_MODEL)
    validate_open(message, limits.vocab_size, limits.max_model_len, limits.max_logprobs)
    if message.media and (refusal := too_many_bytes(num_bytes(message.media), limits.max_media_bytes)) is not None:
        raise refusal
    validate_length(len(message.prompt_ids), message.sampling.max_tokens, limits.max_model_len, "open.sampling.")
    if len(message.output_ids) >= message.sampling.max_tokens:
        problem = f"has {len(message.output_ids)} entries; allowed: fewer than max_tokens"
        raise InvalidArgument.of([Violation("open.output_ids", problem)])
    if message.acceptance == AcceptanceRule.AUTO:
        raise InvalidArgument.of([Violation("acceptance", "is not set; allowed: rejection, coupled, block")])
    length = len(message.prompt_ids) + message.sampling.max_tokens
    room = limits.num_blocks * limits.block_size
    if length > room:
        raise ResourceExhausted(
            f"prompt and max_tokens are {length} tokens, the key-value cache holds {room}", reason="DOES_NOT_FIT"
        )
