"""Drafted trees at the target: one pass verifies them, and what is committed is what plain decoding would say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.engines import COUPLED, REJECTION, VOCAB, TargetHarness, opened, tiny_model

from outrider.engine.loader import LoadedModel
from outrider.rpc.messages import Credit, DraftTokens, Open
from outrider.rpc.words.sampling_params import TokenOrigin
from outrider.target_service.settings import TargetSettings

MOST = 14  # nodes


@pytest.fixture(scope="module")
def models() -> tuple[Any, LoadedModel]:
    return tiny_model()


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def random_tree(ahead: Sequence[int], rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids and parents of a tree of any shape, in which many nodes of what really follows are hidden among others."""
    ids: list[int] = []
    parents: list[int] = []
    depth_of_right = {0: 0}  # nodes plus one, that what follows passes
    for node in range(rng.randint(1, MOST)):
        parent = rng.choice(list(depth_of_right)) if rng.random() < 0.7 else rng.randint(0, node)
        depth = depth_of_right.get(parent)
        is_right = depth is not None and depth < len(ahead) and rng.random() < 0.6
        other = rng.choice([*ahead[:6], rng.randrange(VOCAB)])  # what comes later must not count before
        ids.append(ahead[depth] if is_right and depth is not None else other)
        parents.append(parent)
        if depth is not None and depth < len(ahead) and ids[-1] == ahead[depth]:
            depth_of_right[node + 1] = depth + 1
    return tuple(ids), tuple(parents)


def grow(
    harness: TargetHarness, requests: Sequence[Open], references: dict[int, list[int]], rng: random.Random
) -> None:
    """All requests side by side, each with a tree a round, until they finish."""
    seen = {request.sequence_id: 0 for request in requests}
    tokens = {request.sequence_id: list(request.prompt_ids) for request in requests}
    chains = dict.fromkeys(seen, 0)
    for request in requests:
        harness.send(request, Credit(request.sequence_id, len(request.prompt_ids) + 1, 0))
    going = list(requests)
    while going:
        harness.run()
        for request in list(going):
            number = request.sequence_id
            fresh = harness.commits(number)[seen[number] :]
            seen[number] += len(fresh)
            tokens[number] += [token for commit in fresh for token in commit.ids]
            if fresh and fresh[-1].finish_reason is not None:
                going.remove(request)
                continue
            made = len(tokens[number]) - len(request.prompt_ids)
            ids, parents = random_tree(references[number][made:], rng)
            chains[number] += 1
            harness.send(
                DraftTokens(number, chains[number], len(tokens[number]), ids, parents=parents),
                Credit(number, len(tokens[number]) + rng.randint(1, MOST), rng.randint(1, MOST), 60_000),
            )


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"acceptance": REJECTION},  # greedy all the same
    {"temperature": 1.0, "acceptance": COUPLED},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.01, "acceptance": COUPLED},
    {"repetition_penalty": 1.8, "frequency_penalty": 1.0},
    {
        "temperature": 0.9, "acceptance": COUPLED, "logit_bias": {5: 4.0}, "bad_words_ids": ((5, 6), (7,)),
        "presence_penalty": 0.5, "min_tokens": 8,
    },
]  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", range(3))
def test_output_is_that_of_plain_decoding(models: Any, sampling: dict[str, Any], seed: int) -> None:
    loaded, prompt = models[1], prompt_of(seed, 13 + seed)
    options = {"max_tokens": 40, "seed": 7 + seed, "logprobs": 2, **sampling}
    plain = TargetHarness.of(loaded)
    reference = plain.decode_plain(1, opened(1, prompt, **options))
    harness = TargetHarness.of(loaded)
    grow(harness, [opened(1, prompt, **options)], {1: reference}, random.Random(seed))
    assert harness.output(1) == reference
    commits = harness.commits(1)
    logprobs = [row for commit in commits for row in commit.logprobs]
    assert logprobs == [row for commit in plain.commits(1) for row in commit.logprobs]
    accepted = [commit.num_accepted for commit in commits]
    assert sum(accepted) > 12 and max(accepted) > 1 and any(c.num_drafted > c.num_accepted for c in commits)
    origins = {origin for commit in commits for origin in commit.origins}
    assert origins == {TokenOrigin.PLAIN, TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED, TokenOrigin.BONUS}
    assert all(c.origins[: c.num_accepted] == (TokenOrigin.ACCEPTED,) * len(c.ids[: c.num_accepted]) for c in commits)
    assert harness.engine.cache.pool.num_free == 64


def test_batch_and_chunks_and_preemption_change_nothing(models: Any) -> None:
    loaded = models[1]
    requests = [
        opened(n, prompt_of(n % 5, 5 + 3 * n), max_tokens=20, temperature=float(n % 2), acceptance=COUPLED, seed=n)
        for n in range(1, 11)
    ]
    alone = {r.sequence_id: TargetHarness.of(loaded).decode_plain(r.sequence_id, r) for r in requests}
    harness = TargetHarness.of(loaded, num_blocks=14, max_rows=40)
    grow(harness, requests, alone, random.Random(5))
    assert {r.sequence_id: harness.output(r.sequence_id) for r in requests} == alone
    assert sum(commit.num_accepted for n in alone for commit in harness.commits(n)) > 60
    assert harness.engine.cache.pool.num_free == 14


def test_one_pass_commits_a_path(models: Any) -> None:
    """And the next step finds its keys where it has to."""
    prompt, loaded = prompt_of(3), models[1]
    reference = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, max_tokens=12))
    first, *right = reference
    wrong = [(token + 1) % VOCAB for token in right]
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, prompt, max_tokens=12), Credit(1, 21, 0))
    harness.run()
    steps = harness.num_steps
    ids = (wrong[0], right[0], wrong[1], right[1], wrong[2], right[2])
    harness.send(DraftTokens(1, 0, 21, ids, parents=(0, 0, 2, 2, 4, 4)), Credit(1, 99, 16))
    harness.run()
    commit = harness.commits(1)[1]
    assert (commit.num_drafted, commit.num_accepted, list(commit.ids)) == (6, 3, right[:4])
    assert commit.origins == (*(TokenOrigin.ACCEPTED,) * 3, TokenOrigin.BONUS) and commit.timings.num_rows == 7
    assert harness.output(1) == [first, *right] and harness.num_steps == steps + 1 + 7


def test_a_cut_tree_goes_on_below_what_was_committed(models: Any) -> None:
    prompt, loaded = prompt_of(3), models[1]
    reference = TargetHarness.of(loaded).decode_plain(1, opened(1, prompt, max_tokens=12))
    harness = TargetHarness.of(loaded)
    harness.send(opened(1, prompt, max_tokens=12), Credit(1, 21, 0))
    harness.run()
    right = reference[1:]
    ids = (0, right[0], 0, right[1], 0, right[2], 0, right[3])
    harness.send(DraftTokens(1, 0, 21, ids, parents=(0, 0, 2, 2, 4, 4, 6, 6)), Credit(1, 99, 3))
    harness.run()
    assert [(c.num_drafted, c.num_accepted) for c in harness.commits(1)][1:4] == [(3, 1), (3, 1), (0, 0)]
    assert harness.output(1) == reference


def test_under_rejection_a_tree_is_dropped(models: Any) -> None:
    harness = TargetHarness.of(models[1])
    request = opened(1, prompt_of(1), max_tokens=9, temperature=1.0, acceptance=REJECTION)
    harness.send(request, DraftTokens(1, 4, 20, (5, 6), parents=(0, 0)))
    assert [commit.dropped for commit in harness.commits(1)] == [(4,)]
    assert harness.engine.scheduler.sequences[1, 1].chains.live() is None


def test_settings() -> None:
    settings = TargetSettings(model=Path("x"), head=Path("y"), speculative_token_tree="[(0,), (1,)]")
    assert settings.tree is not None and settings.tree.parents == (0, 0)
    with pytest.raises(ValueError, match="is for a head; give --head DIR"):
        TargetSettings(model=Path("x"), speculative_token_tree="[(0,)]")
    with pytest.raises(ValueError, match="allowed: a list of tuples"):
        TargetSettings(model=Path("x"), head=Path("y"), speculative_token_tree="0")
