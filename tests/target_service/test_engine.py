"""The target engine against transformers, and speculative against plain decoding.

The law of the committed tokens, through the engine's own step: chi-square against the model's exact probabilities.

The draft's law is the target's turned upside down, so that most drafted tokens are refused and the residual decides.

Step spans: one a step, linked to every traced request in it; nothing for untraced ones."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scipy.stats import chisquare
from support.engines import (
    BLOCK,
    COUPLED,
    REJECTION,
    VOCAB,
    TargetHarness,
    hf_greedy,
    opened,
    oracle,
    speculate,
    tiny_model,
)
from support.models import build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.loader import LoadedModel
from outrider.kernels.random.reference import Purpose, words
from outrider.kernels.sampling.reference import draft_sample
from outrider.rpc.messages import PRIORITY_STEP_S, Close, Closed, Credit, DraftTokens, TokenWeights
from outrider.rpc.servicer import Deliver
from outrider.rpc.telemetry import StepTracer
from outrider.rpc.words.sampling_params import FinishReason, TokenOrigin
from outrider.target_service import outputs
from outrider.target_service.goodput import Goodput
from outrider.target_service.observed import observed
from outrider.target_service.watchers import trace_step


@pytest.fixture(scope="module")
def models() -> tuple[Any, LoadedModel]:
    return tiny_model()


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def test_plain_greedy_equals_generate(models: tuple[Any, LoadedModel]) -> None:
    hf, loaded = models
    harness = TargetHarness.of(loaded)
    for number, length in enumerate((1, 15, 16, 17, 40), start=1):
        prompt = prompt_of(number, length)
        assert harness.decode_plain(number, opened(number, prompt, max_tokens=24)) == hf_greedy(hf, prompt, 24)
        assert {o for c in harness.commits(number) for o in c.origins} == {TokenOrigin.PLAIN}
        assert harness.commits(number)[-1].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("acceptance", "k"), [*product([REJECTION, COUPLED], range(9)), (BLOCK, 1), (BLOCK, 4), (BLOCK, 8)]
)
def test_greedy_with_any_draft_equals_plain(models: tuple[Any, LoadedModel], k: int, acceptance: Any) -> None:
    hf, loaded = models
    prompt = prompt_of(k)
    reference = hf_greedy(hf, prompt, 48)
    harness = TargetHarness.of(loaded)
    request = opened(1, prompt, max_tokens=48, acceptance=acceptance)
    assert speculate(harness, request, k, oracle(reference, len(prompt), random.Random(k))) == reference
    if k:
        origins = [o for c in harness.commits(1) for o in c.origins]
        assert TokenOrigin.ACCEPTED in origins and TokenOrigin.RECOVERED in origins


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.9, "logit_bias": {5: 4.0}, "bad_words_ids": ((5, 6), (7,)), "min_tokens": 8},
        {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 1.0},
    ],
)
def test_coupled_output_depends_on_no_draft(models: tuple[Any, LoadedModel], sampling: dict[str, Any]) -> None:
    _, loaded = models
    prompt = prompt_of(99)
    options = {"max_tokens": 40, "acceptance": COUPLED, "seed": 1234567890123, **sampling}
    plain = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, **options))
    for k in (1, 4, 8):
        draft = oracle(plain, len(prompt), random.Random(k))
        harness = TargetHarness.of(loaded)
        assert speculate(harness, opened(1, prompt, **options), k, draft) == plain
        assert sum(c.num_accepted for c in harness.commits(1)) > 5


def test_batch_and_chunks_and_preemption_change_nothing(models: tuple[Any, LoadedModel]) -> None:
    """Sixteen sequences of all lengths share few blocks and a small row budget: chunked, preempted, prefix-shared."""
    _, loaded = models
    requests = [
        opened(n, prompt_of(n % 5, 5 + 3 * n), max_tokens=20, temperature=float(n % 2), acceptance=COUPLED, seed=n)
        for n in range(1, 17)
    ]
    alone = {r.sequence_id: TargetHarness.of(loaded).decode_plain(r.sequence_id, r) for r in requests}
    harness = TargetHarness.of(loaded, num_blocks=14, max_rows=24)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, 1 << 20, 0))
    harness.run()
    assert {r.sequence_id: harness.output(r.sequence_id) for r in requests} == alone
    assert harness.engine.cache.pool.num_free == 14


def test_whoever_waits_for_blocks_gets_them_in_the_end(models: tuple[Any, LoadedModel]) -> None:
    """More urgent ones that come for ever pass it for so long as their numbers say, and take its blocks."""
    _, loaded = models
    old = opened(1, prompt_of(1, 40), max_tokens=60, priority=5, temperature=1.0, acceptance=COUPLED, seed=7)
    alone = TargetHarness.of(loaded).decode_plain(1, old)
    harness, number, passed_by_s = TargetHarness.of(loaded, num_blocks=8), 1, 0.0
    harness.send(old, Credit(1, 1 << 20, 0))
    while len(harness.output(1)) < 60 and harness.now < 200.0:
        if len(harness.engine.scheduler.sequences) < 3:
            number += 1
            harness.send(opened(number, prompt_of(number, 60), max_tokens=30), Credit(number, 1 << 20, 0))
        num_before = len(harness.output(1))
        harness.engine.step(harness.now)
        harness.now += 0.2
        passed_by_s += 0.2 * (len(harness.output(1)) == num_before)
    assert harness.output(1) == alone and harness.engine.scheduler.num_preempted > 1
    assert 4 * PRIORITY_STEP_S < passed_by_s < 8 * PRIORITY_STEP_S
    assert {commit.num_cached_ids for commit in harness.commits(1)} == {0}, "what it finds again is its own"


def test_rejection_window_takes_no_bonus_while_the_chain_goes_on(models: tuple[Any, LoadedModel]) -> None:
    _, loaded = models
    prompt = prompt_of(3)
    for more, acceptance, last in (
        (True, REJECTION, TokenOrigin.ACCEPTED),
        (False, REJECTION, TokenOrigin.BONUS),
        (True, COUPLED, TokenOrigin.BONUS),
    ):
        plain = TargetHarness.of(loaded).decode_plain(
            1, opened(1, prompt, temperature=0.01, max_tokens=8, acceptance=COUPLED, seed=5)
        )
        harness = TargetHarness.of(loaded)
        request = opened(1, prompt, temperature=0.01, max_tokens=8, acceptance=acceptance, seed=5)
        harness.send(
            request, DraftTokens(1, 0, len(prompt), tuple(plain[:3]), more=more), Credit(1, len(prompt) + 4, 3, 1000)
        )
        harness.run(max_steps=3 if last != TokenOrigin.ACCEPTED else 10)
        commit = harness.commits(1)[0]
        assert commit.num_accepted == 3 and commit.origins[-1] == last, (more, acceptance)
        target = next(iter(harness.engine.scheduler.sequences.values()))
        assert target.sequence.num_computed_tokens == len(target.sequence) - 1


def test_stop_id_inside_a_window_cuts_there(models: tuple[Any, LoadedModel]) -> None:
    hf, loaded = models
    prompt = prompt_of(4)
    reference = hf_greedy(hf, prompt, 30)
    for offset in range(5):
        stop = reference[10 + offset]
        cut = reference[: reference.index(stop) + 1]
        harness = TargetHarness.of(loaded)
        request = opened(1, prompt, max_tokens=30, stop_token_ids=(stop,))
        got = speculate(harness, request, 4, oracle(reference, len(prompt), random.Random(1), hit=1.0))
        assert got == cut
        assert harness.commits(1)[-1].finish_reason == FinishReason.STOP
        assert harness.commits(1)[-1].stop_token_id == stop
        assert not harness.engine.scheduler.sequences


def test_eos_ends_unless_ignored_or_before_min_tokens(models: tuple[Any, LoadedModel]) -> None:
    hf, loaded = models
    prompt = prompt_of(5)
    reference = hf_greedy(hf, prompt, 20)
    eos = reference[6]
    first = reference.index(eos)
    harness = TargetHarness.of(loaded, eos_ids=(eos,))
    assert harness.decode_plain(1, opened(1, prompt, max_tokens=20)) == reference[: first + 1]
    assert harness.commits(1)[-1].stop_token_id is None
    assert harness.decode_plain(2, opened(2, prompt, max_tokens=20, ignore_eos=True)) == reference
    assert eos not in harness.decode_plain(3, opened(3, prompt, max_tokens=20, min_tokens=20))


def test_logprobs_and_prompt_logprobs(models: tuple[Any, LoadedModel]) -> None:
    import torch

    hf, loaded = models
    prompt = prompt_of(6, 30)
    reference = hf_greedy(hf, prompt, 12)
    harness = TargetHarness.of(loaded, max_rows=7)
    request = opened(1, prompt, max_tokens=12, logprobs=3, prompt_logprobs=2)
    speculate(harness, request, 4, oracle(reference, len(prompt), random.Random(2)))
    with torch.inference_mode():
        expected = torch.log_softmax(hf(torch.tensor([prompt + reference])).logits[0], dim=-1)
    rows = [row for commit in harness.commits(1) for row in commit.logprobs]
    for index, row in enumerate(rows):
        assert row[0].id == reference[index] and row[0].rank == 1 and len(row) == 3
        assert abs(row[0].logprob - float(expected[len(prompt) + index - 1, reference[index]])) < 1e-3
    listed = opened(2, prompt, max_tokens=12, logprobs=0, logprob_token_ids=(9, 4))
    harness.decode_plain(2, listed)
    rows = [row for commit in harness.commits(2) for row in commit.logprobs]
    for index, row in enumerate(rows):
        own = expected[len(prompt) + index - 1]
        assert [entry.id for entry in row] == [reference[index], *(i for i in (9, 4) if i != reference[index])]
        assert all(abs(entry.logprob - float(own[entry.id])) < 1e-3 for entry in row)
        assert all(entry.rank == 1 + int((own > own[entry.id]).sum()) for entry in row)
    (prompts,) = harness.prompt_logprobs(1)
    assert len(prompts.logprobs) == len(prompt) and prompts.logprobs[0] == ()
    for position in range(1, len(prompt)):
        chosen = prompts.logprobs[position][0]
        assert chosen.id == prompt[position]
        assert abs(chosen.logprob - float(expected[position - 1, prompt[position]])) < 1e-3


def test_a_prompts_rows_are_ranked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(1))
    whole = outputs.prompt_logprobs(logits, range(11), 3, "raw_logprobs", [()] * 11)
    monkeypatch.setattr(outputs, "RANKED_ON_HOST", 4 * VOCAB)
    assert outputs.prompt_logprobs(logits, range(11), 3, "raw_logprobs", [()] * 11) == whole and len(whole) == 11


def test_fork_shares_the_prompt_and_outlives_its_parent(models: tuple[Any, LoadedModel]) -> None:
    _, loaded = models
    prompt = prompt_of(7, 40)
    options = {"temperature": 1.0, "max_tokens": 12, "acceptance": COUPLED, "seed": 77}
    alone = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, completion=1, **options))
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, prompt, **options), opened(2, (), fork_of=1, completion=1, **options), Close(1))
    assert harness.events[1] == [Closed(1)]
    harness.send(Credit(2, 1 << 20, 0))
    harness.run()
    assert harness.output(2) == alone
    # A living parent computes the prompt once; the child finds whole blocks of it.
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, prompt, **options), opened(2, (), fork_of=1, completion=1, **options))
    harness.send(Credit(1, 1 << 20, 0), Credit(2, 1 << 20, 0))
    harness.run()
    assert harness.output(2) == alone and harness.output(1) != alone
    assert harness.commits(2)[0].num_cached_ids == 32
    harness.send(opened(3, (), fork_of=1, completion=1, **options))
    assert harness.failures(3)[0].reason == "PARENT_GONE"


def test_resume_goes_on_where_it_ended(models: tuple[Any, LoadedModel]) -> None:
    _, loaded = models
    prompt = prompt_of(8)
    options = {"temperature": 1.0, "max_tokens": 30, "acceptance": COUPLED, "seed": 3}
    options |= {"frequency_penalty": 0.8, "min_tokens": 20}
    whole = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, **options))
    resumed = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, output_ids=tuple(whole[:13]), **options))
    assert whole[:13] + resumed == whole


def test_bad_requests_fail_alone(models: tuple[Any, LoadedModel]) -> None:
    _, loaded = models
    harness = TargetHarness.of(loaded, num_blocks=8)
    harness.send(
        opened(1, [VOCAB], max_tokens=4),
        opened(2, prompt_of(1), max_tokens=200),
        opened(3, prompt_of(1), max_tokens=4, top_p=1.5),
        opened(4, prompt_of(1), max_tokens=4, acceptance=0),
        opened(5, prompt_of(1), max_tokens=4),
        opened(6, prompt_of(1), max_tokens=4, logprobs=-1),
        Credit(5, 100, 0),
    )
    harness.run()
    assert "logprobs: is -1; allowed: a whole number, 0 to 20" in harness.failures(6)[0].message
    assert "prompt_ids" in harness.failures(1)[0].message
    assert harness.failures(2)[0].reason == "DOES_NOT_FIT"
    assert "top_p" in harness.failures(3)[0].message
    assert "acceptance" in harness.failures(4)[0].message
    assert len(harness.output(5)) == 4


@pytest.mark.parametrize("name", ["prompt and max_tokens beyond the context", "nothing left to generate"])
def test_what_cannot_be_generated_is_refused_and_the_neighbour_goes_on(
    models: tuple[Any, LoadedModel], name: str
) -> None:
    _, loaded = models
    alone = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt_of(1), max_tokens=20))
    odd, field = opened(2, prompt_of(2), max_tokens=2, output_ids=(8, 9)), "open.output_ids"
    if name.startswith("prompt"):
        odd = opened(2, prompt_of(2, loaded.max_model_len - 100), max_tokens=101)
        field = "open.sampling.max_tokens"
    harness = TargetHarness.of(loaded, num_blocks=128)
    harness.send(opened(1, prompt_of(1), max_tokens=20), Credit(1, 1 << 20, 0), odd, Credit(2, 1 << 20, 0))
    harness.run(max_steps=200)
    assert field in harness.failures(2)[0].message and not harness.output(2)
    assert harness.output(1) == alone


def test_the_oldest_takes_blocks_when_it_has_credit_again(models: tuple[Any, LoadedModel]) -> None:
    _, loaded = models
    requests = opened(1, prompt_of(1, 60), max_tokens=60), opened(2, prompt_of(2), max_tokens=150)
    alone = [TargetHarness.of(loaded).decode_plain(number, request) for number, request in enumerate(requests, 1)]
    harness = TargetHarness.of(loaded, num_blocks=12, prefix_cache=False)
    harness.send(requests[0], Credit(1, 65, 0))
    harness.run()
    oldest = harness.engine.scheduler.sequences[1, 1].sequence
    harness.send(requests[1], Credit(2, 1 << 20, 0))
    while oldest.block_table:  # without credit, it is the first to give way
        assert harness.engine.step(0.0) == 0.0
    while len(harness.output(2)) < 130:
        harness.engine.step(0.0)
    harness.send(Credit(1, 1 << 20, 0))
    for _ in range(5):
        harness.engine.step(0.0)
    assert len(harness.output(1)) > 5 and len(harness.output(2)) < 140
    harness.run()
    assert [harness.output(1), harness.output(2)] == alone


def test_deadline_ends_a_waiting_sequence(models: tuple[Any, LoadedModel]) -> None:
    _, loaded = models
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, prompt_of(1), max_tokens=4, timeout_ms=500))
    assert harness.run() == pytest.approx(0.5)
    harness.now = 0.6
    harness.run()
    assert harness.failures(1)[0].code == 4 and not harness.engine.scheduler.sequences


def test_nan_logits_are_an_error_and_never_a_token(models: tuple[Any, LoadedModel], monkeypatch: Any) -> None:
    _, loaded = models
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, prompt_of(1), max_tokens=4), Credit(1, 100, 0))
    runner = harness.engine._runner
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda entries: forward(entries) * float("nan"))
    harness.run()
    assert harness.failures(1)[0].reason == "INVALID_LOGITS" and not harness.output(1)
    monkeypatch.undo()
    assert len(harness.decode_plain(2, opened(2, prompt_of(1), max_tokens=4))) == 4


def test_a_sequence_of_other_weights_is_refused(models: tuple[Any, LoadedModel]) -> None:
    harness = TargetHarness.of(models[1])
    harness.engine.limits = replace(harness.engine.limits, model_digest="d1")
    harness.send(opened(1, prompt_of(1), model_digest="d9"), opened(2, prompt_of(1), max_tokens=2, model_digest="d1"))
    (failure,) = harness.failures(1)
    assert failure.reason == "OTHER_MODEL" and "d9" in failure.message and "d1" in failure.message
    assert not harness.failures(2)


FEW_IDS, BATCH, K = 16, 200, 2
PROMPT = (3, 1, 4, 1, 5)
ROWS = len(PROMPT) * BATCH  # of the first step with windows of one token
SAMPLING = {"temperature": 1.2, "min_p": 0.02, "max_tokens": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_hf_model("llama", 5, vocab_size=FEW_IDS)


def laws(hf: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact target law and the draft's: of the first token, [1, V], then of the second by the first, [V, V]."""
    contexts = [[*PROMPT], *([*PROMPT, token] for token in range(FEW_IDS))]
    with torch.inference_mode():
        logits = torch.stack([hf(torch.tensor([ids])).logits[0, -1] for ids in contexts])  # [1 + V, V]
    target = torch.softmax(logits.double() / SAMPLING["temperature"], dim=-1)
    target = torch.where(target < SAMPLING["min_p"] * target.amax(-1, keepdim=True), 0.0, target)
    return target / target.sum(-1, keepdim=True), torch.softmax(-logits, dim=-1)


def drafted(draft: torch.Tensor, seed: int) -> tuple[tuple[int, ...], tuple[TokenWeights, ...]]:
    """K tokens drawn from their weights, as a draft does it."""
    ids: list[int] = []
    weights: list[TokenWeights] = []
    for offset in range(K):
        row = draft[0] if offset == 0 else draft[1 + ids[-1]]
        counter = torch.tensor([seed]), torch.tensor([len(PROMPT) + offset]), Purpose.DRAFT, torch.tensor([0])
        sample = draft_sample(row[None].float(), words(*counter))
        ids.append(int(sample.token_ids[0]))
        weights.append(TokenWeights.of(sample.entry_ids.tolist(), sample.entry_weights.tolist()))
    return tuple(ids), tuple(weights)


@pytest.mark.parametrize("kind", ["weights", "weights, cut", "one-hot", "coupled", "plain"])
def test_committed_tokens_follow_the_targets_law(model: Any, kind: str, prove: bool) -> None:
    num_draws = 4000 if prove else 800
    target, draft = laws(model)
    loaded = build_decoder(tiny_config("llama", vocab_size=FEW_IDS), tiny_state(model))
    counts = torch.zeros(FEW_IDS, FEW_IDS, dtype=torch.float64)
    acceptance = COUPLED if kind == "coupled" else REJECTION
    for start in range(0, num_draws, BATCH):
        harness = TargetHarness.of(loaded, num_blocks=512, max_rows=4 * ROWS)
        if kind == "weights, cut":  # no row beyond those of the prompts
            harness.engine.scheduler.goodput = Goodput([(1, 1), (ROWS, ROWS), (ROWS + 1, 1 << 40)])
        for seed in range(start + 1, start + BATCH + 1):
            request = opened(seed, PROMPT, acceptance=acceptance, seed=seed, **SAMPLING)
            ids, weights = drafted(draft, seed) if kind != "plain" else ((), ())
            piece = DraftTokens(seed, 0, len(PROMPT), ids, weights if "weights" in kind else ())
            harness.send(request, piece, Credit(seed, 100, K, 0))
        for sequence in harness.engine.scheduler.sequences.values():
            sequence.acceptance.add(1, 1)  # its first window would be whole
        harness.run()
        for seed in range(start + 1, start + BATCH + 1):
            assert harness.commits(seed)[0].num_drafted == {"plain": 0, "weights, cut": 1}.get(kind, K)
            first, second, _ = harness.output(seed)
            counts[first, second] += 1
    expected = target[0][:, None] * target[1:] * num_draws  # [V, V]
    assert counts[expected == 0].sum() == 0
    keep = expected >= 5
    observed = [*counts[keep].tolist(), float(counts[~keep].sum())]
    wanted = [*expected[keep].tolist(), float(expected[~keep].sum())]
    observed, wanted = (observed, wanted) if wanted[-1] >= 5 else (observed[:-1], wanted[:-1])
    scale = sum(observed) / sum(wanted)
    assert chisquare(observed, [w * scale for w in wanted]).pvalue > 1e-4


def test_steps_link_to_their_requests() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = StepTracer(provider.get_tracer("test"))
    harness = TargetHarness.of(tiny_model()[1], on_step=lambda step: trace_step(tracer, observed(step)))
    parents = [f"00-{n:032x}-{n:016x}-01" for n in (7, 8)]
    for number, parent in enumerate(parents, start=1):
        request = opened(number, [5, 6, 7], max_tokens=3)
        harness.send(replace(request, traceparent=parent), Credit(number, 100, 0))
    harness.send(opened(3, [5, 6, 7], max_tokens=9), Credit(3, 100, 0))
    harness.run()
    spans = exporter.get_finished_spans()
    assert {link.context.trace_id for link in spans[0].links} == {7, 8}
    assert spans[0].attributes is not None and spans[0].attributes["outrider.step.sequences"] == 3
    assert len(spans) == 3 and all((span.end_time or 0) >= (span.start_time or 0) > 0 for span in spans)


def test_two_gateways_are_not_both_told_yes(models: tuple[Any, LoadedModel]) -> None:
    """What is asked for is reserved with the Open, whichever stream brings it, before the first step."""
    harness, told = TargetHarness.of(models[1], max_open_tokens=100), dict[int, list[Any]]()
    request = opened(1, prompt_of(1, 20), max_tokens=40)

    def ask(stream: int) -> None:
        told[stream] = []
        harness.engine.handle(Deliver(stream, (request, Credit(1, 1 << 20, 0)), told[stream].append))

    ask(1)
    ask(2)
    (refused,) = told[2]
    assert (refused.code, refused.reason) == (8, "BUSY") and refused.retry_after_ms > 0 and not told[1]
    harness.run()
    assert sum(len(commit.ids) for commit in told[1]) == 40
    ask(2)  # there is room again
    harness.run()
    assert sum(len(commit.ids) for commit in told[2]) == 40


def test_no_more_is_let_in_than_there_is_room_for(models: tuple[Any, LoadedModel]) -> None:
    """Prompts and max_tokens count, of a fork max_tokens alone; who is refused is told when to come back."""
    harness = TargetHarness.of(models[1], max_open_tokens=100)
    prompt = prompt_of(1, 20)
    harness.send(
        opened(1, prompt, max_tokens=30), opened(2, (), fork_of=1, max_tokens=30), opened(3, prompt, max_tokens=1)
    )
    (refused,) = harness.failures(3)
    assert (refused.code, refused.reason, refused.retry_after_ms) == (8, "BUSY", 1000)
    assert "101 tokens would be open" in refused.message and "allowed: 100" in refused.message
    harness.send(opened(70, prompt, max_tokens=2**31))  # no waiting helps
    assert harness.failures(70)[0].code == 3 and "max_tokens: is 2147483648" in harness.failures(70)[0].message
    for number in (4, 8):  # they lost their target: their room was promised
        harness.send(opened(number, prompt, output_ids=(5, 6), max_tokens=60))
        assert not harness.failures(number)
    harness.send(replace(opened(9, prompt, output_ids=(5,), max_tokens=60), resumed=True))
    assert [failure.reason for failure in harness.failures(9)] == ["BUSY"], "as any client may say"
    harness.now = 6.0
    harness.send(Close(1), Close(4), Close(8))
    harness.send(opened(5, prompt, max_tokens=50), opened(6, prompt, max_tokens=30))
    assert not harness.failures(5)
    assert 1000 < harness.failures(6)[0].retry_after_ms < 2000  # 50 tokens are to leave, 210 have in 6 s
    for number in (2, 5):
        harness.send(Credit(number, 1 << 20, 0))
    harness.run()
    assert len(harness.output(5)) == 50
    harness.send(opened(7, prompt, max_tokens=90))  # alone, whatever its size
    assert not harness.failures(7)
