"""The target's random numbers: of each position the words that judge a drafted token and draw the target's own."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.random_ahead import MAX_WORD_ROWS, RandomSource
from outrider.kernels.philox import Purpose, words

PURPOSES = (Purpose.ACCEPT, Purpose.RECOVERED, Purpose.BONUS)  # the order within a row
ACCEPT, RECOVERED, BONUS = range(len(PURPOSES))


def judging_source(device: torch.device) -> RandomSource:
    """Rows are [3, 4] int64: four words under each purpose."""

    def generate(seeds: Tensor, positions: Tensor, completions: Tensor) -> Tensor:  # [n] each -> [n, 3, 4]
        repeated = [column.repeat_interleave(len(PURPOSES)) for column in (seeds, positions, completions)]
        purposes = torch.tensor([int(purpose) for purpose in PURPOSES], device=device).repeat(len(seeds))
        return words(repeated[0], repeated[1], purposes, repeated[2]).view(-1, len(PURPOSES), 4)

    return RandomSource(generate, MAX_WORD_ROWS, device)
