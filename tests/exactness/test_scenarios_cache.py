"""Bugs of other speculative decoders, each a scenario: keys and values, rollback, and the prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exactness import scenario_bugs as bugs
from exactness.scenario_kv import check_writes, seen
from exactness.scenario_pair import DraftInspector, Pair
from exactness.scenario_rounds import (
    Inspector,
    forced,
    fresh_prefill,
    plain_outputs,
    prompt_of,
    run_rounds,
    target_model,
)
from target_harness import COUPLED, REJECTION, Harness, opened
from tiny import save_tiny

from outrider.draft_service.engine import DraftEngine
from outrider.engine.batch import BatchEntry
from outrider.rpc.messages import Close, Commit, Open
from outrider.target_service.boot import build
from outrider.target_service.engine import TargetEngine
from outrider.target_service.settings import TargetSettings

BUG = pytest.mark.parametrize("bug", [False, True], ids=["as it is", "the bug is seen"])
GREEDY: dict[str, Any] = {"max_tokens": 18}
SAMPLED: dict[str, Any] = {"max_tokens": 18, "temperature": 1.0, "acceptance": COUPLED}
NEVER = 5  # an id that the target may not take


def sees(*each: bugs.Bug) -> Any:
    """As it is, and with each bug."""
    return pytest.mark.parametrize("bug", [None, *each], ids=lambda bug: bug.__name__ if bug else "as it is")


def some_requests(**sampling: Any) -> list[Open]:
    """Of lengths around a block's, with a seed each."""
    return [opened(n, prompt_of(n, length), seed=n, **sampling) for n, length in enumerate((3, 15, 16, 17, 30))]


@sees(bugs.rollback_keeps_one_too_many)
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_scenario_11_refusing_the_last_candidate_keeps_the_lengths(
    mode: str, bug: bugs.Bug | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11: where the last candidate is refused, one token too many counts as computed. With windows of one all are
    refused; with longer ones the last."""
    sampling = {"greedy": GREEDY, "coupled": SAMPLED, "rejection": {"temperature": 1.0, "max_tokens": 18}}[mode]
    requests = some_requests(**sampling, allowed_token_ids=tuple(token for token in range(97) if token != NEVER))
    reference = plain_outputs(target_model(), requests)
    if bug:
        bug(monkeypatch)
    for k in (1, 3) if mode != "rejection" else (1,):
        harness = Harness.of(target_model())
        inspector = Inspector(harness, fresh_prefill(), requests)

        def check_lengths(commits: list[Commit], harness: Harness = harness, k: int = k) -> None:
            assert all(c.num_accepted == k - 1 for c in commits if c.num_drafted == k)
            for target in harness.engine.scheduler.sequences.values():
                assert target.sequence.num_computed_tokens == len(target.sequence) - 1

        drafts = {
            r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda _, k=k: k - 1) for r in requests
        }
        if mode == "rejection":
            drafts = dict.fromkeys(drafts, lambda tokens, k: ([NEVER] * k, []))
        with seen(bug):
            outputs = run_rounds(harness, requests, drafts, k, check_lengths)
            assert mode == "rejection" or outputs == reference
            assert inspector.num_checked > 20


@BUG
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_scenario_12_the_drafts_cache_is_whole_after_a_bonus_token(
    k: int, bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12: after a bonus token the draft lacks the row of its own last token: the output stays right, acceptance falls.
    A draft that is the target is accepted whole, for every k, and its cache is a fresh prefill's."""
    requests = [*some_requests(**GREEDY), opened(9, prompt_of(9), seed=9, **SAMPLED)]
    reference = plain_outputs(target_model(), requests)
    if bug:
        bugs.the_row_before_a_bonus_token_is_skipped(monkeypatch)
    pair = Pair(k, noise=0.0)
    assert pair.generate(requests) == reference
    assert (pair.acceptance < 1.0) == bug
    watched = Pair(k, noise=0.0)
    DraftInspector(watched.draft)
    with seen(bug):
        watched.generate(requests)


@sees(bugs.slots_are_written_once, bugs.rollback_keeps_one_too_many)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_scenario_13_refused_tokens_leave_nothing_in_the_cache(
    family: str, bug: bugs.Bug | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13: refused tokens stay in the cache, because it rolls or cannot be trimmed. After each round keys and values are
    a fresh prefill's, to the bit; past a sliding window, too."""
    model, requests = target_model(family), some_requests(max_tokens=36)
    reference = plain_outputs(model, requests)
    if bug:
        bug(monkeypatch)
    harness = Harness.of(model)
    Inspector(harness, fresh_prefill(family), requests)
    drafts = {r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda n: n % 3) for r in requests}
    with seen(bug):
        assert run_rounds(harness, requests, drafts, 5) == reference


@sees(bugs.all_rows_advance_by_the_most)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_scenario_14_ragged_accepts_advance_each_sequence_by_its_own(
    sampling: dict[str, Any], bug: bugs.Bug | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """14: where sequences of a batch accept different lengths, all advance by the greatest. In every round here the
    sequences accept 0 to k tokens, each another number."""
    k, requests = 4, some_requests(**sampling)
    reference = plain_outputs(target_model(), requests)
    if bug:
        bug(monkeypatch)
    harness, lengths = Harness.of(target_model()), []
    Inspector(harness, fresh_prefill(), requests)
    drafts = {
        r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda n, i=i: (n + i) % (k + 1))
        for i, r in enumerate(requests)
    }
    with seen(bug):
        assert (
            run_rounds(harness, requests, drafts, k, lambda c: lengths.append([x.num_accepted for x in c])) == reference
        )
        assert all(sorted(accepted) == [0, 1, 2, 3, 4] for accepted in lengths[:5])


@sees(
    bugs.drafted_tokens_are_published,
    bugs.committed_blocks_are_published_before_they_are_computed,
    bugs.accepted_tokens_are_not_published,
)
def test_scenario_15_the_prefix_cache_holds_committed_tokens_and_all_of_them(
    bug: bugs.Bug | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15: drafted tokens are hashed before they are verified, or accepted ones are left out."""
    k, requests = 7, some_requests(**GREEDY)
    reference = plain_outputs(target_model(), requests)
    if bug:
        bug(monkeypatch)
    harness = Harness.of(target_model())
    Inspector(harness, fresh_prefill(), requests)
    drafts = {
        r.sequence_id: forced(
            reference[r.sequence_id], len(r.prompt_ids), lambda n, i=i: (3 * n + i) % (k + 1) * (i > 0)
        )
        for i, r in enumerate(requests)
    }
    with seen(bug):
        run_rounds(harness, requests, drafts, k)
        for request in requests:  # one that goes on where an earlier one ended finds its whole computed blocks
            whole = (*request.prompt_ids, *reference[request.sequence_id])
            harness.decode_plain(100 + request.sequence_id, opened(100 + request.sequence_id, whole, max_tokens=1))
            (last,) = harness.commits(100 + request.sequence_id)
            assert last.num_cached_ids == (len(whole) - 1) // 16 * 16


def probe_the_first_block(engine: Any) -> None:
    """A sign of life that writes where it always writes, whoever holds the block by now."""
    runner = engine._runner if isinstance(engine, TargetEngine) else engine._model.proposer.runner
    runner.forward([BatchEntry([0], 0, [0], 1)])


@BUG
@pytest.mark.parametrize("service", [TargetEngine, DraftEngine], ids=["target", "draft"])
def test_scenario_16_no_pass_writes_outside_its_own_rows(
    service: Any, bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16: an idle or dummy step writes through a table that is not its own any more, into blocks that others share.
    Sequences share prefixes, are preempted, end and are closed; the services' probes run among them."""
    if bug:
        monkeypatch.setattr(service, "probe", probe_the_first_block)
    shared = prompt_of(1, 33)
    requests = [*some_requests(**SAMPLED), *(opened(n, (*shared, n), seed=n, **SAMPLED) for n in (10, 11))]
    reference = plain_outputs(target_model(noise=0.01), requests)
    pair = Pair(3, noise=0.01, num_blocks=12)
    target, inspector = pair.target.engine, Inspector(pair.target, fresh_prefill(noise=0.01), requests)
    written = check_writes(target._runner, target.cache)
    drafted = check_writes(pair.draft.method.proposer.runner, pair.draft.method.cache)

    def disturb() -> None:
        target.probe() if target.cache.pool.num_free else None
        pair.draft.engine.probe()
        if len(written) == 8:
            pair.target.send(opened(50, shared, max_tokens=9), Close(50))

    with seen(bug):
        assert pair.generate(requests, disturb) == reference
        assert len(written) > 20 and len(drafted) > 20 and inspector.num_preempted > 0


async def test_scenario_16_a_health_probe_writes_in_a_block_of_its_own(tmp_path: Path) -> None:
    """16, as the target is put together: it takes calls before its first sign of life, when blocks may be held."""
    settings = TargetSettings(model=save_tiny(tmp_path), listen="127.0.0.1:0", num_blocks=4, threads=1)
    service = build(settings, target_model(batch_invariant=False))
    try:
        cache, probe = service.engine._runner.cache, service.server.health._probe
        held = service.engine.cache.pool.allocate(3)
        assert probe is not None
        await probe()
        assert any(bool(part.any()) for part in cache.keys)
        assert not any(bool(part[held].any()) for part in (*cache.keys, *cache.values))
    finally:
        await service.stop()


@sees(bugs.a_prefix_hit_claims_a_block_that_it_has_not)
@pytest.mark.parametrize("sampling", [GREEDY, {**SAMPLED, "acceptance": REJECTION}], ids=["greedy", "rejection"])
def test_scenario_17_a_warm_prefix_drafts_as_a_cold_one(
    sampling: dict[str, Any], bug: bugs.Bug | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17: a prefix hit leaves the draft's own cache unwritten. Cold and warm, the draft proposes the same, so as much
    is accepted; and its cache is a fresh prefill's."""
    if bug:
        bug(monkeypatch)
    pair, prompt, outcomes = Pair(4, noise=0.01), prompt_of(2, 45), []
    num_rows_of: list[int] = []
    DraftInspector(pair.draft)
    with seen(bug):
        for number in (1, 2, 3):
            num_pieces, num_rows = len(pair.pieces), pair.num_draft_rows
            output = pair.generate([opened(number, prompt, seed=7, **sampling)])[number]
            pieces = [(piece.position, piece.ids, piece.weights) for piece in pair.pieces[num_pieces:]]
            outcomes.append((output, pieces))
            num_rows_of.append(pair.num_draft_rows - num_rows)
            assert pair.target.commits(number)[0].num_cached_ids == (0 if number == 1 else 32)
        assert outcomes[0] == outcomes[1] == outcomes[2]
        assert num_rows_of[0] == num_rows_of[1] + 32 == num_rows_of[2] + 32  # two blocks were found
