"""What the attention kernels of an accelerator read: tensors whose shapes, and with them the grids, depend on the sizes
of the batch alone, so that a captured graph serves every batch of its size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.tree_mask import TreeMask

DEFAULT_SPLIT_KEYS = 512
LEAST_SPLIT_KEYS = 256
MOST_SPLITS = 32  # partial results of a row: they cost memory, and 32 fill a device even for one sequence
SPLIT_ROWS = 16  # beside longer prompts, sequences of up to this many rows are split over their keys ...
SPLIT_ROWS_ALONE = 64  # ... and without longer ones, up to this many: windows and trees


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A sequence without rows is padding, and so are rows past the last start: they are neither read nor attended to,
    and get zeros."""

    block_tables: Tensor  # [sequences, most blocks] int32 or int64
    query_starts: Tensor  # [sequences + 1] int32
    context_lens: Tensor  # [sequences] int32, with this step's rows
    max_query_len: int  # no sequence has more rows
    split_keys: int  # keys of one partial result, a power of two
    sliding_window: int | None
    tree: TreeMask | None
    batch_invariant: bool

    @property
    def split_rows(self) -> int:
        """Sequences of up to this many rows are split over their keys; longer ones fill the device by themselves."""
        return min(self.max_query_len, SPLIT_ROWS_ALONE if self.max_query_len <= SPLIT_ROWS_ALONE else SPLIT_ROWS)


def split_keys(max_model_len: int | None) -> int:
    """Fixed by the longest context that the model may get: a row's splits lie at the same positions in every batch."""
    if max_model_len is None:
        return DEFAULT_SPLIT_KEYS
    keys = LEAST_SPLIT_KEYS
    while keys * MOST_SPLITS < max_model_len:
        keys *= 2
    return keys
