"""The rows of acceptance: which drafted tokens of a window stay, on a chain and on a tree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernels_case import ROWS, Case, K, Place, Work, random_ids, zipf_logits
from torch import Tensor

from outrider.kernels.coupled import coupled_accept, coupled_accept_tree
from outrider.kernels.draft_sample import draft_sample
from outrider.kernels.philox import Purpose, words
from outrider.kernels.rejection import DraftWeights, Windows, accept, draw
from outrider.kernels.tree_mask import ROOT, tree_mask

TREE = 16  # rows of a window that holds a tree: the root, and a drafted token for each other
LEVELS = 4  # below the root, two children each
ALIKE = 0.5  # standard deviation of the draft's logits around the target's


def window_cases(place: Place) -> Iterator[Case]:
    """Every function that judges windows."""
    for vocab_size in place.vocab_sizes:
        for batch in place.batches:
            shape = f"vocabulary {vocab_size}, batch {batch}"
            work = partial(_accept, place, batch, vocab_size)
            yield Case("rejection.accept", shape, "gather, cumprod, clamp(target - draft), dense", work)
            yield Case("rejection.draw", shape, "torch.multinomial", partial(_draw, place, batch, vocab_size))
    for batch in place.batches:
        shape, tree = f"batch {batch}", f"batch {batch}, trees of {TREE} rows"
        yield Case("coupled.coupled_accept", shape, "==, cumprod, sum, gather", partial(_chain, place, batch))
        yield Case("coupled.coupled_accept_tree", tree, "level by level, dense", partial(_tree, place, batch))
        yield Case("tree_mask.tree_mask", tree, "row by row, booleans", partial(_tree_mask, place, batch))


def _accept(place: Place, batch: int, vocab_size: int) -> Work:
    """Against the same rule over dense vectors, which a draft beside the target would have at hand."""
    logits = zipf_logits(place, batch * ROWS, vocab_size)
    target_probs = logits.softmax(-1)
    windows = Windows.of([K] * batch, device=place.device)
    draft_logits = logits[windows.row_of_draft] + ALIKE * torch.randn(batch * K, vocab_size, device=place.device)
    samples = draft_sample(draft_logits.softmax(-1), _some_words(place, batch * K))
    owners = torch.arange(batch * K, device=place.device).repeat_interleave(samples.entry_starts.diff())
    weights = DraftWeights(samples.entry_ids, samples.entry_weights, owners)
    ids, coins = samples.token_ids, torch.rand(batch * K, dtype=torch.float64, device=place.device)
    dense = torch.zeros(batch * K, vocab_size, device=place.device)  # of the same law
    dense[owners, weights.ids] = weights.weights.float()
    dense = dense / dense.sum(-1, keepdim=True)
    dense = torch.cat((dense.view(batch, K, -1), dense.new_zeros(batch, 1, vocab_size)), 1)  # [batch, ROWS, vocab]
    every = torch.arange(batch, device=place.device)

    def against() -> tuple[Tensor, Tensor]:
        target, drafted = target_probs.view(batch, ROWS, -1), ids.view(batch, K, 1)
        target_prob, draft_prob = (probs[:, :K].gather(2, drafted).squeeze(2) for probs in (target, dense))
        accepted = coins.view(batch, K) * draft_prob < target_prob
        num_accepted = accepted.cumprod(1).sum(1)
        left = (target[every, num_accepted] - dense[every, num_accepted]).clamp_(min=0)
        return num_accepted, left / left.sum(-1, keepdim=True)

    num_bytes = batch * vocab_size * (4 + 8)  # a row of the target is read, and its rest written in float64
    return Work(lambda: accept(target_probs, windows, ids, weights, coins), against, num_bytes)


def _draw(place: Place, batch: int, vocab_size: int) -> Work:
    weights = zipf_logits(place, batch, vocab_size).double().softmax(-1)
    drawn = _some_words(place, batch)
    return Work(lambda: draw(weights, drawn), lambda: torch.multinomial(weights, 1), weights.nbytes, compared=0)


def _chain(place: Place, batch: int) -> Work:
    choices = random_ids(place, 1000, batch * ROWS)
    windows = Windows.of([K] * batch, device=place.device)
    differs = random_ids(place, 4, batch * K) == 0
    ids = choices[windows.row_of_draft] + differs

    def against() -> tuple[Tensor, Tensor]:
        own = choices.view(batch, ROWS)
        num_accepted = (own[:, :K] == ids.view(batch, K)).cumprod(1).sum(1)
        return num_accepted, own.gather(1, num_accepted[:, None]).squeeze(1)

    num_bytes = 8 * (choices.numel() + ids.numel() + 2 * batch)
    return Work(lambda: coupled_accept(choices, windows, ids), against, num_bytes, compared=2)


def _tree(place: Place, batch: int) -> Work:
    drafted_of_tree = TREE - 1
    choices, ids = random_ids(place, 3, batch * TREE), random_ids(place, 3, batch * drafted_of_tree)
    windows = Windows.of([drafted_of_tree] * batch, device=place.device)
    parents = windows.offset_of_draft // 2  # the row that judges it; drafted token i is row i + 1

    def against() -> tuple[Tensor, Tensor]:
        own, drafted, above = choices.view(batch, TREE), ids.view(batch, -1), parents.view(batch, -1)
        node = num_accepted = torch.zeros(batch, dtype=torch.int64, device=place.device)
        for _ in range(LEVELS):
            hit = (above == node[:, None]) & (drafted == own.gather(1, node[:, None]))  # [batch, drafted]
            found = hit.any(1)
            node = torch.where(found, hit.int().argmax(1) + 1, node)
            num_accepted = num_accepted + found
        return num_accepted, own.gather(1, node[:, None]).squeeze(1)

    num_bytes = 8 * (choices.numel() + 2 * ids.numel() + 2 * batch) + ids.numel()
    return Work(lambda: coupled_accept_tree(choices, windows, ids, parents), against, num_bytes, compared=2)


def _tree_mask(place: Place, batch: int) -> Work:
    one = torch.tensor([ROOT, *((row - 1) // 2 for row in range(1, TREE))], dtype=torch.int32)
    parents = one.repeat(batch).to(place.device)  # [batch * TREE]
    starts = (torch.arange(batch + 1, dtype=torch.int32) * TREE).to(place.device)
    above, every = parents.view(batch, TREE).long(), torch.arange(batch, device=place.device)

    def against() -> Tensor:
        sees = torch.zeros(batch, TREE + 1, TREE, dtype=torch.bool, device=place.device)  # ROOT is the last, empty row
        for row in range(TREE):
            sees[:, row] = sees[every, above[:, row]]
            sees[:, row, row] = True
        return sees[:, :TREE]

    num_bytes = parents.numel() * (4 + 8 + 4)  # parents, bits, depths
    return Work(lambda: tree_mask(parents, starts), against, num_bytes, compared=0)


def _some_words(place: Place, rows: int) -> Tensor:  # [rows, 4] int64
    counters = torch.arange(rows, device=place.device)
    return words(counters, counters, Purpose.DRAFT, torch.zeros_like(counters))
