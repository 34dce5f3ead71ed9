"""Constraints on the text: which tokens may follow, as bit masks, by llguidance.

A grammar is one more mask before the law, so it changes what is drawn from, never how a drafted token is judged.
`GrammarCompiler` compiles a constraint once, a `Matcher` follows one sequence: `advance` takes what was committed, and
`masks` walks along drafted tokens and back. Reasoning, which comes before the constraint, is tracked by its ids."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from llguidance import LLMatcher
from torch import Tensor

from outrider.engine.grammar.lark import GrammarError, first_line
from outrider.engine.grammar.masks import ALL_BITS, clear_bit, num_words, set_bit
from outrider.engine.grammar.source import (
    GrammarSpec,
    new_matcher,
    new_tokenizer,
    source_of,
)
from outrider.engine.grammar.trial import Trials
from outrider.rpc.words.structured import Reasoning

SLOW_S = 0.005  # of a processor's time
MAX_CACHED = 128  # grammars, and as many that were refused


class GrammarCompiler:
    """Constraints over one tokenizer; thread-safe. `eos_ids` are all that end a text where the grammar may end."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Raises GrammarError for a tokenizer that does not say its tokens' bytes."""
        layout = tokenizer_json.decode()
        self.vocab_size = vocab_size
        self.eos_ids = tuple(token for token in eos_ids if 0 <= token < vocab_size)
        self._tokenizer = new_tokenizer(layout, vocab_size, self.eos_ids)
        added = json.loads(layout).get("added_tokens") or []
        self._special_ids = {token["content"]: token["id"] for token in added if token.get("special")}
        self._trials = Trials(layout, vocab_size, self.eos_ids)
        self._lock = threading.Lock()
        self._cached: OrderedDict[GrammarSpec, LLMatcher | GrammarError] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Takes milliseconds, or 0.7 s where it is given up; to be called where that holds up nobody. Raises
        GrammarError, and TrialFailed where another try may do."""
        if spec.reasoning is not None and not spec.reasoning.end_ids:
            raise GrammarError("reasoning.end_ids is empty; allowed: 1 or more ids")
        if spec.kind is None:
            return CompiledGrammar(self, None, spec.reasoning)
        content = replace(spec, reasoning=None)
        with self._lock:
            found = self._cached.get(content)
            if found is not None:
                self._cached.move_to_end(content)
        if found is None:
            found = self._compile(content)
            with self._lock:
                self._cached[content] = found
                while len(self._cached) > MAX_CACHED:
                    self._cached.popitem(last=False)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return CompiledGrammar(self, found, spec.reasoning)

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether `compile` has its answer at once."""
        with self._lock:
            return spec.kind is None or replace(spec, reasoning=None) in self._cached

    def close(self) -> None:
        """Ends the processes that try constraints out."""
        self._trials.close()

    def _compile(self, spec: GrammarSpec) -> LLMatcher | GrammarError:
        try:
            source = source_of(spec, self._special_ids)
            self._trials.check(source)
            return new_matcher(self._tokenizer, source)
        except GrammarError as error:
            return error


class CompiledGrammar:
    """A constraint, shared by the sequences that have it."""

    def __init__(self, compiler: GrammarCompiler, prototype: LLMatcher | None, reasoning: Reasoning | None) -> None:
        self.compiler = compiler
        self._prototype = prototype
        self._reasoning = reasoning

    def matcher(self, output_ids: Sequence[int] = ()) -> Matcher:
        """One behind these tokens. Raises GrammarError where they do not fit."""
        fresh = None if self._prototype is None else self._prototype.deep_copy()
        matcher = Matcher(self.compiler, fresh, self._reasoning)
        matcher.advance(output_ids)
        return matcher


class Phase(Enum):
    """Which part of a text comes next."""

    STARTING = "it may begin with reasoning"
    REASONING = "inside reasoning"
    TEXT = "the constraint applies"


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a text is; the library's matcher has the rest."""

    phase: Phase
    num_matched: int = 0  # of start_ids, or of end_ids
    num_reasoned: int = 0
    num_consumed: int = 0  # tokens that the library's matcher holds
    ended: bool = False  # by an end of sequence


class Matcher:
    """Follows one sequence. Used from one thread at a time."""

    def __init__(self, compiler: GrammarCompiler, matcher: LLMatcher | None, reasoning: Reasoning | None) -> None:
        self._compiler = compiler
        self._matcher = matcher
        self._reasoning = reasoning
        self.is_slow = False  # what was forced took long to find: more than a device's thread has time for
        self._num_taken = 0  # committed tokens
        self._slow_from: int | None = None  # so many tokens, behind which a mask took as long
        self._place = _Place(Phase.TEXT)
        if reasoning is not None and (reasoning.open or reasoning.start_ids):
            self._place = _Place(Phase.REASONING if reasoning.open else Phase.STARTING)

    @property
    def constrains(self) -> bool:
        """Whether some token is forbidden, here or later."""
        if self._matcher is not None:
            return True
        return self._place.phase is not Phase.TEXT and self._reasoning is not None and self._reasoning.max_tokens > 0

    def advance(self, ids: Sequence[int]) -> None:
        """Takes committed tokens. Raises GrammarError where one does not fit; the matcher then serves no more."""
        for index, token in enumerate(ids):
            place = self._after(self._place, token)
            if place is None:
                raise GrammarError(f"token {token}, {index + 1} of {len(ids)}, does not fit the constraint")
            self._place, self._num_taken = place, self._num_taken + 1

    @property
    def is_text(self) -> bool:
        """Whether the text itself is constrained, here or later."""
        return self._matcher is not None

    def has_slow_masks(self, drafted: Sequence[int] = ()) -> bool:
        """Whether a mask behind `drafted`, or behind fewer tokens, took longer than a device's thread has time for. It
        is said of a place, not of the sequence: a draft that leaves its masks out there draws by weights from nothing
        that a token of that place, or of a later one, has decided, whatever of it is refused and drawn again."""
        return self._slow_from is not None and self._num_taken + len(drafted) >= self._slow_from

    def try_mask(self) -> None:
        """Finds out whether the next mask takes long; to be called where that holds up nobody. Raises GrammarError
        where the library gives up."""
        self.copy().masks(())  # makes what all that follow share
        self.masks(())

    def masks(
        self, drafted: Sequence[int], first: int = 0, out: Tensor | None = None
    ) -> Tensor:  # [rows, ceil(vocab / 32)] int32
        """What may follow the prefixes of `drafted` of length `first` and above; set bits are allowed. Rows behind a
        token that is forbidden, or behind the end, allow everything: nothing of them is kept. The state stays. `out`,
        on the host, is written where it is given. Raises GrammarError where the library gives up."""
        shape = len(drafted) - first + 1, num_words(self._compiler.vocab_size)
        masks = (torch.empty(shape, dtype=torch.int32) if out is None else out).fill_(ALL_BITS)
        started = time.thread_time()
        try:
            if first == 0 and self._is_plain_walk(drafted):
                self._write_walk(drafted, masks)
            else:
                self._write_masks(drafted, first, masks)
        finally:
            if time.thread_time() - started > SLOW_S * len(masks) and not self.has_slow_masks(drafted):
                self._slow_from = self._num_taken + len(drafted)  # all of them may have made it slow
        return masks

    def _write_masks(self, drafted: Sequence[int], first: int, masks: Tensor) -> None:  # [rows, words] int32
        before = place = self._place
        try:
            for length in range(len(drafted) + 1):
                if length:
                    after = self._after(place, drafted[length - 1])
                    if after is None or after.ended:
                        break
                    place = after
                if length >= first:
                    self._write_mask(place, masks[length - first])
        finally:
            self._back(place, before)

    def forced(self, limit: int, drafted: Sequence[int] = ()) -> list[int]:
        """Behind `drafted`, tokens, at most so many, of which the constraint's bytes leave no other: guesses at what
        follows, since other tokens may spell the same bytes. An end of sequence is none of them. The state stays.
        Raises GrammarError where the library gives up."""
        before = place = self._place
        try:
            for token in drafted:
                after = None if place.ended else self._after(place, token)
                if after is None:
                    return []
                place = after
            return self._forced_at(place, limit)
        finally:
            self._back(place, before)

    def _forced_at(self, place: _Place, limit: int) -> list[int]:
        reasoning = self._reasoning
        if place.phase is Phase.REASONING and reasoning is not None:
            return list(reasoning.end_ids[place.num_matched :][:limit]) if self._is_spent(place) else []
        if place.phase is Phase.STARTING or self._matcher is None or place.ended or self._matcher.is_stopped():
            return []
        return self._forced_ids()[:limit]

    def _forced_ids(self) -> list[int]:
        """All of them, which may be a whole text."""
        started = time.thread_time()
        forced: list[int] = [] if self._matcher is None else self._matcher.compute_ff_tokens()
        self.is_slow = self.is_slow or time.thread_time() - started > SLOW_S
        return forced

    def fits(self, ids: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other. The state stays."""
        before = place = self._place
        count = 0
        for token in ids:
            after = None if place.ended else self._after(place, token)
            if after is None:
                break
            place, count = after, count + 1
        self._back(place, before)
        return count

    def num_allowed(self, ids: Sequence[int]) -> int:
        """How many of these tokens masks allow, each behind those before it; behind an end all. Fewer than fit where
        bytes are forced: of their spellings a mask has one. The state stays. Raises GrammarError where the library
        gives up."""
        before = place = self._place
        count = 0
        try:
            for token in ids:
                if place.ended:
                    return len(ids)
                after = None if self._is_other_spelling(place, token) else self._after(place, token)
                if after is None:
                    break
                place, count = after, count + 1
        finally:
            self._back(place, before)
        return count

    def first_allowed(self, drafted: Sequence[int], candidates: Iterable[int]) -> int | None:
        """The first of the candidates that the mask behind `drafted` allows; where that has but one token for what is
        forced, that one, asked for or not. None: none of them, or something of `drafted` is forbidden, or behind the
        end. The state stays. Raises GrammarError where the library gives up."""
        before = place = self._place
        try:
            for token in drafted:
                after = None if place.ended else self._after(place, token)
                if after is None:
                    return None
                place = after
            if place.ended:
                return None
            if forced := self._forced_at(place, 1) if place.phase is Phase.TEXT else []:
                return forced[0]
            for token in candidates:
                after = None if self._is_other_spelling(place, token) else self._after(place, token)
                if after is not None:
                    self._back(after, place)
                    return token
            return None
        finally:
            self._back(place, before)

    def copy(self) -> Matcher:
        """Another in the same state."""
        matcher = None if self._matcher is None else self._matcher.deep_copy()
        other = Matcher(self._compiler, matcher, self._reasoning)
        other._place, other.is_slow = self._place, self.is_slow
        other._num_taken, other._slow_from = self._num_taken, self._slow_from
        return other

    def _after(self, place: _Place, token: int) -> _Place | None:
        """Behind one more token, which the library's matcher then holds, too; None: it does not fit."""
        reasoning = self._reasoning
        if place.phase is Phase.TEXT or reasoning is None:
            return self._after_text(place, token)
        if place.phase is Phase.REASONING:
            return self._after_reasoning(place, token, reasoning)
        if token == reasoning.start_ids[place.num_matched]:
            whole = place.num_matched + 1 == len(reasoning.start_ids)
            return _Place(Phase.REASONING) if whole else replace(place, num_matched=place.num_matched + 1)
        text: _Place | None = _Place(Phase.TEXT)  # what looked like a start is the text's beginning
        for one in (*reasoning.start_ids[: place.num_matched], token):
            before, text = text, None if text is None else self._after_text(text, one)
            if text is None and before is not None:
                self._back(before, place)
        return text

    def _after_text(self, place: _Place, token: int) -> _Place | None:
        if self._matcher is None:
            return place
        if place.ended:
            return None
        if token in self._compiler.eos_ids:
            ends = self._matcher.is_accepting() or self._matcher.is_stopped()
            return replace(place, ended=True) if ends and not self._matcher.is_error() else None
        if not 0 <= token < self._compiler.vocab_size or self._matcher.is_stopped():
            return None
        if self._matcher.try_consume_tokens([token]) != 1:
            self._require()
            return None
        return replace(place, num_consumed=place.num_consumed + 1)

    def _after_reasoning(self, place: _Place, token: int, reasoning: Reasoning) -> _Place | None:
        ends = reasoning.end_ids
        if self._matcher is not None and token in self._compiler.eos_ids:
            return None
        if self._is_spent(place) and token != ends[place.num_matched]:
            return None
        matched = (*ends[: place.num_matched], token)
        while matched and matched != ends[: len(matched)]:
            matched = matched[1:]
        if len(matched) == len(ends):
            return replace(place, phase=Phase.TEXT, num_matched=0)
        return replace(place, num_matched=len(matched), num_reasoned=place.num_reasoned + 1)

    def _is_other_spelling(self, place: _Place, token: int) -> bool:
        """Whether the text's next bytes are forced, and this is not the token that a mask has for them."""
        matcher, reasoning = self._matcher, self._reasoning
        if matcher is None or place.phase is Phase.REASONING:
            return False
        begun: Sequence[int] = ()
        if place.phase is Phase.STARTING and reasoning is not None:
            if token == reasoning.start_ids[place.num_matched]:
                return False
            begun = reasoning.start_ids[: place.num_matched]
        held = matcher.try_consume_tokens(list(begun)) if begun else 0
        forced = self._forced_ids() if held == len(begun) else []
        self._back(_Place(Phase.TEXT, num_consumed=held), _Place(Phase.TEXT))
        return bool(forced) and forced[0] != token

    def _is_spent(self, place: _Place) -> bool:
        """Whether reasoning has had its tokens."""
        bound = 0 if self._reasoning is None else self._reasoning.max_tokens
        return 0 < bound <= place.num_reasoned

    def _back(self, place: _Place, before: _Place) -> None:
        count = place.num_consumed - before.num_consumed
        if count and self._matcher is not None and not self._matcher.rollback(count):
            self._require()

    def _is_plain_walk(self, drafted: Sequence[int]) -> bool:
        """Whether the library's matcher alone says what may follow: inside the text, no end before the last row."""
        place, compiler = self._place, self._compiler
        if self._matcher is None or not drafted or place.phase is not Phase.TEXT or place.ended:
            return False
        return not self._matcher.is_stopped() and not any(
            token in compiler.eos_ids or not 0 <= token < compiler.vocab_size for token in drafted
        )

    def _write_walk(self, drafted: Sequence[int], masks: Tensor) -> None:  # [drafted + 1, words] int32, all bits set
        """All rows in one call: a thread that makes masks asks for Python's lock once, not twice a row. The device
        thread waits for that lock."""
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]  # its stub lacks it
                masks.data_ptr(), masks.stride(0) * masks.element_size(), list(drafted)
            )
            self._require()

    def _write_mask(self, place: _Place, row: Tensor) -> None:  # [words] int32, all bits set
        reasoning = self._reasoning
        if place.phase is Phase.REASONING and reasoning is not None:
            if self._is_spent(place):
                row.zero_()
                set_bit(row, reasoning.end_ids[place.num_matched])
            elif self._matcher is not None:  # what was asked for is still to come
                for token in self._compiler.eos_ids:
                    clear_bit(row, token)
        elif self._matcher is not None:
            begun = 0 if reasoning is None or place.phase is Phase.TEXT else place.num_matched
            held = self._matcher.try_consume_tokens(list(reasoning.start_ids[:begun])) if reasoning and begun else 0
            if held == begun:
                self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
            else:
                row.zero_()
            self._back(_Place(Phase.TEXT, num_consumed=held), _Place(Phase.TEXT))
            self._require()
            if reasoning is not None and place.phase is Phase.STARTING:
                set_bit(row, reasoning.start_ids[begun])

    def _require(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            raise GrammarError(f"the constraint is too complex here: {first_line(self._matcher.get_error())}")
