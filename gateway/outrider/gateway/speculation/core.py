"""The loop's sans-I/O core for one sequence: events in, effects out, the clock an argument.

The policy is expressed by credit and patience alone. Sequential: the draft gets credit for k tokens past the
committed length, the target waits for them with patience, and every commit renews both. Pipelined: the draft's credit
reaches a window and its own token further, so that it drafts during the verification, and it may hold branches for
other outcomes. Without a draft the target gets credit for a few plain tokens ahead; where the target itself drafts, for
some windows, and no patience. The core owns the journal
(prompt, committed tokens, seed, pieces under way), so a target that dies is replaced by an Open elsewhere. Its effects
are what it asks for, in order; the driver applies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from outrider.gateway.speculation.backends import Lost
from outrider.gateway.speculation.journal import agrees, pruned, size_of
from outrider.planner.policy import MethodShare, Policy, PolicyController, Round
from outrider.rpc.errors import OTHER_MODEL, WEIGHTS_RESTART, InvalidArgument
from outrider.rpc.messages import (
    Arithmetic,
    Commit,
    Credit,
    DraftEvent,
    DraftTokens,
    Failure,
    ModelInfo,
    Open,
    PromptLogprobs,
    TargetEvent,
    validate_piece,
)
from outrider.rpc.words.sampling_params import without_prompt_logprobs

RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 8, 13, 14  # gRPC's numbers; the core knows no grpc
DRAINING = "DRAINING"  # the reason of a service that refuses what is new
PARENT_GONE = "PARENT_GONE"  # and of a target that refuses a fork
NO_ADAPTER = "NO_ADAPTER"  # and of one that has not got the adapter, or not any more
MAX_PIECES = 1024  # of a draft's that may reach past what is committed: far above what its credit allows
MAX_PIECE_BYTES = 1 << 20  # half of what a frame may hold, twice what MAX_DRAFT_TOKENS with 512 weights each take
POSITION_BYTES = 1 << 16  # of its pieces by position that its credit reaches ahead: 512 weights take 4 KiB
SUSPECT_AFTER = 2  # targets in a row, lost without a commit between: the next one is to run the sequence alone


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Open the sequence at a target (again: with the tokens generated so far), then send the messages."""

    request: Open
    messages: tuple[DraftTokens | Credit, ...]
    like: Arithmetic | None = None  # of the target before
    refusal: Failure | None = None  # by the target just asked, which is full or lacks something: ask another one


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Open the sequence at a draft, then send the messages."""

    request: Open
    messages: tuple[Credit, ...]


@dataclass(slots=True)
class ToTarget:
    """Send to the target, in one frame."""

    messages: tuple[DraftTokens | Credit, ...]


@dataclass(slots=True)
class ToDraft:
    """Send to the draft, in one frame."""

    messages: tuple[Commit | Credit, ...]


@dataclass(slots=True)
class Emit:
    """Committed tokens for the client."""

    round: Round


@dataclass(frozen=True, slots=True)
class EmitPrompt:
    """Log probabilities of the prompt for the client."""

    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """The draft is not needed any more; `reason` is for the log, empty at the normal end. `may_return` says that
    another attempt makes sense later; where the draft has no room, in `retry_after_ms` by its own word."""

    reason: str = ""
    may_return: bool = False
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error."""

    failure: Failure


Effect = OpenTarget | OpenDraft | ToTarget | ToDraft | Emit | EmitPrompt | CloseDraft | Fail


@dataclass(slots=True)
class SpeculationCore:
    """One sequence's journal and credit. Every method returns the effects to apply, in order."""

    request: Open  # as first sent; sequence ids are the links'
    policy: Policy
    bounded_by_reader: bool = False  # stop strings: credit reaches at most one window past the text examined
    controller: PolicyController | None = None  # else the policy stays as it is
    draft_learns: bool = False  # it is told of every commit, also of those that it has no credit to draft for
    at_target: bool = False  # the target drafts for itself: its credit says how much, and there is no draft
    most_drafted: Callable[[], int] | None = None  # at the target, at present
    committed: list[int] = field(init=False)
    drafting: bool = field(init=False)
    finished: bool = field(init=False, default=False)
    has_run: bool = field(init=False, default=False)  # at a target, which may have been lost since
    prompt_len: int = field(init=False)
    _read: int = field(init=False)  # position up to which the client (and the stop strings) have seen tokens
    _target_until: int = field(init=False, default=0)
    _draft_until: int = field(init=False, default=0)
    _draft_credit: Credit | None = field(init=False, default=None)
    _target_credit: Credit | None = field(init=False, default=None)
    _journal: list[DraftTokens] = field(init=False, default_factory=list)
    _num_bytes: int = field(init=False, default=0)  # of its pieces, and of what came beside them since the last commit
    _most_ahead: int = field(init=False, default=0)  # positions that the draft has had credit for at once
    _parted: dict[int, int] = field(init=False, default_factory=dict)  # chains, and where they differ from `committed`
    _in_turn: bool = field(init=False, default=False)  # several methods draft: their pieces say which
    _last_chain: int = field(init=False, default=-1)
    _target_opens: int = field(init=False, default=0)
    _model: ModelInfo | None = field(init=False, default=None)  # of the target that committed last
    _opened_at: ModelInfo | None = field(init=False, default=None)  # of one that has the sequence since
    _near_ties: bool = field(init=False, default=False)
    _round_start: float = field(init=False, default=0.0)
    _draft_us: int = field(init=False, default=0)
    _num_rounds: int = field(init=False, default=0)
    _reader_holds: bool = field(init=False, default=False)  # a credit would reach further if the client had read more
    _parent_gone: bool = field(init=False, default=False)  # a target refused a fork: what it forks from had ended
    _draft_lost: bool = field(init=False, default=False)  # the draft failed, and is not back
    _prompt_told: int = field(init=False, default=0)  # positions whose log probabilities have come
    _started: float = field(init=False, default=0.0)
    _now: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.committed = [*self.request.prompt_ids, *self.request.output_ids]
        self.prompt_len = len(self.request.prompt_ids)
        self.drafting = self.policy.num_draft_tokens > 0
        self._read = len(self.committed)
        self._last_chain = self.request.first_chain - 1

    def start(self, now: float) -> list[Effect]:
        """Opens and credits both sides at the same time."""
        if self.controller is not None:
            self.policy = self.controller.policy
            self.drafting = self.policy.num_draft_tokens > 0
        self._round_start = self._started = self._now = now
        effects: list[Effect] = []
        if (self.drafting and not self.at_target) or self.draft_learns:
            effects.append(self._open_draft())
        effects.append(self._open_target())
        return effects

    def on_target_open(self, model: ModelInfo) -> None:
        """A target has been asked to take the sequence."""
        self._opened_at = model

    def on_target(self, event: TargetEvent | Lost, now: float) -> list[Effect]:
        """A commit extends the sequence and renews both credits; a lost target is replaced."""
        if self.finished:
            return []
        self._now = now
        match event:
            case Commit():
                return self._on_commit(event)
            case PromptLogprobs():
                return self._on_prompt(event)
            case Failure():
                return self._on_target_failure(event)
            case Lost():
                if event.unheard:  # a broken network, rather than an end by what the sequence holds
                    self._target_opens -= 1
                return self._on_target_failure(Failure(0, UNAVAILABLE, f"target lost: {event.reason}", "TARGET_LOST"))
            case _:
                return []

    def on_draft(self, event: DraftEvent | Lost) -> list[Effect]:
        """Pieces are relayed; a draft that fails means plain decoding."""
        if self.finished or not (self.drafting or self._is_heard):
            return []
        match event:
            case DraftTokens() if not self.drafting:
                return []
            case DraftTokens():
                try:
                    validate_piece(event)
                except InvalidArgument as error:  # the target would end the request for it
                    return self.stop_drafting(str(error))
                self._last_chain = max(self._last_chain, event.chain)
                if event.position > self._draft_until:
                    return []  # no credit reaches there: it would lie in the journal for ever
                self._note_draft(len(event.ids), event.draft_us)
                if len(self._journal) >= MAX_PIECES:
                    return self.stop_drafting(f"{MAX_PIECES} pieces of it wait for a verification")
                if (excess := self._excess(event)) is not None:
                    return self.stop_drafting(excess)
                if event.ids:
                    if not agrees(event, self.committed, self._parted):
                        return []  # the target has buried its chain, and another one could not tell
                    self._journal.append(event)
                    self._in_turn = self._in_turn or bool(event.method)
                return [ToTarget((event, *self._due_credit()))]
            case Failure():
                may_return, retry_after_ms = event.is_full or event.code == UNAVAILABLE, event.retry_after_ms
                return self.stop_drafting(event.message, may_return, retry_after_ms)
            case Lost(moved=True):
                return [CloseDraft(), self._open_draft()]
            case Lost():
                return self.stop_drafting(event.reason, may_return=True)
            case _:
                return []

    def _excess(self, piece: DraftTokens) -> str | None:
        """Counts a piece's bytes; why they are too many for the wire, or for all that waits, if they are."""
        size, most = size_of(piece), self._most_ahead * POSITION_BYTES
        self._num_bytes += size
        if size > MAX_PIECE_BYTES:
            return f"a piece of it has {size} bytes; allowed: at most {MAX_PIECE_BYTES}"
        if self._num_bytes > most:
            return f"{self._num_bytes} bytes of it wait for a verification; allowed: at most {most}"
        return None

    def stop_drafting(self, reason: str, may_return: bool = False, retry_after_ms: int = 0) -> list[Effect]:
        """Goes on without a draft: no patience, plain tokens ahead."""
        if not (self.drafting or self._is_heard):
            return []
        self._draft_lost = True
        self.drafting = False
        return [CloseDraft(reason, may_return, retry_after_ms), *self._credit_target()]

    def resume_drafting(self) -> list[Effect]:
        """A draft is there again: it gets the sequence as it stands, with chain numbers that were never used."""
        is_heard, wanted = self._is_heard, self.policy.num_draft_tokens > 0
        self._draft_lost = False
        if self.drafting or self.finished or not (wanted or (self.draft_learns and not is_heard)):
            return []
        self.drafting = wanted
        if self.at_target:
            return self._credit_target()
        opened = ToDraft(self._renewed_draft_credit()) if is_heard else self._open_draft()
        return [opened, *self._credit_target()]

    def retry_target(self, now: float) -> list[Effect]:
        """No target could take the sequence when it was to be opened again; this attempt counts as the same one."""
        if self.finished:
            return []
        self._now = now
        self._target_opens -= 1
        return [self._open_target()]

    def give_up(self, failure: Failure) -> list[Effect]:
        """Ends the request with an error."""
        if self.finished:
            return []
        self.finished = True
        return [CloseDraft(), Fail(failure)]

    def on_read(self, position: int, now: float) -> list[Effect]:
        """The client has taken (and the stop strings were looked for in) every token below `position`."""
        self._read = max(self._read, position)
        if self.finished or not self._reader_holds:
            return []
        self._reader_holds = False
        stood_still = self._target_until <= len(self.committed)
        effects = [*self._credit_draft(()), *self._credit_target()]
        if stood_still and self._target_until > len(self.committed):
            self._round_start = now  # what the client took its time for is no part of the round
        return effects

    def _on_commit(self, commit: Commit) -> list[Effect]:
        if commit.position != len(self.committed):
            message = f"commit at {commit.position}, journal has {len(self.committed)} tokens"
            return self._on_target_failure(Failure(0, UNAVAILABLE, message, "OUT_OF_STEP"))
        effects: list[Effect] = []
        # A draft that is opened now gets the sequence as it stands.
        news = (commit,) if (self.drafting and not self.at_target) or self._is_heard else ()
        if commit.ids or commit.finish_reason is not None:
            self.committed.extend(commit.ids)
            self.has_run, self._target_opens = True, 1  # what failed before this progress does not count any more
            drafted_by = self._shares(commit) if self._in_turn else ()
            if self._journal:
                self._journal = pruned(self._journal, self.committed, self._parted)
            self._num_bytes = sum(map(size_of, self._journal))
            if commit.timings.draft_us:
                self._note_draft(commit.num_drafted, commit.timings.draft_us)
            closed = self._close_round(commit, drafted_by)
            effects = [*self._choose(closed), Emit(closed)]
        if commit.finish_reason is not None:
            self.finished = True
            last = [ToDraft(_slim(news))] if news and self.draft_learns else []
            return [*effects, *last, CloseDraft()]
        return [*self._credit_draft(news), *self._credit_target(), *effects]

    def _on_prompt(self, event: PromptLogprobs) -> list[Effect]:
        """A sequence that was opened again begins with the first slice again: what was told is cut off."""
        known = self._prompt_told - event.position
        self._prompt_told = max(self._prompt_told, event.position + len(event.logprobs))
        if known >= len(event.logprobs):
            return []
        return [EmitPrompt(replace(event, position=event.position + known, logprobs=event.logprobs[known:]))]

    def _choose(self, closed: Round) -> list[Effect]:
        """Lets the policy follow what the round showed. A draft that is not wanted any more is closed; one that is
        wanted again is opened, unless it was lost: then the driver tries that in its own time."""
        if self.controller is None or closed.commit.finish_reason is not None or closed.mode != self.policy.mode:
            return []  # nothing to choose; or the draft was lost, and the round says nothing of what was chosen
        if not self.controller.on_round(closed):
            return []
        self.policy = self.controller.policy
        wanted = self.policy.num_draft_tokens > 0
        if self.drafting and not wanted:
            self.drafting = False
            return [*self._silence_draft(), *self._credit_target()]
        return self.resume_drafting() if wanted and not self._draft_lost else []

    @property
    def _is_heard(self) -> bool:
        """Whether a draft has the sequence only to learn from it."""
        return self.draft_learns and not self.drafting and not self._draft_lost

    def _silence_draft(self) -> list[Effect]:
        """A draft is not wanted any more, or only to learn."""
        if self.at_target:
            return []
        if not self.draft_learns:
            return [CloseDraft()]
        self._draft_credit = Credit(0, self._draft_until, 0)
        return [ToDraft((self._draft_credit,))]

    def _note_draft(self, num_ids: int, draft_us: int) -> None:
        """What drafting so many tokens took."""
        self._draft_us += draft_us
        if self.controller is not None:
            self.controller.on_piece(num_ids, draft_us)

    def _has_moved(self) -> bool:
        """Whether another target, or this one on another stream, committed the round before. That may have been
        computed otherwise."""
        model, before = self._opened_at, self._model
        if model is None:
            return False
        self._model, self._opened_at = model, None
        if before is not None and (model.arithmetic != before.arithmetic or not model.batch_invariant):
            self._near_ties = True
        return before is not None

    def _shares(self, commit: Commit) -> tuple[MethodShare, ...]:
        """Which methods drafted what of the window: by the pieces that it came in."""
        shares: dict[str, MethodShare] = {}
        end, held = commit.position + commit.num_drafted, commit.position + commit.num_accepted
        for piece in self._journal:
            first, last = max(piece.position, commit.position), min(piece.position + len(piece.ids), end)
            if piece.chain == commit.chain and piece.method and first < last:
                _, num_drafted, num_accepted = shares.get(piece.method, MethodShare(piece.method, 0, 0))
                num_accepted += max(0, min(last, held) - first)
                shares[piece.method] = MethodShare(piece.method, num_drafted + last - first, num_accepted)
        return tuple(shares.values())

    def _close_round(self, commit: Commit, drafted_by: tuple[MethodShare, ...]) -> Round:
        closed = Round(
            index=self._num_rounds,
            commit=commit,
            num_draft_tokens=self.policy.num_draft_tokens if self.drafting else 0,
            mode=self.policy.mode if self.drafting else "off",
            chosen=self.controller is not None,
            inputs=self.controller.inputs() if self.controller is not None else {},
            started=self._round_start,
            ended=self._now,
            draft_us=self._draft_us if commit.num_drafted else 0,
            drafted_by=drafted_by,
            at_end=commit.position + commit.num_drafted + 1 >= self._last,
            moved=self._has_moved(),
            near_ties=self._near_ties,
        )
        self._num_rounds += 1
        self._round_start, self._draft_us = self._now, 0
        return closed

    def _on_target_failure(self, failure: Failure) -> list[Effect]:
        if failure.is_full:  # no attempt that failed: nothing was begun
            self._target_opens -= 1
            return [replace(self._open_target(), refusal=replace(failure, code=RESOURCE_EXHAUSTED))]
        if failure.reason == NO_ADAPTER:  # nor then; others may have it
            self._target_opens -= 1
            return [replace(self._open_target(), refusal=failure)]
        self.has_run |= failure.reason not in (DRAINING, OTHER_MODEL)
        if failure.reason == PARENT_GONE and not self._parent_gone:
            self._parent_gone, self._target_opens = True, self._target_opens - 1  # nor here; the next is no fork
        goes_on = failure.reason != WEIGHTS_RESTART  # else it is the request that may begin anew
        if goes_on and failure.code == UNAVAILABLE and self._target_opens < self.policy.max_target_opens:
            return [self._open_target()]
        if failure.reason == "TARGET_LOST" and self._target_opens > SUSPECT_AFTER:
            failure = replace(failure, code=INTERNAL)  # it may be what ends them: not to be tried again
        self.finished = True
        return [CloseDraft(), Fail(failure)]

    def _open_target(self) -> OpenTarget:
        """The journal holds all that another target needs: prompt, output and the pieces that reach past the
        committed length."""
        self._target_opens += 1
        self._target_credit = self._renewed_target_credit()
        like = None if self._model is None else self._model.arithmetic
        suspect, resumed = self._target_opens > SUSPECT_AFTER, bool(self.request.output_ids) and not self.has_run
        request = replace(self._open_request(), suspect=suspect, resumed=resumed, prediction=())
        return OpenTarget(request, (self._target_credit, *self._journal), like)

    def _open_draft(self) -> OpenDraft:
        self._draft_until, self._draft_credit = 0, None  # what is seen is the target's alone
        request = replace(self._open_request(), first_chain=self._last_chain + 1, media=())
        return OpenDraft(request, self._renewed_draft_credit() if self.drafting else ())

    def _open_request(self) -> Open:
        timeout_ms = self.request.timeout_ms
        if timeout_ms:
            timeout_ms = max(1, timeout_ms - round((self._now - self._started) * 1000))
        sampling = self.request.sampling
        if self._prompt_told >= self.prompt_len:  # they are asked for once
            sampling = without_prompt_logprobs(sampling)
        output_ids = tuple(self.committed[self.prompt_len :])
        return replace(self.request, output_ids=output_ids, timeout_ms=timeout_ms, sampling=sampling)

    def _within_reader(self, until: int, ahead: int) -> int:
        """A slow client is granted no credit; with stop strings at most one window past the text examined."""
        bound = self._read + (ahead if self.bounded_by_reader else self.policy.max_unread)
        if until <= bound:
            return until
        self._reader_holds = True
        return bound

    def _renewed_target_credit(self) -> Credit:
        """With drafts for four windows: slow links cut none short, and the credit can share the next piece's frame."""
        k = self._window if self.drafting else 0
        ahead = 4 * (k + 1) if self.drafting else self.policy.plain_ahead
        if self._decodes_meanwhile:
            ahead = max(ahead, self.policy.plain_ahead)
        until = self._within_reader(len(self.committed) + ahead, k + 1 if self.drafting else ahead)
        self._target_until = max(self._target_until, until)
        patience_ms = self.policy.patience_ms if self.drafting and not self.at_target else 0
        return Credit(0, self._target_until, k, patience_ms)

    @property
    def _decodes_meanwhile(self) -> bool:
        """Whether the target decodes plain tokens until a chain is there: no piece may come to bring credit along."""
        return self.drafting and not self.at_target and not self.policy.patience_ms

    @property
    def _window(self) -> int:
        """Drafted tokens of a verification."""
        k = self.policy.num_draft_tokens
        return k if self.most_drafted is None else min(k, self.most_drafted())

    def _due_credit(self) -> tuple[Credit, ...]:
        """The target's credit, if it is not what the target has."""
        credit = self._renewed_target_credit()
        if credit == self._target_credit:
            return ()
        self._target_credit = credit
        return (credit,)

    def _credit_target(self) -> list[Effect]:
        """Renews the target's credit; not while it has a whole window's and the next piece can bring it along, or two
        and drafts for itself, or half of what it may have of plain tokens."""
        k, has = (self._window if self.drafting else 0), self._target_credit
        enough = 2 * k + 1 if self.drafting and self.at_target else k
        if not self.drafting or self._decodes_meanwhile:
            enough = max(enough, self.policy.plain_ahead // 2)
        if has is not None and has.max_window == k and has.until - len(self.committed) > enough:
            return []
        credit = self._due_credit()
        return [ToTarget(credit)] if credit else []

    def _renewed_draft_credit(self) -> tuple[Credit, ...]:
        k = self.policy.num_draft_tokens
        ahead = k + self.policy.windows_ahead * (k + 1)  # after a whole window comes the target's own token
        self._most_ahead = max(self._most_ahead, ahead)
        until = self._within_reader(min(len(self.committed) + ahead, self._last), ahead + 1)
        self._draft_until = max(self._draft_until, until)
        credit = Credit(0, self._draft_until, k, max_branches=self.policy.max_branches)
        if credit == self._draft_credit:
            return ()
        self._draft_credit = credit
        return (credit,)

    @property
    def _last(self) -> int:
        """Nothing past it can be committed."""
        return self.prompt_len + self.request.sampling.max_tokens

    def _credit_draft(self, news: tuple[Commit, ...]) -> list[Effect]:
        """A commit and the credit that follows from it travel in one frame."""
        if self.at_target or not (self.drafting or self._is_heard):
            return []
        credit = self._renewed_draft_credit() if self.drafting else ()
        return [ToDraft((*_slim(news), *credit))] if news or credit else []


def _slim(commits: tuple[Commit, ...]) -> tuple[Commit, ...]:
    """Without log probabilities, for which a draft has no use. A commit without any goes on as it came."""
    return tuple([replace(found, logprobs=()) if found.logprobs else found for found in commits])
