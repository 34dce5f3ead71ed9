"""A draft engine and a target engine, each with its own model, and the loop between them by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draft.harness import Harness as DraftHarness
from exactness.scenario_kv import PrefixLedger, check_kv
from exactness.scenario_rounds import MAX_ROUNDS, fresh_draft_prefill, target_model
from target_harness import Harness
from torch import Tensor

from outrider.engine.batch import BatchEntry
from outrider.engine.kv_cache_manager import CachedSequence
from outrider.rpc.messages import Commit, Credit, Open, Piece


class Pair:
    """Real drafts, verified in rounds. `noise` sets how far the target is from its draft; 0: they are the same."""

    def __init__(self, k: int, noise: float, **target: Any) -> None:
        self.k = k
        self.draft = DraftHarness(num_blocks=128)
        self.target = Harness.of(target_model(noise=noise), **{"num_blocks": 128, **target})
        self.pieces: list[Piece] = []
        self.commits: list[Commit] = []
        self.num_draft_rows = 0
        # Not the harness's own watch: it stops at the first slot that is read and was never written.
        self.draft.method.proposer.runner.forward = self._draft_forward  # type: ignore[method-assign]

    def generate(
        self, requests: Sequence[Open], after_round: Callable[[], None] = lambda: None
    ) -> dict[int, list[int]]:
        """All of them to their ends, in lockstep; what each generated."""
        lengths = {r.sequence_id: len(r.prompt_ids) + len(r.output_ids) for r in requests}
        seen, waiting = dict.fromkeys(lengths, 0), set(lengths)  # for a piece
        news: list[Any] = [*requests]
        self.target.send(*requests)
        for _ in range(MAX_ROUNDS):
            if not lengths:
                return {r.sequence_id: [*r.output_ids, *self.target.output(r.sequence_id)] for r in requests}
            news += [Credit(number, lengths[number] + self.k, self.k) for number in sorted(waiting)]
            pieces = [event for event in self.draft.run(*news) if isinstance(event, Piece)]
            assert {piece.sequence_id for piece in pieces} == waiting, "a sequence was not drafted for"
            self.pieces += pieces
            credits = [Credit(number, lengths[number] + self.k + 1, self.k, 60_000) for number in sorted(waiting)]
            self.target.send(*pieces, *credits)
            self.target.run()
            news, waiting = [], set()
            for number in sorted(lengths):
                assert not self.target.failures(number), self.target.failures(number)
                fresh = self.target.commits(number)[seen[number] :]
                if not fresh:
                    continue  # no blocks for it in this round
                seen[number] += len(fresh)
                news += [replace(commit, logprobs=()) for commit in fresh]
                lengths[number] += sum(len(commit.ids) for commit in fresh)
                waiting.add(number)
                if fresh[-1].finish_reason is not None:
                    waiting.discard(number)
                    del lengths[number]
            assert news, "a round without a commit"
            self.commits += news
            self.draft.check()
            after_round()
        raise AssertionError("the sequences never ended")

    def _draft_forward(self, entries: Sequence[BatchEntry]) -> Tensor:
        self.num_draft_rows += sum(len(entry.token_ids) for entry in entries)
        return self.draft._forward(entries)

    def draft_tables(self) -> list[CachedSequence]:
        """What the draft holds open."""
        return [draft.sequence for draft in self.draft.engine.sequences.values()]

    @property
    def acceptance(self) -> float:
        """Of all drafted tokens that were verified."""
        return sum(c.num_accepted for c in self.commits) / max(1, sum(c.num_drafted for c in self.commits))


class DraftInspector:
    """Looks at a draft when it rests: keys and values of the committed tokens and of the chain, prefix cache."""

    def __init__(self, harness: DraftHarness) -> None:
        self.harness, self.fresh = harness, fresh_draft_prefill()
        self.runner = harness.method.proposer.runner
        self.ledger = PrefixLedger(harness.method.cache)
        self.num_checked = 0
        step = harness.engine.step

        def watched(now: float) -> float | None:
            wait = step(now)
            if wait != 0.0:
                self.check()
            return wait

        harness.engine.step = watched  # type: ignore[method-assign]

    def check(self) -> None:
        """After every proposal."""
        for draft in self.harness.engine.sequences.values():
            self.ledger.keys(draft.sequence.tokens[: draft.committed], draft.sequence.salt)
            check_kv(self.runner, draft.sequence, self.fresh)
            self.num_checked += 1
        self.ledger.check(self.runner, self.fresh)
