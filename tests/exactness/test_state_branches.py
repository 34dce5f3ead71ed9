"""The draft's state while it holds branches: the keys and values of the chain and of every branch are those of a fresh
prefill of their tokens, whichever of them the committed tokens choose, and no block is published that they might not
choose."""

from __future__ import annotations

import random

import pytest
from conftest import SEED
from draft.harness import GREEDY, SAMPLED, STREAM, Harness, commit, credit, new_open
from exactness.scenario_kv import PrefixLedger, check_kv, seen
from exactness.scenario_rounds import fresh_draft_prefill, prompt_of

from outrider.draft_service.scheduler import Grower
from outrider.draft_service.sequence import DraftSequence
from outrider.engine.kv_cache_manager import SequenceCache
from outrider.rpc.sampling_params import AcceptanceRule

K, BRANCHES, END = 3, 4, 90
SAMPLING = {"greedy": (GREEDY, AcceptanceRule.REJECTION), "coupled": (SAMPLED, AcceptanceRule.COUPLED)}


def blocks_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that parts in the middle of a block gets an empty one."""
    init = Grower.__init__
    monkeypatch.setattr(Grower, "__init__", lambda self, cache, _: init(self, cache, lambda pairs: None))


def all_that_is_adopted_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a branch become findable at once, the drafted tokens behind its guess included."""
    adopt = DraftSequence._adopt

    def wrong(self: DraftSequence, branch: object, cache: SequenceCache) -> None:
        adopt(self, branch, cache)  # type: ignore[arg-type]
        cache.publish(self.sequence, len(self.sequence))

    monkeypatch.setattr(DraftSequence, "_adopt", wrong)


@pytest.mark.parametrize("bug", [None, blocks_are_not_copied, all_that_is_adopted_is_published])
@pytest.mark.parametrize("name", SAMPLING)
def test_keys_and_values_of_branches(name: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if callable(bug):
        bug(monkeypatch)
    sampling, acceptance = SAMPLING[name]
    with seen(bug):
        assert min(rounds(Harness(num_blocks=128), sampling, acceptance)) > 3


def rounds(harness: Harness, sampling: object, acceptance: AcceptanceRule) -> tuple[int, int, int]:
    """Verifications of every outcome by hand: how often the chain went on, a branch took over, and neither."""
    prompt, rng, outcomes = list(prompt_of(5, 29)), random.Random(SEED), [0, 0, 0]
    ledger, runner = PrefixLedger(harness.method.cache), harness.method.proposer.runner
    request = new_open(1, prompt, sampling, acceptance=acceptance, seed=1)  # type: ignore[arg-type]
    tokens = list(prompt)
    harness.run(request, credit(1, len(tokens) + 2 * (K + 1), K, BRANCHES))
    while len(tokens) < END:
        draft = harness.engine.sequences[STREAM, 1]
        ledger.keys(tokens)
        for line in (draft.sequence, *(branch.sequence for branch in draft.branches)):
            check_kv(runner, line, fresh_draft_prefill())
        ledger.check(runner, fresh_draft_prefill())
        start, outcome = len(tokens), rng.choice([0, 1, 2] if draft.branches else [0, 2])
        if outcome == 1:
            branch = rng.choice(draft.branches)
            new = branch.sequence.tokens[start : branch.position + 1]
        else:
            new = draft.sequence.tokens[start : start + rng.randint(1, K + 1)]
            if outcome == 2:
                new = [*new[:-1], rng.randrange(3, 90)]
        outcomes[outcome] += 1
        tokens += new
        told = commit(1, start, *new, chain=draft.chain, num_drafted=K, num_accepted=min(len(new) - 1, K))
        harness.run(told, credit(1, len(tokens) + 2 * (K + 1), K, BRANCHES))
        harness.check()
    return outcomes[0], outcomes[1], outcomes[2]
