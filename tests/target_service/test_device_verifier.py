"""A target on a GPU that is not here: what it commits is what the host's commits, and it waits once a step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import PretendedDevice, Replayed, checkpoint, gpu, on_host
from support.engines import BLOCK, COUPLED, GRAMMAR_EOS, REJECTION, VOCAB, TargetHarness, grammars_at_once, opened
from support.heads import METHOD_OF, random_head
from support.kernels import interpreter
from support.models import SMALLEST, ascii_backend, build_decoder, tiny_config, tiny_hf_model, tiny_state

from outrider.engine.batch import StepLimits
from outrider.engine.loader import LoadedModel
from outrider.rpc.messages import Commit, Credit, DraftTokens, Open, TokenWeights
from outrider.rpc.words.sampling_params import LogprobsMode
from outrider.rpc.words.structured import StructuredOutput

__all__ = ["checkpoint", "gpu", "interpreter", "on_host"]

pytestmark = pytest.mark.compilers

LIMITS = StepLimits(max_rows=8, max_sequences=4, max_query_len=2)
MAX_TOKENS = 7
PLAIN: dict[str, dict[str, Any]] = {  # what columns say
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "acceptance": COUPLED, "seed": (1 << 64) - 3, "top_p": 0.9},
    "rejection": {"temperature": 1.3, "acceptance": REJECTION, "seed": 11, "min_p": 0.01},
    "block, cut": {"temperature": 0.8, "acceptance": BLOCK, "seed": 12, "top_k": 40},
}
CHANGED: dict[str, dict[str, Any]] = {  # what they do not
    "penalties": {"temperature": 1.0, "acceptance": COUPLED, "seed": 5, "repetition_penalty": 1.4, "min_tokens": 4},
    "bias": {"temperature": 0.0, "logit_bias": {3: 2.5}, "bad_words_ids": ((7,),), "stop_token_ids": (9,)},
}


def requests_of(kinds: dict[str, dict[str, Any]], **sampling: Any) -> list[Open]:
    return [
        opened(number, [number, *range(10, 10 + 3 * number)], max_tokens=MAX_TOKENS, **options, **sampling)
        for number, options in enumerate(kinds.values(), start=1)
    ]


def window(rng: random.Random, request: Open, tokens: list[int], right: list[int], chain: int, k: int) -> DraftTokens:
    """Drafted tokens, mostly the right ones, and their weights: fitting, none, or broken ones."""
    ids, weights = [], []
    for place in range(len(tokens) - len(request.prompt_ids), len(tokens) - len(request.prompt_ids) + k):
        ids.append(right[place] if place < len(right) and rng.random() < 0.8 else rng.randrange(VOCAB))
        others = sorted([*rng.sample(range(VOCAB), 6), ids[-1]])
        vector = TokenWeights.of(others, [rng.randint(1, 32767) for _ in others])
        broken = replace(vector, weights=vector.weights[:-4])
        weights.append(rng.choice((vector, vector, vector, None, broken)))
    return DraftTokens(request.sequence_id, chain, len(tokens), tuple(ids), tuple(weights))


def run(
    harness: TargetHarness, requests: list[Open], right: dict[int, list[int]], k: int, trees: bool = False
) -> dict[int, list[Commit]]:
    """All at once, window after window; those may be trees that no draft's weights judge."""
    rng = random.Random(3)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, len(request.prompt_ids) + 1, 0))
    for chain in range(1, 2 * MAX_TOKENS):
        harness.run()
        for request in requests:
            commits = harness.commits(request.sequence_id)
            assert not harness.failures(request.sequence_id)
            if commits[-1].finish_reason is None:
                tokens = [*request.prompt_ids, *harness.output(request.sequence_id)]
                piece = window(rng, request, tokens, right.get(request.sequence_id, []), chain, k)
                if trees and (request.sampling.greedy or request.acceptance is COUPLED):
                    parents = tuple(rng.choice((node, rng.randint(0, node))) for node in range(k))
                    piece = replace(piece, parents=parents, weights=())
                harness.send(piece, Credit(request.sequence_id, len(tokens) + k + 1, k, 60_000))
    return {request.sequence_id: harness.commits(request.sequence_id) for request in requests}


def on_device(checkpoint: Any, *, captured: bool, **options: Any) -> TargetHarness:
    loaded = build_decoder(*checkpoint, dtype="float32", device="cuda")
    harness = TargetHarness.of(loaded, **options)
    if captured:
        harness.capture(LIMITS)
    return harness


def check_equal(ours: dict[int, list[Commit]], theirs: dict[int, list[Commit]]) -> None:
    for number, commits in theirs.items():
        judged = [(c.ids, c.num_drafted, c.num_accepted, c.origins, c.finish_reason) for c in ours[number]]
        assert judged == [(c.ids, c.num_drafted, c.num_accepted, c.origins, c.finish_reason) for c in commits], number
        for mine, other in zip(ours[number], commits, strict=True):
            for my_row, row in zip(mine.logprobs, other.logprobs, strict=True):
                assert [(entry.id, entry.rank) for entry in my_row] == [(e.id, e.rank) for e in row]
                assert [entry.logprob for entry in my_row] == pytest.approx([e.logprob for e in row], abs=1e-4)


@pytest.mark.parametrize(("captured", "k"), [(False, 3), (True, 1)])
def test_all_rules_in_one_step(
    captured: bool, k: int, checkpoint: Any, on_host: LoadedModel, gpu: PretendedDevice | None
) -> None:
    requests = requests_of(PLAIN)
    plain = {r.sequence_id: TargetHarness.of(on_host).decode_plain(r.sequence_id, r) for r in requests}
    expected = run(TargetHarness.of(on_host), requests, plain, k)
    harness = on_device(checkpoint, captured=captured)
    steps = harness.engine._runner.captured
    waits_before = len(gpu.waits) if gpu is not None else 0
    check_equal(run(harness, requests, plain, k), expected)
    assert sum(c.num_accepted for commits in expected.values() for c in commits) > 4
    if gpu is not None:
        assert len(gpu.waits) - waits_before == harness.num_steps
    if steps is not None and isinstance(steps.graphs, Replayed):
        assert steps.graphs.replayed == 2 * (harness.num_steps - 1)  # all but the prompts


def test_requests_that_change_logits(checkpoint: Any, on_host: LoadedModel, gpu: PretendedDevice | None) -> None:
    """In captured steps, with others beside them."""
    requests = requests_of(CHANGED | {"block, cut": PLAIN["block, cut"]})
    expected = run(TargetHarness.of(on_host), requests, {}, 1)
    harness = on_device(checkpoint, captured=True)
    steps = harness.engine._runner.captured
    waits_before = len(gpu.waits) if gpu is not None else 0
    check_equal(run(harness, requests, {}, 1), expected)
    if gpu is not None:
        assert len(gpu.waits) - waits_before == harness.num_steps
    if steps is not None and isinstance(steps.graphs, Replayed):
        assert steps.graphs.replayed == 2 * (harness.num_steps - 1)  # all but the prompts


@pytest.mark.parametrize("captured", [False, True])
def test_a_ban_hides_no_fault(captured: bool, checkpoint: Any, gpu: PretendedDevice | None) -> None:
    """A row with a NaN is an error, also where nothing may be drawn from its place."""
    config, state = checkpoint
    faulty = state | {"lm_head.weight": state["lm_head.weight"].clone().index_fill_(0, torch.tensor([7]), torch.nan)}
    harness = on_device((config, faulty), captured=captured)
    request = opened(1, [10, 11], max_tokens=MAX_TOKENS, bad_words_ids=((7,),), **PLAIN["coupled"])
    harness.send(request, Credit(1, 4, 0))
    harness.run()
    assert harness.failures(1)


def test_changed_logits_are_told(checkpoint: Any, on_host: LoadedModel, gpu: PretendedDevice | None) -> None:
    """As log probabilities, which are read for themselves, outside captured steps."""
    mode = LogprobsMode.PROCESSED_LOGPROBS
    requests = requests_of(CHANGED | {"greedy": PLAIN["greedy"]}, logprobs=2, logprobs_mode=mode)
    expected = run(TargetHarness.of(on_host), requests, {}, 1)
    check_equal(run(on_device(checkpoint, captured=True), requests, {}, 1), expected)


def test_constraints_beside_others(checkpoint: Any, on_host: LoadedModel, gpu: PretendedDevice | None) -> None:
    """In captured steps."""
    digits = StructuredOutput(regex="[0-9]{7}")
    constrained = {f"{name}, digits": {**options, "structured_output": digits} for name, options in PLAIN.items()}
    requests = requests_of(constrained | {"coupled": PLAIN["coupled"]})
    options: dict[str, Any] = {"eos_ids": (GRAMMAR_EOS,)}
    host = [TargetHarness.of(on_host, grammars=grammars_at_once(), **options) for _ in range(6)]
    plain = {r.sequence_id: one.decode_plain(r.sequence_id, r) for r, one in zip(requests, host[1:], strict=True)}
    expected = run(host[0], requests, plain, 2)
    check_equal(run(on_device(checkpoint, captured=True, grammars=grammars_at_once(), **options), requests, plain, 2),
                expected)  # fmt: skip
    backend = ascii_backend(VOCAB, GRAMMAR_EOS)
    texts = [backend.decode([t for c in expected[number] for t in c.ids]) for number in range(1, 5)]
    assert all(text.isdigit() and len(text) == MAX_TOKENS for text in texts)


def test_trees_beside_chains(checkpoint: Any, on_host: LoadedModel, gpu: PretendedDevice | None) -> None:
    """Beside captured steps, which hold no trees."""
    requests = requests_of(PLAIN | {"penalties": CHANGED["penalties"]})
    plain = {r.sequence_id: TargetHarness.of(on_host).decode_plain(r.sequence_id, r) for r in requests}
    expected = run(TargetHarness.of(on_host), requests, plain, 4, trees=True)
    check_equal(run(on_device(checkpoint, captured=True), requests, plain, 4, trees=True), expected)
    assert {number: [t for c in expected[number] for t in c.ids] for number in (1, 2, 5)} == {
        number: plain[number] for number in (1, 2, 5)
    }
    assert sum(c.num_accepted for number in (1, 2, 5) for c in expected[number]) > 2


HEAD_REQUESTS = {"greedy": PLAIN["greedy"], "coupled": PLAIN["coupled"], "block": PLAIN["block, cut"]}


@pytest.mark.parametrize(
    "layout",
    [
        "eagle3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlp_speculator", "medusa", "p-eagle", "dspark")),
    ],
)
def test_a_head_drafts_on_the_device_what_it_drafts_on_the_host(
    gpu: PretendedDevice | None, layout: str, tmp_path: Path
) -> None:
    """From the states that a captured step leaves, or one with prompts, which is not captured."""
    sizes = {**SMALLEST, "num_hidden_layers": 2}
    hf = tiny_hf_model("llama", **sizes)
    commits: list[dict[int, list[Commit]]] = []
    for device in ("cpu", "cuda"):
        loaded = build_decoder(tiny_config("llama", **sizes), tiny_state(hf), dtype="float32", device=device)
        harness = TargetHarness.of(loaded, head=random_head(layout, tmp_path, hf, loaded))
        if device == "cuda":
            harness.capture(LIMITS)
        requests = [replace(request, method=METHOD_OF[layout]) for request in requests_of(HEAD_REQUESTS)]
        for request in requests:
            harness.send(request, Credit(request.sequence_id, 1 << 20, 1))
        harness.run()
        commits.append({request.sequence_id: harness.commits(request.sequence_id) for request in requests})
    check_equal(commits[1], commits[0])
    drafted = [commit.num_drafted for found in commits[1].values() for commit in found]
    assert sum(drafted) > len(HEAD_REQUESTS)
