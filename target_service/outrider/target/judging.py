"""How a device judges the windows of a step: kernels over columns of numbers, nothing read on the host, so that it can
be captured and launched behind the pass.

Windows of every rule share one call. What a rule needs more is launched where one of the windows has it: an arg max of
every row under greedy, the race under coupling, coins and the draw from what is left under rejection. Random numbers
are drawn where they are used: counters take no memory, which is what a device is short of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.device_sampling import sampling_columns
from outrider.engine.staging import Column, StagedColumns
from outrider.kernels.coupled import coupled_accept, coupled_draw
from outrider.kernels.logits_to_probs import RowSampling, greedy_choice, logits_to_probs
from outrider.kernels.philox import Purpose, words
from outrider.kernels.rejection import Windows, accept_uniforms, draw
from outrider.target.rule import Rule

COUNTER_COLUMNS = ("seeds", "positions", "completions")  # of each row
DRAFT_COLUMNS = ("draft_ids", "row_of_draft", "window_of_draft", "offset_of_draft")  # no more of them than rows
WINDOW_COLUMNS = ("row_starts", "num_rows", "num_drafted", "draft_starts", "rules")


def judging_columns(num_rows: int, num_windows: int, num_entries: int) -> list[Column]:
    """What `judge` reads; the entries of draft weights come last, since there may be few."""
    return [
        *sampling_columns(num_rows),
        *(Column(name, torch.int64, num_rows) for name in (*COUNTER_COLUMNS, *DRAFT_COLUMNS)),
        Column("greedy_rows", torch.int32, num_rows),
        *(Column(name, torch.int64, num_windows) for name in WINDOW_COLUMNS),
        Column("entry_starts", torch.int64, num_rows + 1),
        Column("entries", torch.int32, 2 * num_entries),  # the id and the weight of one, then those of the next
    ]


def judge(
    logits: Tensor,  # [rows, vocab] float32
    columns: StagedColumns,
    sampling: RowSampling,
    hardest: Rule,  # the last of the rules of the windows
) -> Tensor:  # [2 n + rows] int64
    """Of each window how many drafted tokens are accepted, then of each the token after them (-1: none), then which
    rows are invalid."""
    windows = Windows(*(columns[name] for name in _WINDOWS))
    own, invalid = greedy_choice(logits, sampling)  # [rows] each
    own = own.masked_fill(invalid, -1)
    probs = logits
    if hardest > Rule.GREEDY:
        probs, _ = logits_to_probs(logits, sampling)  # [rows, vocab]
        seeds, positions, completions = (columns[name] for name in COUNTER_COLUMNS)  # [rows] each
        raced = coupled_draw(probs, seeds, positions, completions)
        own = torch.where(columns["greedy_rows"] != 0, own, raced)
    accepted, next_ids = coupled_accept(own, windows, columns["draft_ids"])  # [n] each
    if hardest == Rule.REJECTION:
        rejects = columns["rules"] == Rule.REJECTION  # [n]
        accepted_by_coin, drawn = _judge_by_coins(probs, columns, windows)
        accepted = torch.where(rejects, accepted_by_coin, accepted)
        next_ids = torch.where(rejects, drawn, next_ids)
    return torch.cat((accepted, next_ids, invalid.long()))


def _judge_by_coins(probs: Tensor, columns: StagedColumns, windows: Windows) -> tuple[Tensor, Tensor]:
    """Rejection sampling of all windows: the numbers accepted and the next ids, [n] int64 each."""
    from outrider.kernels.rejection_triton import PackedEntries, accept_packed

    seeds, positions, completions = (columns[name] for name in COUNTER_COLUMNS)  # [rows] each
    coins = accept_uniforms(words(seeds, positions, Purpose.ACCEPT, completions))  # [rows]
    ids, weights = columns["entries"].view(-1, 2).unbind(1)  # [entries] each
    entries = PackedEntries(ids.contiguous(), weights.contiguous(), columns["entry_starts"])
    accepted, left = accept_packed(probs, windows, columns["draft_ids"], entries, coins[windows.row_of_draft])
    rows = windows.next_rows(accepted)  # [n]
    purposes = torch.where(accepted == windows.num_drafted, int(Purpose.BONUS), int(Purpose.RECOVERED))  # [n]
    return accepted, draw(left, words(seeds[rows], positions[rows], purposes, completions[rows]))


_WINDOWS = ("row_starts", "num_rows", "num_drafted", *DRAFT_COLUMNS[1:], "draft_starts")  # the fields of Windows
