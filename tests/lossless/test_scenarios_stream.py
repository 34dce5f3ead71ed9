"""Bugs that other speculative decoders had, each a scenario by its number: where a stream ends, what it counts and what
it may depend on; keys and values, rollback and the prefix cache. `pytest tests/lossless -k scenario --collect-only`
lists all twenty-five; a test's docstring says the bug."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lossless.scenarios import (
    DraftInspector,
    Inspector,
    Pair,
    check_writes,
    forced,
    fresh_prefill,
    plain_outputs,
    prompt_of,
    run_rounds,
    target_model,
)
from support.engines import COUPLED, REJECTION, TargetHarness, opened, oracle
from support.fakes import ToyDraft, ToyTarget, scripted
from support.models import save_tiny, train_byte_level

from outrider.engine.quantized.rounding import Rounding
from outrider.gateway.engine import EngineConfig, GenerationEngine
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.messages import Close, Commit, Open
from outrider.rpc.words.answer import GenerationDelta
from outrider.rpc.words.request import GenerationRequest
from outrider.rpc.words.sampling_params import FinishReason, SamplingParams
from outrider.target_service.boot import build
from outrider.target_service.settings import TargetSettings

K = 4


@pytest.mark.parametrize("kind", ["stop id", "EOS"])
def test_scenario_22_a_stop_inside_a_window_ends_it(kind: str) -> None:
    """22: EOS or a stop id inside an accepted run is passed over, what follows it is sent, or the length limit hides
    it. The stop stands at every offset of a window, the bonus token's included, before, at and after the limit."""
    model, prompt = target_model(batch_invariant=False), prompt_of(22)
    reference = plain_outputs(model, [opened(1, prompt, max_tokens=12)])[1]
    assert len(set(reference[: K + 1])) == K + 1
    wrong = []
    for offset, limit in product(range(K + 1), range(1, K + 4)):
        stop = reference[offset]
        eos, stops = ((stop,), ()) if kind == "EOS" else ((), (stop,))
        request = opened(1, prompt, max_tokens=limit, stop_token_ids=stops)
        harness = TargetHarness.of(model, eos_ids=eos)
        output = run_rounds(harness, [request], {1: forced(reference, len(prompt), lambda _: K)}, K)[1]
        last = harness.commits(1)[-1]
        stopped = offset < limit
        expected = (
            reference[: min(offset + 1, limit)],
            FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop if stopped and kind == "stop id" else None,
        )
        wrong += [(offset, limit)] * ((output, last.finish_reason, last.stop_token_id) != expected)
        assert not harness.engine.scheduler.sequences
    assert not wrong


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    yield Tokenizer.load(folder)


TEXT = "def main(): stop words; the lazy fox jumps over 42 dogs"


async def generated(tokenizer: Tokenizer, k: int, wrong_every: int = 0, **sampling: Any) -> list[GenerationDelta]:
    """Every delta of a completion whose target says TEXT, then EOS, and whose draft knows it."""
    rule = scripted(tokenizer.encode(TEXT))
    engine = GenerationEngine(
        tokenizer, ToyTarget(rule), ToyDraft(rule, wrong_every), EngineConfig(num_draft_tokens=k, draft_patience_ms=50)
    )
    request = GenerationRequest(token_ids=(11, 12), sampling=SamplingParams(temperature=0.0, **sampling))
    return [delta async for delta in engine.generate(request)]


def ids_and_text(deltas: list[GenerationDelta]) -> tuple[list[int], str, Any, Any]:
    ids = [token for delta in deltas for token in delta.token_ids]
    return ids, "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason


async def test_scenario_22_a_stop_string_inside_a_window_ends_it(tokenizer: Tokenizer) -> None:
    """22, for strings: ids and text end with the token that completes the stop string, wherever in a window that is."""
    ids, wrong = tokenizer.encode(TEXT), []
    for end in range(1, len(ids)):
        before, text = tokenizer.decode(ids[: end - 1]), tokenizer.decode(ids[:end])
        stop = text[-3:]
        if stop in before:
            continue  # it completes earlier
        stopped = (ids[:end], text[: -len(stop)], FinishReason.STOP, stop)
        for limit in range(max(1, end - 1), end + K):
            expected = stopped if limit >= end else (ids[:limit], before, FinishReason.LENGTH, None)
            got = ids_and_text(await generated(tokenizer, K, stop=(stop,), max_tokens=limit))
            wrong += [(end, limit)] * (got != expected)
    assert not wrong


async def test_scenario_23_usage_counts_what_was_streamed(tokenizer: Tokenizer) -> None:
    """23: usage counts drafted tokens that were refused, or those behind a stop."""
    wrong = []
    for k, wrong_every, stop in product((0, 1, 4, 7), (0, 2, 3), ((), (" the",), ("; t",), ("fox",))):
        deltas = await generated(tokenizer, k, wrong_every, stop=stop, max_tokens=40)
        usage = deltas[-1].usage
        assert usage is not None and usage.prompt_tokens == 2
        streamed = len(ids_and_text(deltas)[0])
        wrong += [(k, wrong_every, stop)] * (usage.completion_tokens != streamed)
        assert streamed == sum(len(delta.origins) for delta in deltas) > 5
    assert not wrong


ROUNDINGS: tuple[Rounding | None, ...] = (None, "int8", "int4")
SHORT = [
    (1, 1, None), (1, 8, "int4"), (2, 4, "int8"), (5, 2, None), (8, 7, "int4"), (16, 3, "int8"), (33, 5, None),
    (64, 6, "int4"),
]  # fmt: skip
LONG = [
    pytest.param(*row, marks=pytest.mark.slow)
    for row in product((1, 2, 8, 16, 64), range(1, 9), ROUNDINGS)
    if row not in SHORT
]
PROBES = 5


def probes() -> list[Open]:
    """Those whose output must not change."""
    sampled = {"temperature": 0.9, "top_p": 0.9, "acceptance": COUPLED}
    return [
        opened(n, prompt_of(n, 5 + 9 * n), max_tokens=14, seed=100 + n, **(sampled if n % 2 else {}))
        for n in range(PROBES)
    ]


@cache
def probe_outputs(rounding: Rounding | None) -> dict[int, list[int]]:
    """Alone, and decoded plainly."""
    return plain_outputs(target_model(rounding=rounding), probes())


@pytest.mark.parametrize(("batch", "k", "rounding"), [*SHORT, *LONG])
def test_scenario_24_a_seeds_output_depends_on_nothing_else(batch: int, k: int, rounding: Rounding | None) -> None:
    """24: the output of a seed depends on the batch, the order in it, or k. Greedy and coupled sequences among others,
    in any order, with drafts that hold for a while; with weights in few bits, too."""
    expected = probe_outputs(rounding)
    rng = random.Random(100 * batch + k)
    mine = rng.sample(probes(), min(batch, PROBES))
    others = [
        opened(n, prompt_of(n, rng.randrange(1, 30)), max_tokens=rng.randrange(1, 14), seed=n, temperature=1.0)
        for n in range(100, 100 + batch - len(mine))
    ]
    requests = rng.sample([*mine, *others], batch)
    drafts = {
        r.sequence_id: oracle(expected.get(r.sequence_id, [1] * 20), len(r.prompt_ids), rng, hit=0.8) for r in requests
    }
    outputs = run_rounds(TargetHarness.of(target_model(rounding=rounding), num_blocks=400), requests, drafts, k)
    for request in mine:
        assert outputs[request.sequence_id] == expected[request.sequence_id]


def test_scenario_24_under_rejection_the_same_proposals_give_the_same_output() -> None:
    """24, where a draft takes part in the draw: for equal proposals neither batch nor order changes a token."""
    requests = [opened(n, prompt_of(n, 5 + 2 * n), seed=n, max_tokens=14, temperature=0.7, top_k=9) for n in range(12)]

    def outputs(some: list[Open]) -> dict[int, list[int]]:
        drafts = {r.sequence_id: oracle([7] * 20, len(r.prompt_ids), random.Random(r.sequence_id)) for r in some}
        return run_rounds(TargetHarness.of(target_model()), some, drafts, 3)

    alone = {number: output for request in requests for number, output in outputs([request]).items()}
    assert outputs(random.Random(1).sample(requests, 12)) == alone == outputs(requests)


@pytest.mark.parametrize("rule", [{}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": COUPLED}])
def test_every_round_commits_a_token(rule: dict[str, Any]) -> None:
    """Beside the list: a round whose drafted tokens are all refused is not empty."""
    requests = [
        opened(n, prompt_of(n, 8), seed=n, max_tokens=12, allowed_token_ids=(3, 4, 6), **rule) for n in range(4)
    ]
    for k in (1, 5):
        harness = TargetHarness.of(target_model(batch_invariant=False))
        run_rounds(harness, requests, {r.sequence_id: lambda tokens, k: ([5] * k, []) for r in requests}, k)
        commits = [commit for request in requests for commit in harness.commits(request.sequence_id)]
        assert len(commits) == 12 * len(requests)
        assert all(len(c.ids) == 1 and c.num_accepted == 0 and c.num_drafted > 0 for c in commits)


GREEDY: dict[str, Any] = {"max_tokens": 18}
SAMPLED: dict[str, Any] = {"max_tokens": 18, "temperature": 1.0, "acceptance": COUPLED}
NEVER = 5  # an id that the target may not take


def some_requests(**sampling: Any) -> list[Open]:
    """Of lengths around a block's, with a seed each."""
    return [opened(n, prompt_of(n, length), seed=n, **sampling) for n, length in enumerate((3, 15, 16, 17, 30))]


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_scenario_11_refusing_the_last_candidate_keeps_the_lengths(mode: str) -> None:
    """11: where the last candidate is refused, one token too many counts as computed. With windows of one all are
    refused; with longer ones the last."""
    sampling = {"greedy": GREEDY, "coupled": SAMPLED, "rejection": {"temperature": 1.0, "max_tokens": 18}}[mode]
    requests = some_requests(**sampling, allowed_token_ids=tuple(token for token in range(97) if token != NEVER))
    reference = plain_outputs(target_model(), requests)
    for k in (1, 3) if mode != "rejection" else (1,):
        harness = TargetHarness.of(target_model())
        inspector = Inspector(harness, fresh_prefill(), requests)

        def check_lengths(commits: list[Commit], harness: TargetHarness = harness, k: int = k) -> None:
            assert all(c.num_accepted == k - 1 for c in commits if c.num_drafted == k)
            for target in harness.engine.scheduler.sequences.values():
                assert target.sequence.num_computed_tokens == len(target.sequence) - 1

        drafts = {
            r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda _, k=k: k - 1) for r in requests
        }
        if mode == "rejection":
            drafts = dict.fromkeys(drafts, lambda tokens, k: ([NEVER] * k, []))
        outputs = run_rounds(harness, requests, drafts, k, check_lengths)
        assert mode == "rejection" or outputs == reference
        assert inspector.num_checked > 20


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_scenario_12_the_drafts_cache_is_whole_after_a_bonus_token(k: int) -> None:
    """12: after a bonus token the draft lacks the row of its own last token: the output stays right, acceptance falls.
    A draft that is the target is accepted whole, for every k, and its cache is a fresh prefill's."""
    requests = [*some_requests(**GREEDY), opened(9, prompt_of(9), seed=9, **SAMPLED)]
    reference = plain_outputs(target_model(), requests)
    pair = Pair(k, noise=0.0)
    assert pair.generate(requests) == reference
    assert pair.acceptance == 1.0
    watched = Pair(k, noise=0.0)
    DraftInspector(watched.draft)
    watched.generate(requests)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_scenario_13_refused_tokens_leave_nothing_in_the_cache(family: str) -> None:
    """13: refused tokens stay in the cache, because it rolls or cannot be trimmed. After each round keys and values are
    a fresh prefill's, to the bit; past a sliding window, too."""
    model, requests = target_model(family), some_requests(max_tokens=36)
    reference = plain_outputs(model, requests)
    harness = TargetHarness.of(model)
    Inspector(harness, fresh_prefill(family), requests)
    drafts = {r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda n: n % 3) for r in requests}
    assert run_rounds(harness, requests, drafts, 5) == reference


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_scenario_14_ragged_accepts_advance_each_sequence_by_its_own(sampling: dict[str, Any]) -> None:
    """14: where sequences of a batch accept different lengths, all advance by the greatest. In every round here the
    sequences accept 0 to k tokens, each another number."""
    k, requests = 4, some_requests(**sampling)
    reference = plain_outputs(target_model(), requests)
    harness, lengths = TargetHarness.of(target_model()), []
    Inspector(harness, fresh_prefill(), requests)
    drafts = {
        r.sequence_id: forced(reference[r.sequence_id], len(r.prompt_ids), lambda n, i=i: (n + i) % (k + 1))
        for i, r in enumerate(requests)
    }
    assert run_rounds(harness, requests, drafts, k, lambda c: lengths.append([x.num_accepted for x in c])) == reference
    assert all(sorted(accepted) == [0, 1, 2, 3, 4] for accepted in lengths[:5])


def test_scenario_15_the_prefix_cache_holds_committed_tokens_and_all_of_them() -> None:
    """15: drafted tokens are hashed before they are verified, or accepted ones are left out."""
    k, requests = 7, some_requests(**GREEDY)
    reference = plain_outputs(target_model(), requests)
    harness = TargetHarness.of(target_model())
    Inspector(harness, fresh_prefill(), requests)
    drafts = {
        r.sequence_id: forced(
            reference[r.sequence_id], len(r.prompt_ids), lambda n, i=i: (3 * n + i) % (k + 1) * (i > 0)
        )
        for i, r in enumerate(requests)
    }
    run_rounds(harness, requests, drafts, k)
    for request in requests:  # one that goes on where an earlier one ended finds its whole computed blocks
        whole = (*request.prompt_ids, *reference[request.sequence_id])
        harness.decode_plain(100 + request.sequence_id, opened(100 + request.sequence_id, whole, max_tokens=1))
        (last,) = harness.commits(100 + request.sequence_id)
        assert last.num_cached_ids == (len(whole) - 1) // 16 * 16


def test_scenario_16_no_pass_writes_outside_its_own_rows() -> None:
    """16: an idle or dummy step writes through a table that is not its own any more, into blocks that others share.
    Sequences share prefixes, are preempted, end and are closed; the services' probes run among them."""
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


@pytest.mark.parametrize("sampling", [GREEDY, {**SAMPLED, "acceptance": REJECTION}], ids=["greedy", "rejection"])
def test_scenario_17_a_warm_prefix_drafts_as_a_cold_one(sampling: dict[str, Any]) -> None:
    """17: a prefix hit leaves the draft's own cache unwritten. Cold and warm, the draft proposes the same, so as much
    is accepted; and its cache is a fresh prefill's."""
    pair, prompt, outcomes = Pair(4, noise=0.01), prompt_of(2, 45), []
    num_rows_of: list[int] = []
    DraftInspector(pair.draft)
    for number in (1, 2, 3):
        num_pieces, num_rows = len(pair.pieces), pair.num_draft_rows
        output = pair.generate([opened(number, prompt, seed=7, **sampling)])[number]
        pieces = [(piece.position, piece.ids, piece.weights) for piece in pair.pieces[num_pieces:]]
        outcomes.append((output, pieces))
        num_rows_of.append(pair.num_draft_rows - num_rows)
        assert pair.target.commits(number)[0].num_cached_ids == (0 if number == 1 else 32)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert num_rows_of[0] == num_rows_of[1] + 32 == num_rows_of[2] + 32  # two blocks were found
