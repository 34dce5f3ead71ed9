"""Sequences that move on by one token on the device."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels import dispatch
from outrider.kernels.sampling.reference import advance

BLOCK = 4
CONTEXTS = [0, 1, 4, 7, 8, 0]  # tokens with the next one; 0 is padding


def state(device: torch.device | str) -> list[torch.Tensor]:
    tables = torch.arange(6 * 5, dtype=torch.int32).view(6, 5) + 100
    lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    positions = (lens - 1).clamp(min=0)
    slots = tables.gather(1, (positions // BLOCK).long()[:, None]).squeeze(1) * BLOCK + positions % BLOCK
    columns = (positions, slots.masked_fill(lens == 0, -1), lens, tables)
    return [column.to(device, torch.int32) for column in columns]


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_positions_slots_and_lengths(passes: int, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = torch.tensor([passes], dtype=torch.int32)
    expected = state("cpu")
    advance(*expected, ran, BLOCK)
    positions, slots, lens, tables = expected
    moved = 1 if passes else 0
    for index, length in enumerate(CONTEXTS):
        at = length - 1 + moved
        wanted = (at, int(tables[index, at // BLOCK]) * BLOCK + at % BLOCK, length + moved) if length else (0, -1, 0)
        assert (int(positions[index]), int(slots[index]), int(lens[index])) == wanted
    monkeypatch.setattr(dispatch, "runs_triton", lambda x: True)
    found = state(triton_device)
    advance(*found, ran.to(triton_device), BLOCK)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
