"""Sequential rounds of many sequences at a target, by hand: propose, verify, look."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from draft.harness import tiny_model as tiny_draft
from exactness.scenario_kv import FreshPrefill, PrefixLedger, check_kv
from target_harness import VOCAB, DraftFn, Harness
from tiny import tiny_config, tiny_hf_model, tiny_state

from outrider.engine.loader import LoadedModel, build_decoder
from outrider.rpc.messages import Commit, Credit, Open, Piece
from outrider.target_service.sequence import TargetSequence

MAX_ROUNDS = 400


@cache
def target_model(family: str = "llama", batch_invariant: bool = True, noise: float = 0.0) -> LoadedModel:
    """A tiny target. It is the draft of the tests, but for noise on its weights where a draft has to err."""
    state = tiny_state(tiny_hf_model(family))
    generator = torch.Generator().manual_seed(1)
    state = {name: w + noise * torch.randn(w.shape, generator=generator) for name, w in state.items()}
    return build_decoder(tiny_config(family), state, batch_invariant=batch_invariant)


@cache
def fresh_prefill(family: str = "llama", noise: float = 0.0) -> FreshPrefill:
    """Of the target model in batch-invariant mode; shared, because prefills are what these tests spend time on."""
    return FreshPrefill(target_model(family, noise=noise).model)


@cache
def fresh_draft_prefill() -> FreshPrefill:
    """Of the draft model."""
    return FreshPrefill(tiny_draft().model)


def prompt_of(seed: int, length: int = 20) -> tuple[int, ...]:
    """Random tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


class Inspector:
    """Looks at a target between two steps: tokens, lengths, keys and values, prefix cache."""

    def __init__(self, harness: Harness, fresh: FreshPrefill, requests: Sequence[Open], exact: bool = True) -> None:
        self.harness, self.fresh, self.exact = harness, fresh, exact
        self.runner = harness.engine._runner
        self.requests = {request.sequence_id: request for request in requests}
        self.ledger = PrefixLedger(harness.engine.cache)
        self.num_checked = self.num_preempted = 0
        step, preempt = harness.engine.step, harness.engine.scheduler._preempt

        def watched(now: float) -> float | None:
            wait = step(now)
            self.check()
            return wait

        def counted(target: TargetSequence) -> None:
            self.num_preempted += bool(target.sequence.block_table)
            preempt(target)

        harness.engine.step = watched  # type: ignore[method-assign]
        harness.engine.scheduler._preempt = counted  # type: ignore[method-assign]

    def committed(self, sequence_id: int) -> list[int]:
        """By what the target said, not by what it holds."""
        request = self.requests[sequence_id]
        return [*request.prompt_ids, *request.output_ids, *self.harness.output(sequence_id)]

    def check(self) -> None:
        """After every step."""
        for request in self.requests.values():
            failures = self.harness.failures(request.sequence_id)
            assert not failures, failures
            self.ledger.keys(self.committed(request.sequence_id), request.salt)
        for target in self.harness.engine.scheduler.sequences.values():
            self._check_sequence(target)
        if self.exact:
            self.ledger.check(self.runner, self.fresh)

    def _check_sequence(self, target: TargetSequence) -> None:
        sequence = target.sequence
        assert sequence.tokens == self.committed(target.open.sequence_id), "tokens are held that were not committed"
        assert target.sampler.num_output == target.num_output, "the sampler counts other tokens"
        assert target.chains._committed == len(sequence), "the chains stand elsewhere"
        check_kv(self.runner, sequence, self.fresh, self.exact)
        if self.exact and sequence.block_table:
            self.ledger.check_complete(sequence)
        self.num_checked += 1


def run_rounds(
    harness: Harness,
    requests: Sequence[Open],
    drafts: Mapping[int, DraftFn],
    k: int,
    after_round: Callable[[list[Commit]], None] = lambda _: None,
) -> dict[int, list[int]]:
    """Every sequence that is not at its end gets a piece and credit for it; then the target runs till it rests. Returns
    what each generated."""
    tokens = {r.sequence_id: [*r.prompt_ids, *r.output_ids] for r in requests}
    seen, alive, waiting = dict.fromkeys(tokens, 0), set(tokens), set(tokens)  # for a piece
    harness.send(*requests)
    for chain in range(MAX_ROUNDS):
        if not alive:
            return {r.sequence_id: tokens[r.sequence_id][len(r.prompt_ids) :] for r in requests}
        for number in sorted(waiting):
            ids, weights = drafts[number](tokens[number], k)
            length = len(tokens[number])
            piece = Piece(number, chain, length, tuple(ids), tuple(weights))
            harness.send(piece, Credit(number, length + k + 1, k, 60_000))
        harness.run()
        commits, waiting = [], set()
        for number in sorted(alive):
            assert not harness.failures(number), harness.failures(number)
            fresh = harness.commits(number)[seen[number] :]
            seen[number] += len(fresh)
            commits += fresh
            tokens[number] += [token for commit in fresh for token in commit.ids]
            if fresh and fresh[-1].finish_reason is not None:
                alive.discard(number)
            elif fresh:  # else there were no blocks for it in this round
                waiting.add(number)
        assert commits, "a round without a commit"
        after_round(commits)
    raise AssertionError("the sequences never ended")


def forced(reference: Sequence[int], prompt_len: int, accepted: Callable[[int], int]) -> DraftFn:
    """Drafts of which exactly `accepted(round)` tokens are the reference's, then one that is not."""
    rounds = iter(range(10_000))

    def draft(tokens: list[int], k: int) -> tuple[list[int], list[Any]]:
        done, keep = len(tokens) - prompt_len, accepted(next(rounds))
        right = [*reference[done : done + k], *([0] * k)][:k]
        return [token if index < keep else (token + 1) % VOCAB for index, token in enumerate(right)], []

    return draft


def plain_outputs(model: LoadedModel, requests: Sequence[Open]) -> dict[int, list[int]]:
    """Each decoded alone, token by token."""
    return {r.sequence_id: Harness.of(model).decode_plain(r.sequence_id, r) for r in requests}
