"""Bugs of other speculative decoders, each a scenario: where a stream ends, what it counts, and what it may depend
on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from exactness.scenario_rounds import forced, plain_outputs, prompt_of, run_rounds, target_model
from gateway.toys import ToyDraft, ToyTarget, scripted
from target_harness import COUPLED, Harness, opened, oracle
from tokenizer_factory import train_byte_level

from outrider.gateway import engine as gateway_engine
from outrider.gateway.engine import Completion, EngineConfig, GenerationEngine
from outrider.gateway.request import GenerationDelta, GenerationRequest
from outrider.gateway.text.tokenizer import Tokenizer
from outrider.rpc.messages import Open
from outrider.rpc.sampling_params import FinishReason, SamplingParams
from outrider.target_service import step, verifier
from outrider.target_service.outputs import Outcome, outcome_of

BUG = pytest.mark.parametrize("bug", [False, True], ids=["as it is", "the bug is seen"])
K = 4


def looks_at_the_last_token_alone(ids: Any, origins: Any, sampling: Any, eos_ids: Any, num: int, left: int) -> Outcome:
    """A window's end is taken for a step's."""
    last = outcome_of(ids[-1:], origins[-1:], sampling, eos_ids, num + len(ids) - 1, left - len(ids) + 1)
    return replace(last, ids=tuple(ids), origins=tuple(origins))


@BUG
@pytest.mark.parametrize("kind", ["stop id", "EOS"])
def test_scenario_22_a_stop_inside_a_window_ends_it(kind: str, bug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """22: EOS or a stop id inside an accepted run is passed over, what follows it is sent, or the length limit hides
    it. The stop stands at every offset of a window, the bonus token's included, before, at and after the limit."""
    model, prompt = target_model(batch_invariant=False), prompt_of(22)
    reference = plain_outputs(model, [opened(1, prompt, max_tokens=12)])[1]
    assert len(set(reference[: K + 1])) == K + 1
    if bug:
        monkeypatch.setattr(step, "outcome_of", looks_at_the_last_token_alone)
    wrong = []
    for offset, limit in product(range(K + 1), range(1, K + 4)):
        stop = reference[offset]
        eos, stops = ((stop,), ()) if kind == "EOS" else ((), (stop,))
        request = opened(1, prompt, max_tokens=limit, stop_token_ids=stops)
        harness = Harness.of(model, eos_ids=eos)
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
    assert bool(wrong) == bug


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
    return ids, "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].stop_string


def sends_the_whole_window(monkeypatch: pytest.MonkeyPatch) -> None:
    push = gateway_engine.TextStream.push

    def wrong(self: Any, ids: Any, *rest: Any) -> Any:
        return replace(push(self, ids, *rest), num_ids=len(ids))

    monkeypatch.setattr(gateway_engine.TextStream, "push", wrong)


@BUG
async def test_scenario_22_a_stop_string_inside_a_window_ends_it(
    tokenizer: Tokenizer, bug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """22, for strings: ids and text end with the token that completes the stop string, wherever in a window that is."""
    ids, wrong = tokenizer.encode(TEXT), []
    if bug:
        sends_the_whole_window(monkeypatch)
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
    assert bool(wrong) == bug


def counts_what_the_target_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    delta_of, last = Completion._delta_of, Completion._last
    sent: list[int] = []

    def note(self: Completion, closed: Any) -> GenerationDelta:
        sent.append(len(closed.commit.ids))
        return delta_of(self, closed)

    def wrong(self: Completion, delta: GenerationDelta) -> GenerationDelta:
        ended = last(self, delta)
        assert ended.usage is not None
        return replace(ended, usage=replace(ended.usage, completion_tokens=sum(sent)))

    monkeypatch.setattr(Completion, "_delta_of", note)
    monkeypatch.setattr(Completion, "_last", wrong)


@BUG
async def test_scenario_23_usage_counts_what_was_streamed(tokenizer: Tokenizer, bug: bool) -> None:
    """23: usage counts drafted tokens that were refused, or those behind a stop."""
    wrong = []
    for k, wrong_every, stop in product((0, 1, 4, 7), (0, 2, 3), ((), (" the",), ("; t",), ("fox",))):
        with pytest.MonkeyPatch.context() as patch:
            if bug:
                counts_what_the_target_sent(patch)
            deltas = await generated(tokenizer, k, wrong_every, stop=stop, max_tokens=40)
        usage = deltas[-1].usage
        assert usage is not None and usage.prompt_tokens == 2
        streamed = len(ids_and_text(deltas)[0])
        wrong += [(k, wrong_every, stop)] * (usage.completion_tokens != streamed)
        assert streamed == sum(len(delta.origins) for delta in deltas) > 5
    assert bool(wrong) == bug


SHORT = [(1, 1), (1, 8), (2, 4), (5, 2), (8, 7), (16, 3), (33, 5), (64, 6)]
LONG = [
    pytest.param(b, k, marks=pytest.mark.slow) for b in (1, 2, 8, 16, 64) for k in range(1, 9) if (b, k) not in SHORT
]
PROBES = 5


def probes() -> list[Open]:
    """Those whose output must not change."""
    sampled = {"temperature": 0.9, "top_p": 0.9, "acceptance": COUPLED}
    return [
        opened(n, prompt_of(n, 5 + 9 * n), max_tokens=14, seed=100 + n, **(sampled if n % 2 else {}))
        for n in range(PROBES)
    ]


@pytest.fixture(scope="module")
def probe_outputs() -> dict[int, list[int]]:
    """Alone, and decoded plainly."""
    return plain_outputs(target_model(), probes())


@pytest.mark.parametrize(("batch", "k"), [*SHORT, *LONG])
def test_scenario_24_a_seeds_output_depends_on_nothing_else(
    batch: int, k: int, probe_outputs: dict[int, list[int]]
) -> None:
    """24: the output of a seed depends on the batch, the order in it, or k. Greedy and coupled sequences among others,
    in any order, with drafts that hold for a while."""
    check_batch(batch, k, probe_outputs)


def test_scenario_24_noise_by_place_in_the_batch_is_seen(
    probe_outputs: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """24, with the bug: random numbers go to rows by their place."""
    spans = verifier._spans
    monkeypatch.setattr(verifier, "_spans", lambda members, counts: spans(members[::-1], counts))
    with pytest.raises(AssertionError):
        check_batch(8, 3, probe_outputs)


def check_batch(batch: int, k: int, expected: dict[int, list[int]]) -> None:
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
    outputs = run_rounds(Harness.of(target_model(), num_blocks=400), requests, drafts, k)
    for request in mine:
        assert outputs[request.sequence_id] == expected[request.sequence_id]


def test_scenario_24_under_rejection_the_same_proposals_give_the_same_output() -> None:
    """24, where a draft takes part in the draw: for equal proposals neither batch nor order changes a token."""
    requests = [opened(n, prompt_of(n, 5 + 2 * n), seed=n, max_tokens=14, temperature=0.7, top_k=9) for n in range(12)]

    def outputs(some: list[Open]) -> dict[int, list[int]]:
        drafts = {r.sequence_id: oracle([7] * 20, len(r.prompt_ids), random.Random(r.sequence_id)) for r in some}
        return run_rounds(Harness.of(target_model()), some, drafts, 3)

    alone = {number: output for request in requests for number, output in outputs([request]).items()}
    assert outputs(random.Random(1).sample(requests, 12)) == alone == outputs(requests)


@pytest.mark.parametrize("rule", [{}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": COUPLED}])
def test_every_round_commits_a_token(rule: dict[str, Any]) -> None:
    """Beside the list: a round whose drafted tokens are all refused is not empty."""
    requests = [
        opened(n, prompt_of(n, 8), seed=n, max_tokens=12, allowed_token_ids=(3, 4, 6), **rule) for n in range(4)
    ]
    for k in (1, 5):
        harness = Harness.of(target_model(batch_invariant=False))
        run_rounds(harness, requests, {r.sequence_id: lambda tokens, k: ([5] * k, []) for r in requests}, k)
        commits = [commit for request in requests for commit in harness.commits(request.sequence_id)]
        assert all(len(c.ids) == 1 and c.num_accepted == 0 and c.num_drafted > 0 for c in commits)
