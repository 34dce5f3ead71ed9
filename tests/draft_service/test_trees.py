"""A draft model's trees: nodes are the likeliest tokens behind their own paths, a tree a commit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.engines import COUPLED, GREEDY, REJECTION, SAMPLED, DraftHarness, commit, new_open, tiny_draft

from outrider.draft_service.settings import DraftSettings
from outrider.engine.batch import BatchEntry
from outrider.engine.model_runner import ModelRunner
from outrider.engine.token_tree import TokenTree, path_to
from outrider.kernels.random.reference import exponential_noise
from outrider.rpc.messages import Credit, DraftTokens

TREE = TokenTree.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (0, 1, 1), (2, 0, 0)]")
PROMPT = tuple(range(3, 40))
SEED = 77


def trees_of(events: Sequence[object]) -> list[DraftTokens]:
    return [event for event in events if isinstance(event, DraftTokens) and event.ids]


def ranked(tokens: list[int], coupled: bool) -> list[int]:
    """What may follow, the likeliest first: by the logits, or by the noise that the target meets there."""
    runner = ModelRunner(tiny_draft().model, 8)
    logits = runner.forward([BatchEntry(tokens, 0, list(range(8)), 1)])  # [1, vocab]
    if not coupled:
        return logits[0].argsort(descending=True, stable=True).tolist()
    seed, place, completion = (torch.tensor([value]) for value in (SEED, len(tokens), 0))
    noise = exponential_noise(seed, place, completion, logits.shape[1])
    return (noise / (logits / SAMPLED.temperature).softmax(-1))[0].argsort().tolist()


@pytest.mark.parametrize("coupled", [False, True], ids=["greedy", "coupled"])
def test_nodes_are_the_likeliest_tokens_behind_their_paths(coupled: bool) -> None:
    """Again after a commit, and beside another sequence."""
    harness = DraftHarness(tree=TREE)
    options = {"acceptance": COUPLED, "seed": SEED}
    sampling = SAMPLED if coupled else GREEDY
    opened = [new_open(number, PROMPT[: 30 + number], sampling, **options) for number in (1, 2)]
    events = harness.run(*opened, *(Credit(number, 1000, len(TREE)) for number in (1, 2)))
    texts = {number: list(PROMPT[: 30 + number]) for number in (1, 2)}
    for _ in range(3):
        pieces = trees_of(events)
        assert [piece.sequence_id for piece in pieces] == [1, 2]
        commits = []
        for piece in pieces:
            text = texts[piece.sequence_id]
            assert piece.parents == TREE.parents and piece.position == len(text) and piece.draft_us > 0
            for node, parent in enumerate(piece.parents):
                path = [piece.ids[at] for at in path_to(piece.parents, parent - 1)]
                assert piece.ids[node] == ranked([*text, *path], coupled)[TREE.ranks[node]]
            new = (piece.ids[0], piece.ids[4], 9)  # a path, and the target's own token
            done = commit(piece.sequence_id, len(text), *new, chain=piece.chain, num_drafted=9, num_accepted=2)
            text += new
            commits += [done]
        events = harness.run(*commits)
        harness.check()


def test_a_window_bounds_a_tree() -> None:
    harness = DraftHarness(tree=TREE)
    (piece,) = trees_of(harness.run(new_open(1, PROMPT), Credit(1, 1000, 4)))
    assert len(piece.ids) == 4 and piece.parents == TREE.cut(4).parents
    harness = DraftHarness(tree=TREE)
    (piece,) = trees_of(harness.run(new_open(1, PROMPT), Credit(1, len(PROMPT) + 2, 9)))
    assert len(piece.ids) == 2


def test_where_no_trees_are_taken_there_are_chains() -> None:
    harness = DraftHarness(tree=TREE)
    events = harness.run(
        new_open(1, PROMPT, SAMPLED, acceptance=REJECTION, one_hot=True), Credit(1, len(PROMPT) + 4, 4)
    )
    assert [(len(piece.ids), piece.parents) for piece in trees_of(events)] == [(4, ())]
    (piece,) = trees_of(harness.run(new_open(2, PROMPT), Credit(2, len(PROMPT) + 4, 4)))
    assert piece.parents
    events = harness.run(commit(2, len(PROMPT), dropped=(piece.chain,)))
    assert [(len(piece.ids), piece.parents) for piece in trees_of(events)] == [(4, ())]
    harness.check()


def test_without_blocks_for_it_there_is_a_chain() -> None:
    """Two sequences hold all blocks but one, which one tree fills."""
    harness = DraftHarness(num_blocks=7, tree=TREE)
    prompts = {1: tuple(range(3, 47)), 2: tuple(range(4, 48))}
    requests = [new_open(number, prompt) for number, prompt in prompts.items()]
    pieces = trees_of(harness.run(*requests, *(Credit(number, 44 + len(TREE), len(TREE)) for number in prompts)))
    assert [(piece.sequence_id, bool(piece.parents)) for piece in pieces] == [(1, True), (2, False)]
    assert len(pieces[0].ids) == len(pieces[1].ids) == len(TREE)
    harness.check()


def test_settings() -> None:
    with pytest.raises(ValueError, match="speculative_token_tree is drafted by --method draft_model alone"):
        DraftSettings(method="ngram", speculative_token_tree="[(0,), (1,)]")
