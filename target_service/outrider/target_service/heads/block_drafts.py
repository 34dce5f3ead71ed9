"""Blocks of many sequences: one pass for all of their tokens, which are then drawn from left to right, each by a law
that may know those drawn before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from outrider.engine.batch import BatchEntry, build_batch
from outrider.engine.kv_cache import KVCache
from outrider.engine.staging import index_on
from outrider.proposers.drawing import Drawer
from outrider.proposers.heads.block import MASK, BlockChains, BlockGuess, BlockHead
from outrider.proposers.heads.device_block import DeviceBlocks
from outrider.proposers.tree import grow
from outrider.target_service.heads.lines import HeadLine, Offset, apart, draw_at_once


def fit_block(head: BlockHead, count: int, room: int, is_tree: bool) -> tuple[int, int]:
    """How many tokens there is room for, and how many places behind the committed ones their block takes. A tree may
    have more of them than the block has places, where there is room for all of these."""
    rows = min(head.rows, room)
    if not is_tree or rows < head.rows:
        count = max(0, min(count, rows - head.first_row))
    return count, rows if count else 0


def draft_blocks(
    head: BlockHead,
    lines: Sequence[HeadLine],
    cache: KVCache,
    drawer: Drawer,
    most: int,  # the length of the longest text
    captured: DeviceBlocks | None = None,  # None: every pass is launched
) -> None:
    """Draws the tokens of all lines that want some. The context must be there."""
    lines, size = [line for line in lines if line.count], cache.block_size
    entries = [_entry(line, min(head.rows, most - line.length, line.num_places(size) - line.length)) for line in lines]
    are_chains = all(line.tree is None for line in lines) and head.least_confidence == 0
    if captured is not None and lines and are_chains and captured.holds(lines, entries):
        before = [line.last_entry(size) for line in lines]
        drawn = captured.draw(lines, entries, before, [line.count for line in lines])
        for line, tokens in zip(lines, drawn, strict=True):
            line.drawn += tokens
    elif lines:
        _draw(head, *_guess(head, lines, entries, cache), drawer)


def _guess(
    head: BlockHead, lines: Sequence[HeadLine], entries: Sequence[BatchEntry], cache: KVCache
) -> tuple[BlockGuess, list[Offset]]:
    """Of each line as many places as it draws tokens, or its tree is deep; and of each its first one."""
    device = cache.keys[0].device
    counts = [line.count if line.tree is None else line.tree.depth for line in lines]
    starts = accumulate((len(entry.token_ids) for entry in entries), initial=0)
    firsts = accumulate(counts, initial=0)
    places = [(start + head.first_row, count) for start, count in zip(starts, counts, strict=False)]
    rows = [first + place for first, count in places for place in range(count)]
    batch = build_batch(entries, cache.block_size, device)
    guess = head.draft(replace(batch, logit_rows=index_on(rows, device)), cache)
    return guess, list(zip(lines, firsts, strict=False))


def _entry(line: HeadLine, rows: int) -> BatchEntry:
    """The last committed token, whose states are not known, and masks."""
    sequence = line.target.sequence
    return BatchEntry([sequence.tokens[-1], *[MASK] * (rows - 1)], line.length, sequence.block_table, 0)


def _draw(head: BlockHead, guess: BlockGuess, lines: list[Offset], drawer: Drawer) -> None:
    """Place after place, but for lines of which nothing hangs on the tokens before."""
    going = [pair for pair in lines if pair[0].tree is None]
    free, going = apart(going) if head.is_independent else ([], going)
    if free:
        rows = [offset + place for line, offset in free for place in range(line.count)]
        logits = head.of_target(guess.logits[index_on(rows, guess.logits.device)])
        draw_at_once([line for line, _ in free], logits, drawer)
    _draw_in_turn(head, guess, going, drawer)
    _draw_trees(head, guess, [pair for pair in lines if pair[0].tree is not None], drawer)


def _draw_trees(head: BlockHead, guess: BlockGuess, lines: list[Offset], drawer: Drawer) -> None:
    """Level by level: what may follow a node is the law of the next place, behind that node's token."""
    device, memory = guess.logits.device, None
    offsets = {id(line.tree): offset for line, offset in lines}
    last = {id(line.tree): line.last_id for line, _ in lines}
    forks = [line.fork(line.tree) for line, _ in lines if line.tree is not None]
    depth = 0
    while forks:
        places = torch.tensor([offsets[id(fork.tree)] + depth for fork in forks], device=device)
        before = [fork.tree.ids[fork.node] if fork.node >= 0 else last[id(fork.tree)] for fork in forks]
        rows = torch.tensor(before, device=device)
        logits, memory = head.at(guess, BlockChains(places, rows, memory, partial(drawer.adjusted, rows=forks)))
        grown = grow(dict(enumerate(forks)), drawer.draw(logits, forks))
        nodes = [(one, node) for one in grown for node in one.tree.branching()]
        followed = [one.rows[one.tree.level.index(node)] for one, node in nodes]
        forks, depth = [one.fork.at(node) for one, node in nodes], depth + 1
        memory = None if memory is None else memory[index_on(followed, device)]


def _draw_in_turn(head: BlockHead, guess: BlockGuess, going: list[Offset], drawer: Drawer) -> None:
    device, memory = guess.logits.device, None
    while going:
        rows = [line for line, _ in going]
        places = torch.tensor([offset + len(line.drawn) for line, offset in going], device=device)
        before = torch.tensor([line.last_id for line in rows], device=device)
        chains = BlockChains(places, before, memory, partial(drawer.adjusted, rows=rows))
        logits, memory = head.at(guess, chains)
        drawn = drawer.draw(logits, rows)
        ends = _unsure(head, guess, chains, rows)
        triples = zip(rows, drawn, ends, strict=True)
        kept = [index for index, (line, token, is_end) in enumerate(triples) if line.take(None if is_end else token)]
        going = [going[index] for index in kept]
        memory = None if memory is None else memory[index_on(kept, device)]


def _unsure(head: BlockHead, guess: BlockGuess, chains: BlockChains, lines: Sequence[HeadLine]) -> list[bool]:
    """Whose next token the head holds too unlikely to be taken. That hangs on the tokens before it and not on itself,
    so that under rejection a chain may end there; blocks are judged whole, and have the length that was asked for."""
    sure = head.confidence(guess, chains) if head.least_confidence > 0 else None
    if sure is None:
        return [False] * len(lines)
    below: list[bool] = (sure < head.least_confidence).tolist()
    return [found and not line.target.by_block for found, line in zip(below, lines, strict=True)]
