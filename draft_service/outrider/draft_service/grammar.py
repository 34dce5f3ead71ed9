"""Drafting within a grammar: what it forbids is not drafted, since the target would refuse it.

Only acceptance hangs on it. So a grammar is compiled beside the device's thread, and until that is done, or where it
cannot be (another vocabulary, no tokenizer, too complex, a text that it does not fit), tokens are drafted without. So
are those from a place on where a mask took long, since all that draft on the device wait for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from outrider.engine.grammar import GrammarCompiler, GrammarError, GrammarSpec, Matcher
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
        self._read = tokenizer, vocab_size, tuple(eos_ids)
        self._compiler: GrammarCompiler | None = None  # belongs to the thread
        self._thread = ThreadPoolExecutor(1, "grammars")

    def open(self, request: Open) -> DraftGrammar | None:
        """A request's, which is being compiled; None where it has none."""
        spec = spec_of(request)
        return None if spec is None else DraftGrammar(self._thread.submit(self._compile, spec, request.output_ids))

    def close(self) -> None:
        """Ends thread and processes."""
        self._thread.shutdown(cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _compile(self, spec: GrammarSpec, output_ids: Sequence[int]) -> Matcher:
        if self._compiler is None:
            tokenizer, vocab_size, eos_ids = self._read
            self._compiler = GrammarCompiler(tokenizer.read_bytes(), vocab_size, eos_ids)
        matcher = self._compiler.compile(spec).matcher(output_ids)
        matcher.try_mask()
        return matcher


class DraftGrammar:
    """Of one sequence: a matcher behind the committed tokens, once there is one. See DraftMasks."""

    def __init__(self, compiling: Future[Matcher]) -> None:
        self._compiling: Future[Matcher] | None = compiling
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
        """Those of `ids` that may follow `drafted`, up to the first one that may not."""
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
