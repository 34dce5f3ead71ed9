"""The state behind the tokens: after every step keys and values are those of a fresh prefill of the committed tokens,
the prefix cache holds computed blocks of committed tokens, what is free is never read, and no random counter decides
two things.

The draft's state while it holds branches: the keys and values of the chain and of every branch are those of a fresh
prefill of their tokens, whichever of them the committed tokens choose, and no block is published that they might not
choose."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless.scenarios import (
    PURPOSE_OF,
    CounterLog,
    DraftInspector,
    FreshPrefill,
    Inspector,
    Pair,
    PrefixLedger,
    check_kv,
    forced,
    fresh_draft_prefill,
    fresh_prefill,
    plain_outputs,
    poison,
    prompt_of,
    run_rounds,
    target_model,
)
from support.engines import (
    BLOCK,
    COUPLED,
    GREEDY,
    SAMPLED,
    STREAM,
    DraftHarness,
    TargetHarness,
    commit,
    credit,
    new_open,
    opened,
    oracle,
)
from support.environment import SEED
from support.proofs import on_a_diagonal

from outrider.engine.quantized.rounding import Rounding
from outrider.kernels.random.reference import Purpose, as_int64, words
from outrider.rpc.messages import Open
from outrider.rpc.words.sampling_params import AcceptanceRule, TokenOrigin

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"temperature": 1.0},
    "coupled": {"temperature": 1.0, "acceptance": COUPLED},
    "block": {"temperature": 1.0, "acceptance": BLOCK},
}
ROOMS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few rows and blocks": {"max_rows": 12, "num_blocks": 11},  # prompts in chunks, sequences preempted
}
LENGTHS = (1, 15, 16, 17, 31, 33)


def requests_of(mode: str, max_tokens: int = 20) -> list[Open]:
    """Prompts of all lengths around a block's; the last two begin alike."""
    long = prompt_of(7, 40)
    prompts = [*(prompt_of(length, length) for length in LENGTHS), long, (*long[:36], *prompt_of(8, 5))]
    options = {"max_tokens": max_tokens, **MODES[mode]}
    return [opened(number, prompt, seed=number, **options) for number, prompt in enumerate(prompts)]


SHORT = [(1, "few rows and blocks"), (4, "roomy"), (7, "few rows and blocks")]
LONG = [pytest.param(k, room, marks=pytest.mark.slow) for k in range(1, 9) for room in ROOMS if (k, room) not in SHORT]


@pytest.mark.parametrize(("k", "room"), [*SHORT, *LONG])
@pytest.mark.parametrize("mode", MODES)
def test_keys_and_values_are_a_fresh_prefills_to_the_bit(mode: str, k: int, room: str) -> None:
    pair, requests = Pair(k, noise=0.01, **ROOMS[room]), requests_of(mode)
    target = Inspector(pair.target, fresh_prefill(noise=0.01), requests)
    draft = DraftInspector(pair.draft)
    pair.generate(requests[:-1])
    pair.generate(requests[-1:])
    assert room != "roomy" or pair.target.commits(requests[-1].sequence_id)[0].num_cached_ids == 32
    assert 0.05 < pair.acceptance < 1 and target.num_checked > 100 and draft.num_checked > 30
    assert (target.num_preempted > 0) == (room != "roomy")


@pytest.mark.parametrize(
    ("family", "rounding"), on_a_diagonal(["mistral", "qwen2", "qwen3", "llama"], [None, "int8", "int4"])
)
def test_keys_and_values_of_other_families(family: str, rounding: Rounding | None) -> None:
    """With a sliding window, biases and normalised keys; and of weights in few bits."""
    model, requests = target_model(family, rounding=rounding), requests_of("greedy", max_tokens=18)
    harness, reference = TargetHarness.of(model), plain_outputs(model, requests)
    inspector = Inspector(harness, fresh_prefill(family, rounding=rounding), requests)
    drafts = {
        r.sequence_id: oracle(reference[r.sequence_id], len(r.prompt_ids), random.Random(r.sequence_id))
        for r in requests
    }
    assert run_rounds(harness, requests, drafts, 4) == reference and inspector.num_checked > 50


def test_keys_and_values_in_ordinary_mode_but_for_rounding() -> None:
    model, requests = target_model(batch_invariant=False), requests_of("greedy")
    reference = plain_outputs(model, requests)
    harness = TargetHarness.of(model, max_rows=24)
    inspector = Inspector(harness, FreshPrefill(model.model), requests, exact=False)
    drafts = {r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda n: n % 5) for r in requests}
    run_rounds(harness, requests, drafts, 4)
    assert inspector.num_checked > 100


@pytest.mark.parametrize("origin", [TokenOrigin.PLAIN, TokenOrigin.RECOVERED, TokenOrigin.BONUS])
def test_a_block_is_findable_only_once_its_last_token_is_computed(origin: TokenOrigin) -> None:
    """The target's own token in a block's last slot is committed, and computed a step later."""
    model, prompt = target_model(), prompt_of(3, 12)
    request = opened(1, prompt, max_tokens=12)
    reference = plain_outputs(model, [request])[1]
    harness = TargetHarness.of(model)
    inspector = Inspector(harness, fresh_prefill(), [request])
    (key,) = inspector.ledger.keys([*prompt, *reference[:4]])
    k, kept = {TokenOrigin.PLAIN: (0, 0), TokenOrigin.RECOVERED: (6, 3), TokenOrigin.BONUS: (3, 3)}[origin]
    findable: dict[int, bool] = {}

    def note(commits: list[Any]) -> None:
        length = len(prompt) + len(harness.output(1))
        findable[length] = harness.engine.cache.pool.find(key) is not None
        if length == 16:
            assert commits[-1].origins[-1] == origin

    run_rounds(harness, [request], {1: forced(reference, 12, lambda _: kept)}, k, note)
    assert not findable[16] and all(found for length, found in findable.items() if length > 16)


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["batch-invariant", "ordinary"])
def test_poisoned_free_blocks_are_never_read(batch_invariant: bool) -> None:
    """NaN times zero is NaN: a masked slot must not be read either. Block 0, which pads the tables, stays free."""
    model, requests = target_model(batch_invariant=batch_invariant), requests_of("coupled")
    reference = plain_outputs(model, requests)
    harness = TargetHarness.of(model, num_blocks=40)
    harness.engine.cache.pool._free.move_to_end(0)  # the last one to be taken
    scheduler = harness.engine.scheduler
    num_poisoned = poison(
        harness.engine._runner, harness.engine.cache, lambda: [t.sequence for t in scheduler.sequences.values()]
    )
    drafts = {r.sequence_id: oracle(reference[r.sequence_id], len(r.prompt_ids), random.Random(1)) for r in requests}
    assert run_rounds(harness, requests, drafts, 4) == reference
    assert min(num_poisoned) > 0


def test_poisoned_free_blocks_of_the_draft_are_never_read() -> None:
    """Nor does poison change what is drafted."""
    outcomes = []
    for poisoned in (False, True):
        pair = Pair(4, noise=0.01)
        if poisoned:
            cache = pair.draft.method.cache
            cache.pool._free.move_to_end(0)
            num_poisoned = poison(pair.draft.method.proposer.runner, cache, pair.draft_tables)
        outcomes.append((pair.generate(requests_of("rejection")), [piece.ids for piece in pair.pieces]))
        assert outcomes[0] == outcomes[-1]
    assert min(num_poisoned) > 0


def test_no_counter_serves_two_purposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all modes, two completions of each request; coupling alone shares `bonus`, between draft and target. Under
    blocks a counter decides once."""
    log = CounterLog(monkeypatch)
    prompt, requests = prompt_of(9, 9), list[Open]()
    for index, mode in enumerate([*MODES.values(), MODES["rejection"]]):
        for completion in (0, 1):
            options = {"seed": 2**63 + index, "completion": completion, **mode}
            request = opened(len(requests), prompt, max_tokens=14, **options)
            requests.append(replace(request, one_hot=index == len(MODES)))
    Pair(3, noise=0.01).generate(requests)
    TargetHarness.of(target_model()).decode_plain(1, opened(1, prompt_of(1, 9), max_tokens=5, temperature=1.0, seed=1))
    assert len(log.requested) > 1000 and log.kinds() == PURPOSE_OF.keys()
    log.check(once={as_int64(2**63 + list(MODES).index("block"))})


FIELDS = {
    "seed": st.integers(0, 2**64 - 1),
    "position": st.integers(0, 2**32 - 1),
    "purpose": st.sampled_from(Purpose),
    "draw": st.integers(0, 2**60 - 1),
    "completion": st.integers(0, 2**32 - 1),
}


def four_words(seed: int, position: int, purpose: Purpose, draw: int, completion: int) -> list[int]:
    seeds, positions, completions = (torch.tensor([value]) for value in (as_int64(seed), position, completion))
    return words(seeds, positions, purpose, completions, draw)[0].tolist()


@given(st.fixed_dictionaries(FIELDS), st.data(), st.sampled_from(sorted(FIELDS)))
@settings(max_examples=200)
def test_no_two_requests_share_a_counter(request: dict[str, Any], data: st.DataObject, field: str) -> None:
    """Words are a bijection of the counter under one key, so equal words are equal counters."""
    other = {**request, field: data.draw(FIELDS[field])}
    assert (four_words(**request) == four_words(**other)) == (request == other)


def test_a_draw_index_cannot_reach_into_the_purpose() -> None:
    with pytest.raises(ValueError, match="draw index"):
        four_words(1, 1, Purpose.DRAFT, 1 << 60, 0)


K, BRANCHES, END = 3, 4, 90
SAMPLING = {"greedy": (GREEDY, AcceptanceRule.REJECTION), "coupled": (SAMPLED, AcceptanceRule.COUPLED)}


@pytest.mark.parametrize("name", SAMPLING)
def test_keys_and_values_of_branches(name: str) -> None:
    sampling, acceptance = SAMPLING[name]
    assert min(rounds(DraftHarness(num_blocks=128), sampling, acceptance)) > 3


def rounds(harness: DraftHarness, sampling: object, acceptance: AcceptanceRule) -> tuple[int, int, int]:
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
            branch = rng.choice(draft.branches.held)
            new = branch.sequence.tokens[start : branch.position + 1]
        else:
            new = draft.sequence.tokens[start : start + rng.randint(1, K + 1)]
            if outcome == 2:
                new = [*new[:-1], rng.randrange(3, 90)]
        outcomes[outcome] += 1
        tokens += new
        told = commit(1, start, *new, chain=draft.chain.number, num_drafted=K, num_accepted=min(len(new) - 1, K))
        harness.run(told, credit(1, len(tokens) + 2 * (K + 1), K, BRANCHES))
        harness.check()
    return outcomes[0], outcomes[1], outcomes[2]
