"""Drafting within a grammar: what it forbids is not drafted, since the target would refuse it.

Only acceptance hangs on it. So a grammar is compiled beside the device's thread, and until that is done, or where it
cannot be (another vocabulary, no tokenizer, too complex, a text that it does not fit), tokens are drafted without. So
are those from a place on where a mask took long, since all that draft on the device wait for it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from torch import Tensor

from outrider.engine.grammar.compiler import CompiledGrammar, GrammarCompiler, Matcher
from outrider.engine.grammar.lark import GrammarError
from outrider.engine.grammar.queue import GrammarQueue, GrammarQueueFull
from outrider.engine.grammar.source import GrammarSpec
from outrider.rpc.messages import Open

log = logging.getLogger(__name__)


def spec_of(request: Open) -> GrammarSpec | None:
    """What a request's output must be, and what comes before it; None: anything."""
    constraint, reasoning = request.sampling.structured_output, request.reasoning
    if constraint is None and (reasoning is None or not reasoning.max_tokens):
        return None
    return GrammarSpec.of(constraint, reasoning)


class DraftGrammars:
    """The grammars of one model's tokenizer. From the device's thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer` is a tokenizer.json, read with the first grammar; `vocab_size` is the width of the logits."""

        def make() -> GrammarCompiler:
            return GrammarCompiler(tokenizer.read_bytes(), vocab_size, eos_ids)

        self._queue = GrammarQueue(make, num_threads=1)

    def open(self, request: Open) -> DraftGrammar | None:
        """A request's, which is being compiled; None where it has none, or too many wait."""
        spec = spec_of(request)
        if spec is None:
            return None
        try:
            return DraftGrammar(self._queue.submit(spec, partial(_match, request.output_ids)))
        except GrammarQueueFull as full:
            log.info("drafts of a sequence leave its grammar alone: %s", full)
            return None

    def close(self) -> None:
        """Ends threads and processes."""
        self._queue.close(wait=True)


def _match(output_ids: Sequence[int], compiled: CompiledGrammar, seconds: float) -> Matcher:
    matcher = compiled.matcher(output_ids)
    matcher.try_mask()
    return matcher


class DraftGrammar:
    """The grammar of one sequence: a matcher behind the committed tokens, once there is one. See DraftMasks."""

    def __init__(self, compiling: Future[Matcher]) -> None:
        self._compiling: Future[Matcher] | None = compiling
        weakref.finalize(self, compiling.cancel)  # who is gone needs none
        self._matcher: Matcher | None = None
        self._missing: list[int] = []  # committed, and not the matcher's yet

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes committed tokens."""
        if self._compiling is not None or self._matcher is not None:
            self._missing += token_ids

    def masks(self, drafted: Sequence[int], first: int) -> Tensor | None:  # [rows, ceil(vocab / 32)] int32
        """What may follow the prefixes of `drafted` from length `first` on; None: all may."""
        matcher = self._ready()
        if matcher is None or matcher.has_slow_masks(drafted):
            return None
        try:
            return matcher.masks(drafted, first)
        except GrammarError as error:
            self._give_up(error)
            return None

    def cut(self, drafted: Sequence[int], ids: Sequence[int]) -> list[int]:
        """The leading tokens of `ids` that may follow `drafted`, up to the first one that may not."""
        matcher = self._ready()
        if matcher is None:
            return list(ids)
        try:
            return list(ids[: max(0, matcher.fits([*drafted, *ids]) - len(drafted))])
        except GrammarError as error:
            self._give_up(error)
            return list(ids)

    def _ready(self) -> Matcher | None:
        """The matcher behind all that is committed."""
        try:
            if self._compiling is not None and self._compiling.done():
                self._matcher, self._compiling = self._compiling.result(), None
            if self._matcher is not None and self._missing:
                missing, self._missing = self._missing, []
                self._matcher.advance(missing)
        except (GrammarError, OSError) as error:
            self._give_up(error)
        return self._matcher

    def _give_up(self, error: Exception) -> None:
        log.info("drafts of a sequence leave its grammar alone: %s", error)
        self._matcher = self._compiling = None
